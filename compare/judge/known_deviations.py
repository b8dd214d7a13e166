"""Why an engine sends something else than the closed form of its layout: patterns, mechanisms with names.

A pattern explains a row only if it gives the row's bytes (`closed_forms.xla`, `closed_forms.library`), but
for whole scalars that go along in a tuple, and padding where sizes do not divide. Of what nothing explains
`judge.unexplained` knows what was seen before.
"""

from collections.abc import Mapping

from compare.contract.communication import GRADIENTS, REPLICATED_GRADIENTS, TIED_GRADIENTS
from compare.judge.closed_forms import dtensor, library, typed, xla
from compare.judge.closed_forms.communication import Bytes
from compare.judge.closed_forms.xla import Deviations
from compare.numerics.parameters import (
    MLP_RATIO,
    block_parameters,
    end_parameters,
    parameter_table,
    storage_dtype,
)
from compare.spec.axes import DP_SHARD
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment

ALONG, PADDED = "numbers sent along", "padding"
PATTERNS = {
    xla.SLICED: "all-reduce + slice = a logical reduce-scatter: XLA on a CPU has no pass that fuses the two. "
    "A ring sends twice the bytes.",
    xla.TWICE: "the token embedding is used at both ends; XLA reduces the gradient of each use, and adds "
    "them up after that.",
    xla.AT_ONCE: "with one pass XLA sums over replicas and shards in one all-reduce, and slices after that.",
    xla.IDLE: "stages are a dim of the arrays (jaxpar/compiler/pipeline_parallel.py): all of them work at "
    "each of the m + p - 1 ticks, and what idle ones reduce and drop is sent, too.",
    xla.SHARED: "embedding, loss and their parameters are on every stage, each with its share of the "
    "microbatches: so are their collectives, and their gradients are summed over pp.",
    xla.ROLLED: "the microbatches that wait lie across the stages, and roll with those at work: two messages "
    "a tick, and one before the first (`run_pipeline`).",
    xla.ITS_LOSS: "the three numbers a position that the loss needs are reduced among the activations, or "
    "one of them among their gradients: nothing tells them apart.",
    typed.EAGER: "the gradient of what is whole along tp, and used on a part of the positions, is summed at "
    "each use, in every pass: its type is whole, so that nothing unreduced can wait.",
    typed.AT_ONCE: "ends of a pipeline are on every stage: their gradients are summed over stages and "
    "replicas in one all-reduce.",
    typed.ONCE: "gradients of all microbatches of a pipeline are added up unreduced, and summed over devices "
    "once a step.",
    typed.THRICE: "a tick computes its stage anew before backward, and within it each layer: the stage "
    "gathers all, and the layer all but the bias that is added last.",
    library.OWNERS: "each parameter's moments are on one rank: DDP all-reduces gradients, and owners "
    "broadcast what they updated.",
    library.EACH_PASS: "SHARD_GRAD_OP gathers for each accumulated pass, and frees after its backward; "
    "torch-manual keeps what it gathered for the step, and under ZeRO-2 never splits parameters.",
    library.ROOT_STAYS: "FSDP2 does not reshard its root (embeddings, last norm) after forward: it is needed "
    "first in backward.",
    library.BLOCKS_STAY: "PyTorch's schedules reshard after the last backward alone: a forward that follows "
    "a backward gathers nothing.",
    library.REDUCED_LOSS: "DTensor's loss reduces maximum, sum and target logit of each position over tp; "
    "torch-manual gathers all three at once.",
    library.ROW_BIASES: "a bias that is added to a partial product has the gathered gradient of its output: "
    "its own needs no reduction over tp.",
    library.NOT_SCATTERED: "FSDP2 reduces whole gradients over tp, and then scatters them over dp_shard.",
    library.USED_MAP: "under PyTorch's schedules DDP looks for unused parameters, and its ranks tell each "
    "other which they used, an int32 each.",
    dtensor.SCATTERED: "the derivative of a gather scatters, and so does a gradient that is said to "
    "accumulate in shards: in each pass. torch-manual adds up whole gradients, and scatters the sum.",
    dtensor.ONCE: "embeddings and last norm are gathered with the first forward of a step and stay to its "
    "end; blocks are gathered for each forward and again for its backward.",
    ALONG: "XLA's combiner sends the loss, and the leaves' parts of the norm, in the same all-reduce: at "
    "most a number for each leaf and one more.",
    PADDED: "sizes that the shards do not divide: at most a row of each parameter for each device.",
}
"""The explanation of each pattern, by its name."""

