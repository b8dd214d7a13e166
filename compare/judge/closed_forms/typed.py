"""What XLA on a CPU makes of jax-explicit's layouts, where that is not what jax-manual sends.

Casts say what is sent, so that less is left to XLA than under jax-compiler: gradients are summed once, a tied
embedding's with its other use, and all that sequence parallelism sends has its mechanism. What remains are
the ways of XLA's own (`closed_forms.xla`), and one of types: the gradient of what is whole along tp, and used
on parts of a sequence, is summed at each use (EAGER).
"""

from compare.contract.communication import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    GRADIENTS,
    PARAMETERS,
    REPLICATED_GRADIENTS,
    TIED_GRADIENTS,
)
from compare.judge.closed_forms.communication import Bytes
from compare.judge.closed_forms.library import ROW_BIAS
from compare.judge.closed_forms.sizes import bytes_of, stream_bytes, ticks_of
from compare.judge.closed_forms.xla import IDLE, ITS_LOSS, ROLLED, SHARED, SLICED, Deviations, tensor_parallel
from compare.numerics.parameters import block_parameters, end_parameters
from compare.spec.axes import DP_REPLICATE, DP_SHARD, PP, SHARDED_FROM, TP, joined
from compare.spec.experiment import Experiment

EAGER = "summed at each use"
AT_ONCE = "stages and replicas at once"
ONCE = "microbatches summed before"
THRICE = "the last bias is gathered thrice"


def by_types(experiment: Experiment, expected: Bytes) -> Deviations:
    """Rows of jax-explicit that are not jax-manual's, for a reason that is known.

    Args:
        experiment: with `layout.remat` resolved.
        expected: the closed form, on one rank of the pipeline.
    """
    layout = experiment.layout
    found: Deviations = {}
    if layout.zero:
        found |= _fully_sharded(experiment, expected)
    if layout.tp > 1:
        found |= _tensor_parallel(experiment, expected)
    if layout.pp > 1:
        found |= _pipeline(experiment)
    return found


def _fully_sharded(experiment: Experiment, expected: Bytes) -> Deviations:
    """Gradients are all-reduced, whole, and each device keeps its slice.

    In a pipeline those of all microbatches are added up first; under ZeRO-3 each tick sums its layers'.
    """
    layout = experiment.layout
    scatter, reduce = ("reduce_scatter", DP_SHARD, GRADIENTS), ("all_reduce", DP_SHARD, GRADIENTS)
    if layout.pp == 1:
        return {scatter: (0, SLICED), reduce: (expected[scatter], SLICED)}
    layers, ends = _layers_and_ends(experiment)
    found: Deviations = {scatter: (0, SLICED), reduce: (ends + layers, f"{SLICED}, {ONCE}")}
    if layout.zero == SHARDED_FROM["parameters"] and layout.reshard_after_forward:
        ticks, of_tick = ticks_of(experiment), layers / layout.chunks
        last_bias = [p for p in block_parameters(experiment.model, 0) if p.name.endswith("mlp.down.bias")]
        held = experiment.model.n_layer // layout.pp // layout.chunks
        again = held * bytes_of(last_bias, experiment)
        found[reduce] = (ends + ticks * of_tick, f"{SLICED}, {IDLE}")
        found["all_gather", DP_SHARD, PARAMETERS] = (
            ends + ticks * (2 * of_tick + again),
            f"{IDLE}, {THRICE}",
        )
    return found


def _tensor_parallel(experiment: Experiment, expected: Bytes) -> Deviations:
    """As XLA does without types (`xla.tensor_parallel`).

    Sequence parallelism's reduce-scatters are all-reduces and slices, and gradients of norms and row biases,
    whole along tp, are summed among activations' gradients in every pass.
    """
    if not experiment.layout.sequence_parallel:
        return tensor_parallel(experiment, expected)
    return {
        **tensor_parallel(
            experiment,
            expected,
            kind="reduce_scatter",
            names=f"{SLICED}, {ITS_LOSS}",
            summed=experiment.train.gradient_accumulation_steps * _eager(experiment),
            and_summed=f", {EAGER}",
        ),
        ("reduce_scatter", TP, ACTIVATIONS): (0, SLICED),
        ("reduce_scatter", TP, ACTIVATION_GRADIENTS): (0, SLICED),
        ("all_reduce", TP, REPLICATED_GRADIENTS): (0, EAGER),
    }


def _eager(experiment: Experiment) -> float:
    """Bytes of a pass: gradients of norms, and of one of a layer's two row biases, or with dropout of both.

    The other's is made of what is gathered for the product before it; dropout lies between the two.
    """
    model = experiment.model
    _, final_norm = end_parameters(model)
    biases = ROW_BIAS if model.dropout else "mlp.down.bias"
    of_layer = [p for p in block_parameters(model, 0) if "norm" in p.name or p.name.endswith(biases)]
    return bytes_of(final_norm, experiment) + model.n_layer * bytes_of(of_layer, experiment)


def _pipeline(experiment: Experiment) -> Deviations:
    """Stages roll at each tick, and the lane of what waits with them; and once before the first.

    What is in no layer is on every stage, and the sum of its gradient runs over stages and replicas at once.
    """
    layout = experiment.layout
    message = stream_bytes(experiment) / layout.microbatches / (layout.tp if layout.sequence_parallel else 1)
    rolled = (2 * ticks_of(experiment) + 1) * message
    layers, ends = _layers_and_ends(experiment)
    shards = layout.dp_shard if layout.zero else 1
    has_replicas = layout.dp_replicate > 1
    found: Deviations = {
        ("permute", PP, ACTIVATIONS): (rolled, ROLLED),
        ("permute", PP, ACTIVATION_GRADIENTS): (rolled, ROLLED),
        ("all_reduce", PP, TIED_GRADIENTS): (0, SHARED),
    }
    if has_replicas:
        found["all_reduce", DP_REPLICATE, GRADIENTS] = (layers / shards, AT_ONCE)
        found["all_reduce", joined(DP_REPLICATE, PP), GRADIENTS] = (ends / shards, f"{SHARED}, {AT_ONCE}")
    else:
        found["all_reduce", PP, GRADIENTS] = (ends / shards, SHARED)
    return found


def _layers_and_ends(experiment: Experiment) -> tuple[float, float]:
    """Bytes of parameters on a device, before dp_shard splits them: of its layers, and of all else."""
    model = experiment.model
    embeddings, norm = end_parameters(model)
    of_layers = model.n_layer // experiment.layout.pp * bytes_of(block_parameters(model, 0), experiment)
    return of_layers, bytes_of([*embeddings, *norm], experiment)
