"""Communication of the manual engines in a step, in closed form: logical bytes, for the busiest device.

    strategy            collective                         bytes
    data parallel       all-reduce of gradients            G, or the shard of it that ZeRO has scattered
    fully sharded       reduce-scatter of gradients        G a step; of jax-manual from ZeRO-2 on G a pass
                        all-gather of parameters           P a step; ZeRO-3 each time they are used
    tensor parallel     all-reduce                         2 L + 1 streams a pass, forward and backward
      and sequence      reduce-scatter and all-gather      2 L + 1 streams a pass, forward and backward, each
    pipeline parallel   permute                            a stream a microbatch, forward and backward

P and G are a device's parameters and gradients before dp_shard splits them. A stream is what goes from block
to block, (B, T, C) of the device's rows. L layers have two regions each, attention and MLP; the one more is
the embedding's way out, in backward the head's way in. Scalars, of loss and norm, are left out. Streams are
as wide as weights: float64 and float32, not mixed precision, which sends some in half the bytes.

Sources: ZeRO (arXiv 1910.02054, section 7); Megatron (1909.08053) and sequence parallelism (2205.05198,
section 4.2); 1F1B (2006.09503).
"""

from compare.contract.axes import DP_REPLICATE, DP_SHARD, PP, SHARDED_FROM, TP
from compare.contract.communication import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    GRADIENTS,
    LOSS,
    PARAMETERS,
    REPLICATED_GRADIENTS,
    TIED_GRADIENTS,
    Communication,
)
from compare.contract.engines.jax import JAX
from compare.contract.engines.registry import ENGINES
from compare.contract.experiment import Experiment, Layout
from compare.contract.parameters import block_parameters, end_parameters, parameter_table, storage_dtype
from compare.judge.closed_forms.memory import elements_of_stage, is_split_by_tp, on_one_of_tp

Bytes = dict[tuple[str, str, str], float]
"""(kind, axis, purpose) -> logical bytes of a step."""


def data_parallel(engine: str, experiment: Experiment) -> Bytes:
    """Every gradient is all-reduced over the replicas once a step, however many passes it is the sum of.

    With ZeRO that is the device's shard of it, scattered before.
    """
    layout = experiment.layout
    if layout.dp_replicate == 1:
        return {}
    shards = layout.dp_shard if layout.zero else 1
    return {("all_reduce", DP_REPLICATE, GRADIENTS): _bytes_of_stage(engine, experiment) / shards}


def fully_sharded(engine: str, experiment: Experiment) -> Bytes:
    """Gradients are scattered to the device that updates them, parameters gathered where they are used.

    torch-manual adds up whole gradients in place and scatters the sum. jax-manual does so under ZeRO-1 only:
    from ZeRO-2 on it scatters the gradients of each pass. Under ZeRO-3 torch-manual gathers everything for
    each forward and again for each backward (FULL_SHARD), or once a step (SHARD_GRAD_OP). jax-manual gathers
    layers for each forward, and for each backward all that backward needs: not the bias that is added last.
    What is in no layer it gathers once a step.

    Raises:
        ValueError: a pipeline, where it depends on the schedule how often a stage gathers.
    """
    layout, passes = experiment.layout, experiment.train.gradient_accumulation_steps
    if not layout.zero:
        return {}
    _require_no_pipeline(layout)
    whole = _bytes_of_stage(engine, experiment)
    by_jax = _is_one_program(engine)
    scatters = passes if by_jax and layout.zero >= SHARDED_FROM["gradients"] else 1
    gathered = whole
    if layout.zero >= SHARDED_FROM["parameters"]:
        gathered = _gathered_by_jax(experiment) if by_jax else whole * _gathers_by_torch(experiment)
    return {
        ("reduce_scatter", DP_SHARD, GRADIENTS): scatters * whole,
        ("all_gather", DP_SHARD, PARAMETERS): gathered,
    }