OF_SHARDS = (GRADIENTS, REPLICATED_GRADIENTS, TIED_GRADIENTS)
"""What goes along other axes in shards, too, where parameters or their gradients are sharded."""


def explained(
    engine: str,
    experiment: Experiment,
    *,
    expected: Bytes,
    found: Mapping[tuple[str, str, str], int],
    stage: int,
) -> dict[tuple[str, str, str], str]:
    """The patterns that give the bytes which a ledger has, and the closed form has not.

    Args:
        engine: a name in ENGINES.
        experiment: as it was run, with `layout.remat` resolved.
        expected, found: by kind, axis and purpose, on one rank of the pipeline.
        stage: that rank.

    Returns:
        Names in PATTERNS, joined by commas, for the rows that they explain.
    """
    deviations = _deviations(engine, experiment, expected, stage)
    why = {}
    for key in dict.fromkeys((*expected, *found)):
        size = found.get(key, 0)
        usual = expected.get(key, 0.0)
        *predicted, pattern = deviations.get(key, (usual, ""))
        also = (_allowance(engine, experiment, key, one, size) for one in predicted)
        right = next((words for words in also if words is not None), None)
        if right is not None and size != usual:
            why[key] = ", ".join(filter(None, (pattern, right)))
    return why


def _deviations(engine: str, experiment: Experiment, expected: Bytes, stage: int) -> Deviations:
    match ENGINES[engine].sends_by:
        case "xla":
            return xla.by_xla(experiment, expected)
        case "types":
            return typed.by_types(experiment, expected)
        case "pytorch":
            return library.by_pytorch(engine, experiment, expected, stage=stage)
        case "dtensor":
            return dtensor.by_dtensor(experiment, expected)
    return {}


def _allowance(
    engine: str, experiment: Experiment, key: tuple[str, str, str], predicted: float, size: int
) -> str | None:
    """What is to be added to a pattern: '' if its bytes are right, None if nothing makes them right."""
    kind, axis, purpose = key
    beyond = size - predicted
    if beyond == 0:
        return ""
    by_xla, number = ENGINES[engine].sent_by_xla and kind == "all_reduce", storage_dtype(experiment).itemsize
    if by_xla and predicted and 0 < beyond <= _most_scalars(experiment) * number and not beyond % number:
        return ALONG
    is_split = experiment.layout.zero or experiment.layout.tp > 1
    is_of_shards = axis == DP_SHARD or (is_split and purpose in OF_SHARDS)
    if predicted and 0 < beyond <= _most_padding(experiment, predicted) and is_of_shards:
        return PADDED
    return None


def _most_scalars(experiment: Experiment) -> int:
    """Numbers that may go along: the squared norm of each leaf (blocks are stacked in one), and the loss."""
    embeddings, norm = end_parameters(experiment.model)
    return len([*embeddings, *block_parameters(experiment.model, 0), *norm]) + 1


def _most_padding(experiment: Experiment, predicted: float) -> float:
    """Bytes: a row of each parameter for each device, as often as all of them are sent; 0 if sizes divide."""
    model, shards = experiment.model, experiment.layout.dp_shard * experiment.layout.tp
    if all(size % shards == 0 for size in (model.vocab_size, model.block_size, model.n_embd)):
        return 0.0
    itemsize, table = storage_dtype(experiment).itemsize, parameter_table(model)
    longest_row = MLP_RATIO * model.n_embd
    whole = itemsize * sum(p.size for p in table)
    return itemsize * (shards - 1) * len(table) * longest_row * -(-predicted // whole)
