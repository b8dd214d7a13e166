"""What XLA on a CPU makes of jax-compiler's layouts, where that is not what jax-manual sends.

Rows that differ, each with the name of its pattern (`compare.judge.known_deviations`). Written down after
their ledgers were seen, of jax 0.10.2: they say of what a row's bytes are made;
tests/compare/test_ledger_numbers.py holds them to another size. Another version of XLA, or a GPU, may do
otherwise: then a row is not explained. Numbers that travel along in a tuple are left out.
"""

from compare.contract.communication import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    GRADIENTS,
    LOSS,
    PARAMETERS,
    REPLICATED_GRADIENTS,
    TIED_GRADIENTS,
)
from compare.judge.closed_forms.communication import Bytes
from compare.judge.closed_forms.sizes import bytes_of, microbatches_of, stream_bytes
from compare.numerics.parameters import block_parameters, end_parameters
from compare.spec.axes import DP_REPLICATE, DP_SHARD, PP, SHARDED_FROM, TP, joined
from compare.spec.experiment import Experiment

Deviations = dict[tuple[str, str, str], tuple]
"""(kind, axis, purpose) -> bytes instead of the closed form's, one or several that can be; last the pattern's
name."""

SLICED = "all-reduce and slice"
TWICE = "tied gradient twice"
IDLE = "ticks of all stages"
SHARED = "ends on every stage"
ROLLED = "waiting microbatches move along"
ITS_LOSS = "loss by the compiler"
AT_ONCE = "replicas and shards at once"
TABLE = "embeddings gathered"
NORMS = "norms reduced in each pass"


def by_xla(experiment: Experiment, expected: Bytes) -> Deviations:
    """Rows of jax-compiler that are not jax-manual's.

    Args:
        experiment: with `layout.remat` resolved.
        expected: the closed form, on one rank of the pipeline.
    """
    layout = experiment.layout
    found: Deviations = {}
    reduce = ("all_reduce", DP_REPLICATE, GRADIENTS)
    if layout.pp == 1 and not layout.zero and reduce in expected and (again := _again(experiment)):
        found[reduce] = (expected[reduce] + again, TWICE)
    if layout.zero:
        found |= _fully_sharded(experiment, expected)
    if layout.tp > 1:
        found |= _tensor_parallel(experiment, expected)
    if layout.pp > 1:
        found |= _pipeline(experiment, expected)
    return found


def _fully_sharded(experiment: Experiment, expected: Bytes) -> Deviations:
    """XLA on a CPU has no pass that makes an all-reduce and a slice a reduce-scatter."""
    layout = experiment.layout
    scatter = ("reduce_scatter", DP_SHARD, GRADIENTS)
    if layout.pp > 1:
        return {scatter: (0, SLICED)} | _fully_sharded_pipeline(experiment)
    again = _again(experiment)
    reduced, pattern = expected[scatter] + again, f"{SLICED}, {TWICE}" if again else SLICED
    if layout.dp_replicate > 1 and microbatches_of(experiment) == 1:
        return {
            scatter: (0, SLICED),
            ("all_reduce", DP_REPLICATE, GRADIENTS): (0, AT_ONCE),
            ("all_reduce", joined(DP_REPLICATE, DP_SHARD), GRADIENTS): (reduced, f"{pattern}, {AT_ONCE}"),
        }
    return {scatter: (0, SLICED), ("all_reduce", DP_SHARD, GRADIENTS): (reduced, pattern)}


def _again(experiment: Experiment) -> float:
    """Bytes of the tied gradient that are reduced once more: in each pass, if each reduces for itself."""
    layout, passes = experiment.layout, microbatches_of(experiment)
    if layout.zero < SHARDED_FROM["gradients"] and passes > 1:
        return 0.0  # the sum of all passes is reduced
    (token, position), _ = end_parameters(experiment.model)
    again = bytes_of([token], experiment)
    if layout.sequence_parallel:  # a gathered table has a whole gradient, and positions are split
        again = layout.tp * again - (1 - 1 / layout.tp) * bytes_of([position], experiment)
    return passes * again


def _fully_sharded_pipeline(experiment: Experiment) -> Deviations:
    """Every tick gathers and reduces the layers; ends are gathered and reduced once a step."""
    model, layout = experiment.model, experiment.layout
    block, (embeddings, norm) = block_parameters(model, 0), end_parameters(model)
    held = model.n_layer // layout.pp
    layers = held * bytes_of(block, experiment)
    ends, token = bytes_of([*embeddings, *norm], experiment), bytes_of(embeddings[:1], experiment)
    found: Deviations = {
        ("all_reduce", DP_SHARD, GRADIENTS): (ends + token + _ticks(experiment) * layers, f"{SLICED}, {IDLE}")
    }
    if layout.zero >= SHARDED_FROM["parameters"]:
        unneeded = held * bytes_of([p for p in block if p.name.endswith("mlp.down.bias")], experiment)
        norms = held * bytes_of(
            [p for p in block if ".norm" in p.name and p.name.endswith("scale")], experiment
        )
        gathered = ends + _ticks(experiment) * (2 * layers - unneeded + norms)
        found["all_gather", DP_SHARD, PARAMETERS] = (gathered, IDLE)
    return found


