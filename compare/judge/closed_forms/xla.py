"""What XLA on a CPU makes of jax-compiler's layouts, where that is not what jax-manual sends.

Each row that differs, with the names of its mechanisms (`compare.judge.known_deviations`). A mechanism gives
the row's bytes at every size of the model: tests/compare/test_ledger_lines.py holds them to two. What XLA
makes of sequence parallelism, and what it gathers in a fully sharded pipeline, no mechanism gives: those rows
are unexplained.
"""

from compare.contract.communication import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    GRADIENTS,
    LOSS,
    TIED_GRADIENTS,
)
from compare.judge.closed_forms.communication import Bytes
from compare.judge.closed_forms.sizes import bytes_of, microbatches_of, stream_bytes, ticks_of
from compare.numerics.parameters import block_parameters, end_parameters
from compare.spec.axes import DP_REPLICATE, DP_SHARD, PP, SHARDED_FROM, TP, joined
from compare.spec.experiment import Experiment

Deviations = dict[tuple[str, str, str], tuple]
"""(kind, axis, purpose) -> bytes instead of the closed form's, one or several that can be; last the names of
the mechanisms."""

SLICED = "all-reduce and slice"
TWICE = "tied gradient twice"
AT_ONCE = "replicas and shards at once"
IDLE = "ticks of all stages"
SHARED = "ends on every stage"
ROLLED = "waiting microbatches move along"
ITS_LOSS = "loss by the compiler"


def by_xla(experiment: Experiment, expected: Bytes) -> Deviations:
    """Rows of jax-compiler that are not jax-manual's, for a reason that is known.

    Args:
        experiment: with `layout.remat` resolved.
        expected: the closed form, on one rank of the pipeline.
    """
    layout = experiment.layout
    found: Deviations = {}
    if layout.sequence_parallel:
        return found
    reduce = ("all_reduce", DP_REPLICATE, GRADIENTS)
    if layout.pp == 1 and not layout.zero and reduce in expected and (again := _again(experiment)):
        found[reduce] = (expected[reduce] + again, TWICE)
    if layout.zero:
        found |= _fully_sharded(experiment, expected)
    if layout.tp > 1:
        found |= tensor_parallel(experiment, expected)
    if layout.pp > 1:
        found |= _pipeline(experiment)
    return found


def _fully_sharded(experiment: Experiment, expected: Bytes) -> Deviations:
    """Gradients are all-reduced, whole, and each device keeps its slice."""
    layout = experiment.layout
    scatter, reduce = ("reduce_scatter", DP_SHARD, GRADIENTS), ("all_reduce", DP_SHARD, GRADIENTS)
    if layout.pp > 1 and layout.zero < SHARDED_FROM["gradients"]:
        return {scatter: (0, SLICED), reduce: (expected[scatter], SLICED)}
    if layout.pp > 1:
        return {scatter: (0, SLICED), reduce: (_reduced_in_ticks(experiment), f"{SLICED}, {IDLE}")}
    again = _again(experiment)
    reduced, names = expected[scatter] + again, f"{SLICED}, {TWICE}" if again else SLICED
    if layout.dp_replicate > 1 and microbatches_of(experiment) == 1:
        return {
            scatter: (0, SLICED),
            ("all_reduce", DP_REPLICATE, GRADIENTS): (0, AT_ONCE),
            ("all_reduce", joined(DP_REPLICATE, DP_SHARD), GRADIENTS): (reduced, f"{names}, {AT_ONCE}"),
        }
    return {scatter: (0, SLICED), reduce: (reduced, names)}


def _again(experiment: Experiment) -> float:
    """Bytes of the tied gradient that are reduced once more: in each pass, if each reduces for itself."""
    passes = microbatches_of(experiment)
    if experiment.layout.zero < SHARDED_FROM["gradients"] and passes > 1:
        return 0.0  # the sum of all passes is reduced
    return passes * _token_bytes(experiment)


def _reduced_in_ticks(experiment: Experiment) -> float:
    """Bytes of gradients: those of a stage's layers in every tick, those of the ends once a step."""
    model = experiment.model
    layers = model.n_layer // experiment.layout.pp * bytes_of(block_parameters(model, 0), experiment)
    return _ends_bytes(experiment) + _token_bytes(experiment) + ticks_of(experiment) * layers


def tensor_parallel(
    experiment: Experiment,
    expected: Bytes,
    *,
    kind: str = "all_reduce",
    names: str = ITS_LOSS,
    summed: float = 0,
    and_summed: str = "",
) -> Deviations:
    """The loss's three numbers a position are reduced among the activations: nothing tells them apart.

    The third is the target's logit, in forward or, computed anew, in backward.

    Args:
        experiment, expected: as of `by_xla`.
        kind: of the closed form's collectives, which XLA makes all-reduces of.
        names: of the mechanisms.
        summed, and_summed: bytes that are reduced among the activations' gradients, too, and their mechanism.
    """
    layout = experiment.layout
    passes, stream = experiment.train.gradient_accumulation_steps, stream_bytes(experiment)
    number = passes * stream / experiment.model.n_embd / layout.pp
    if layout.pp == 1:
        forward, backward = (expected[kind, TP, of] for of in (ACTIVATIONS, ACTIVATION_GRADIENTS))
    else:
        held = 2 * experiment.model.n_layer // layout.pp
        of_layers = held * ticks_of(experiment) * stream / layout.microbatches
        forward = backward = of_layers + passes * stream / layout.pp
        names = f"{IDLE}, {SHARED}, {names}"
    backward += summed
    return {
        ("all_reduce", TP, LOSS): (0, ITS_LOSS),
        ("all_reduce", TP, ACTIVATIONS): (forward + 3 * number, forward + 2 * number, names),
        ("all_reduce", TP, ACTIVATION_GRADIENTS): (backward, backward + number, names + and_summed),
    }


def _pipeline(experiment: Experiment) -> Deviations:
    """Stages roll at each tick, and the lane of what waits with them; and once before the first."""
    layout = experiment.layout
    message = stream_bytes(experiment) / layout.microbatches
    rolled = (2 * ticks_of(experiment) + 1) * message
    shared = _ends_bytes(experiment) + _token_bytes(experiment)
    return {
        ("permute", PP, ACTIVATIONS): (rolled, ROLLED),
        ("permute", PP, ACTIVATION_GRADIENTS): (rolled, ROLLED),
        ("all_reduce", PP, TIED_GRADIENTS): (0, SHARED),
        ("all_reduce", PP, GRADIENTS): (shared, f"{SHARED}, {TWICE}"),
    }


def _token_bytes(experiment: Experiment) -> float:
    (token, _), _ = end_parameters(experiment.model)
    return bytes_of([token], experiment)


def _ends_bytes(experiment: Experiment) -> float:
    embeddings, norm = end_parameters(experiment.model)
    return bytes_of([*embeddings, *norm], experiment)