def tensor_parallel(engine: str, experiment: Experiment) -> Bytes:
    """Each region's way out sums partial products in forward, its way in sums gradients in backward.

    Sequence parallelism cuts an all-reduce in two: a reduce-scatter on the way out, an all-gather on the way
    in. Of what tp does not split each device then has the gradients of its own positions: summed once a step.
    The loss needs three numbers a position, and never the logits: jax-manual reduces each of them over tp,
    torch-manual gathers all three of every device. Nothing is recomputed: layout.remat = none.

    Raises:
        ValueError: a pipeline, whose stages have different parts of all this.
    """
    layout, train = experiment.layout, experiment.train
    if layout.tp == 1:
        return {}
    _require_no_pipeline(layout)
    passes, stream = train.gradient_accumulation_steps, _stream(experiment)
    kinds = ("reduce_scatter", "all_gather") if layout.sequence_parallel else ("all_reduce",)
    regions = passes * (2 * experiment.model.n_layer + 1) * stream
    found: Bytes = {(kind, TP, way): regions for kind in kinds for way in (ACTIVATIONS, ACTIVATION_GRADIENTS)}
    of_positions = passes * 3 * stream / experiment.model.n_embd
    if _is_one_program(engine):
        found["all_reduce", TP, LOSS] = of_positions
    else:
        found["all_gather", TP, LOSS] = of_positions * layout.tp
    if layout.sequence_parallel:
        repeated = [p.size for p in parameter_table(experiment.model) if not is_split_by_tp(p)]
        found["all_reduce", TP, REPLICATED_GRADIENTS] = _itemsize(experiment) * sum(repeated)
    return found


def pipeline_parallel(
    engine: str, experiment: Experiment, *, messages: tuple[int, int] | None = None
) -> Bytes:
    """Each stage hands a microbatch's activations on, and their gradients back; ends add up what they share.

    torch-manual's ends send each other the gradient of the tied embedding. jax-manual's are one program with
    all other devices: all reduce the gradients of all that is in no layer.

    Args:
        engine, experiment: as everywhere.
        messages: forward and back; by default one for each microbatch and each of a rank's stages. Those of
            jax-manual run in lock step: all devices take part in a tick in which any of them sends.
    """
    layout, train = experiment.layout, experiment.train
    if layout.pp == 1:
        return {}
    microbatches = train.gradient_accumulation_steps * layout.microbatches
    forward, back = messages or (microbatches * layout.chunks,) * 2
    message = _stream(experiment) / layout.microbatches / (layout.tp if layout.sequence_parallel else 1)
    (token, position), norm = end_parameters(experiment.model)
    shared = [token, position, *norm] if _is_one_program(engine) else [token]
    shards = layout.dp_shard if layout.zero else 1
    tied = on_one_of_tp(shared, layout) / shards
    kind = "all_reduce" if _is_one_program(engine) else "permute"
    return {
        ("permute", PP, ACTIVATIONS): forward * message,
        ("permute", PP, ACTIVATION_GRADIENTS): back * message,
        (kind, PP, TIED_GRADIENTS): _itemsize(experiment) * tied,
    }


def measured(ledger: list[Communication]) -> Bytes:
    """A ledger in the shape of a closed form."""
    return {(entry.kind, entry.axis, entry.purpose): entry.bytes for entry in ledger}


def _is_one_program(engine: str) -> bool:
    """True if all devices run one program, as those of jax-manual do, and not each rank its own."""
    return ENGINES[engine].side == JAX.name


def _gathers_by_torch(experiment: Experiment) -> int:
    passes = experiment.train.gradient_accumulation_steps
    return 2 * passes if experiment.layout.reshard_after_forward else 1


def _gathered_by_jax(experiment: Experiment) -> float:
    """Bytes that ZeRO-3 gathers in a step."""
    model, layout = experiment.model, experiment.layout
    passes = experiment.train.gradient_accumulation_steps
    block, (embeddings, norm) = block_parameters(model, 0), end_parameters(model)
    layers = model.n_layer * on_one_of_tp(block, layout)
    unneeded = model.n_layer * sum(p.size for p in block if p.name.endswith("mlp.down.bias"))
    ends = on_one_of_tp((*embeddings, *norm), layout)
    again = layers - unneeded if layout.reshard_after_forward else 0
    return _itemsize(experiment) * (ends + passes * (layers + again))


def _bytes_of_stage(engine: str, experiment: Experiment) -> float:
    """P, and G: of the stage of a pipeline that has most."""
    stages = range(experiment.layout.pp)
    return _itemsize(experiment) * max(elements_of_stage(engine, experiment, stage=s) for s in stages)


def _stream(experiment: Experiment) -> float:
    """Bytes of the activations (B, T, C) of one pass, of a device's rows."""
    model, rows = experiment.model, experiment.train.batch_size // experiment.layout.data_parallel
    return _itemsize(experiment) * rows * model.block_size * model.n_embd


def _require_no_pipeline(layout: Layout) -> None:
    if layout.pp > 1:
        raise ValueError(f"layout.pp = {layout.pp}: no closed form of what a pipeline's stages send besides")


def _itemsize(experiment: Experiment) -> int:
    return storage_dtype(experiment).itemsize