def _tensor_parallel(experiment: Experiment, expected: Bytes) -> Deviations:
    """The loss's three numbers a position are reduced among the activations: nothing tells them apart."""
    layout = experiment.layout
    if layout.sequence_parallel:
        return _sequence_parallel(experiment, expected) if layout.pp == 1 else {}
    passes, stream = experiment.train.gradient_accumulation_steps, stream_bytes(experiment)
    number = passes * stream / experiment.model.n_embd / layout.pp
    out, back = ("all_reduce", TP, ACTIVATIONS), ("all_reduce", TP, ACTIVATION_GRADIENTS)
    if layout.pp == 1:
        forward, backward, pattern = expected[out], expected[back], ITS_LOSS
    else:
        held = 2 * experiment.model.n_layer // layout.pp
        of_layers = held * _ticks(experiment) * stream / layout.microbatches
        forward = backward = of_layers + passes * stream / layout.pp
        pattern = f"{IDLE}, {SHARED}, {ITS_LOSS}"
    return {
        ("all_reduce", TP, LOSS): (0, ITS_LOSS),
        out: (forward + 3 * number, forward + 2 * number, pattern),
        back: (backward, backward + number, pattern),
    }


def _sequence_parallel(experiment: Experiment, expected: Bytes) -> Deviations:
    """Positions split by a constraint alone: the embeddings are looked up in the gathered table."""
    model, passes = experiment.model, experiment.train.gradient_accumulation_steps
    stream, number = passes * stream_bytes(experiment), passes * stream_bytes(experiment) / model.n_embd
    of_layers = 2 * model.n_layer * stream
    itemsize = stream / (passes * _positions(experiment) * model.n_embd)
    table, positions = (itemsize * size * model.n_embd for size in (model.vocab_size, model.block_size))
    norms = passes * itemsize * model.n_embd * (4 * model.n_layer + 1)
    gathered = expected["all_gather", TP, ACTIVATIONS] + table
    back = of_layers
    if experiment.layout.zero >= SHARDED_FROM["gradients"] or passes == 1:
        back += passes * positions
    else:
        gathered += positions
    reduced = of_layers + stream + passes * table + norms
    return {
        ("reduce_scatter", TP, ACTIVATIONS): (0, SLICED),
        ("reduce_scatter", TP, ACTIVATION_GRADIENTS): (0, SLICED),
        ("all_reduce", TP, LOSS): (0, ITS_LOSS),
        ("all_reduce", TP, REPLICATED_GRADIENTS): (0, NORMS),
        ("all_reduce", TP, ACTIVATIONS): (
            of_layers + 2 * number,
            of_layers + 3 * number,
            f"{SLICED}, {TABLE}, {ITS_LOSS}",
        ),
        ("all_gather", TP, ACTIVATIONS): (gathered, TABLE),
        ("all_reduce", TP, ACTIVATION_GRADIENTS): (
            reduced + number,
            reduced,
            f"{SLICED}, {TABLE}, {NORMS}, {ITS_LOSS}",
        ),
        ("all_gather", TP, ACTIVATION_GRADIENTS): (back, TABLE),
    }


def _positions(experiment: Experiment) -> float:
    """Of a device's rows in one pass."""
    return experiment.train.batch_size / experiment.layout.data_parallel * experiment.model.block_size


def _pipeline(experiment: Experiment, expected: Bytes) -> Deviations:
    """Stages roll at each tick, and the lane of what waits with them; and once before the first."""
    layout = experiment.layout
    message = stream_bytes(experiment) / layout.microbatches / (layout.tp if layout.sequence_parallel else 1)
    rolled = (2 * _ticks(experiment) + 1) * message
    embeddings, norm = end_parameters(experiment.model)
    shards = layout.dp_shard if layout.zero == 1 else 1
    shared = (bytes_of([*embeddings, *norm], experiment) + bytes_of(embeddings[:1], experiment)) / shards
    return {
        ("permute", PP, ACTIVATIONS): (rolled, ROLLED),
        ("permute", PP, ACTIVATION_GRADIENTS): (rolled, ROLLED),
        ("all_reduce", PP, TIED_GRADIENTS): (0, SHARED),
        ("all_reduce", PP, GRADIENTS): (shared, f"{SHARED}, {TWICE}"),
    }


def _ticks(experiment: Experiment) -> int:
    """Of forward, and as many of backward: all stages work in each, the idle ones on what nobody needs."""
    layout = experiment.layout
    return microbatches_of(experiment) * layout.chunks + layout.pp - 1
