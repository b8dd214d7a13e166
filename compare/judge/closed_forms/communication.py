"""Communication of the manual engines in a step, in closed form: logical bytes of a device.

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
as wide as weights, but for the way out of a layer's regions in 16 bits: `_narrow`.

Sources: ZeRO (arXiv 1910.02054, section 7); Megatron (1909.08053) and sequence parallelism (2205.05198,
section 4.2); 1F1B (2006.09503).
"""

from compare.contract.communication import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    GRADIENTS,
    LOSS,
    PARAMETERS,
    REPLICATED_GRADIENTS,
    TIED_GRADIENTS,
    Communication,
    summed,
)
from compare.judge.closed_forms.memory import (
    elements_of_stage,
    is_split_by_tp,
    on_one_of_tp,
    parameters_of_stage,
)
from compare.judge.closed_forms.sizes import bytes_of, itemsize_of, microbatches_of, stream_bytes
from compare.judge.closed_forms.torch_units import gathered_by_torch, replicated_by_torch
from compare.numerics.parameters import block_parameters, end_parameters
from compare.pipeline.schedules import make_schedule
from compare.pipeline.ticks import lock_step
from compare.spec.axes import DP_REPLICATE, DP_SHARD, PP, SHARDED_FROM, TP
from compare.spec.engines.registry import ENGINES, JAX
from compare.spec.experiment import Experiment, Layout

WIDE = ("float64", "float32")
Bytes = dict[tuple[str, str, str], float]
"""(kind, axis, purpose) -> logical bytes of a step."""


def communication(engine: str, experiment: Experiment, *, stage: int = 0) -> Bytes:
    """All of it: what a device of one rank of the pipeline communicates in a step.

    Args:
        engine: a name in ENGINES; its side says which of the two ways is meant.
        experiment: a checked one, with `layout.remat` resolved.
        stage: the rank of the pipeline.

    Raises:
        ValueError: activations are recomputed, and with them what they communicate.
    """
    forms = (data_parallel, fully_sharded, tensor_parallel, pipeline_parallel)
    found: Bytes = {}
    for form in forms:
        found |= {key: size for key, size in form(engine, experiment, stage=stage).items() if size}
    return found


def data_parallel(engine: str, experiment: Experiment, *, stage: int = 0) -> Bytes:
    """Every gradient is all-reduced over the replicas once a step, however many passes it is the sum of.

    With ZeRO that is the device's shard of it, scattered before.
    """
    layout = experiment.layout
    if layout.dp_replicate == 1:
        return {}
    shards = layout.dp_shard if layout.zero else 1
    return {("all_reduce", DP_REPLICATE, GRADIENTS): _bytes_of_stage(engine, experiment, stage) / shards}


def fully_sharded(engine: str, experiment: Experiment, *, stage: int = 0) -> Bytes:
    """Gradients are scattered to the device that updates them, parameters gathered where they are used.

    torch-manual adds up whole gradients in place and scatters the sum. jax-manual does so under ZeRO-1 only:
    from ZeRO-2 on it scatters the gradients of each pass. Under ZeRO-3 torch-manual gathers everything for
    each forward and again for each backward (FULL_SHARD), or once a step (SHARD_GRAD_OP). jax-manual gathers
    layers for each forward, and for each backward all that backward needs: no bias, or where it recomputes,
    all but the bias that is added last. What is in no layer it gathers once a step, and so the only layer of
    a model. In a pipeline each microbatch is a pass; torch-manual does not gather what it gathered last, such
    as a stage's last layer for a backward that follows its forward.

    Raises:
        ValueError: ZeRO-3 on ranks of several stages, where it is not known what is gathered ahead.
    """
    layout = experiment.layout
    if not layout.zero:
        return {}
    whole = _bytes_of_stage(engine, experiment, stage)
    scattered = gathered = whole
    if _is_one_program(engine):
        if layout.zero >= SHARDED_FROM["gradients"]:
            scattered = _scattered_by_jax(experiment, stage)
        if layout.zero >= SHARDED_FROM["parameters"]:
            gathered = _gathered_by_jax(experiment)
    elif layout.zero >= SHARDED_FROM["parameters"] and layout.reshard_after_forward:
        gathered = gathered_by_torch(experiment, stage)
    return {
        ("reduce_scatter", DP_SHARD, GRADIENTS): scattered,
        ("all_gather", DP_SHARD, PARAMETERS): gathered,
    }


def tensor_parallel(engine: str, experiment: Experiment, *, stage: int = 0) -> Bytes:
    """Each region's way out sums partial products in forward, its way in sums gradients in backward.

    Sequence parallelism cuts an all-reduce in two: a reduce-scatter on the way out, an all-gather on the way
    in. Of what tp does not split each device then has the gradients of its own positions: summed once a step.
    The loss needs three numbers a position, and never the logits: jax-manual reduces each of them over tp,
    torch-manual gathers all three of every device. A pipeline's first rank has the embedding's way out, its
    last one the head's way in and the loss. What is computed anew for backward is gathered anew.

    A block that is recomputed sums again, but for its last sum, of whose result backward needs nothing, and
    gathers again. With remat = dots PyTorch does so too, while JAX keeps the sums and only gathers.

    Raises:
        ValueError: a pipeline that JAX recomputes, whose ledger does not tell which stage sums again.
    """
    layout, model = experiment.layout, experiment.model
    if layout.tp == 1:
        return {}
    if layout.remat == "full" and layout.pp > 1 and _is_one_program(engine):
        raise ValueError("layout.remat = full in a pipeline: no closed form of what tp sends twice")
    passes, stream = experiment.train.gradient_accumulation_steps, stream_bytes(experiment)
    first, last = stage == 0, stage == layout.pp - 1
    of_layers = 2 * model.n_layer // layout.pp
    narrow = _narrow(engine, experiment)
    out, into = (of_layers * narrow + first) * passes * stream, (of_layers + last) * passes * stream
    summed_again = sums_again(engine, layout) * of_layers / 2 * narrow * passes * stream
    found: Bytes = {}
    if layout.sequence_parallel:
        for kind, forward, backward in (("reduce_scatter", out, into), ("all_gather", into, out)):
            found |= {(kind, TP, ACTIVATIONS): forward, (kind, TP, ACTIVATION_GRADIENTS): backward}
        found["reduce_scatter", TP, ACTIVATIONS] += summed_again
        if layout.remat in ("dots", "full"):
            found["all_gather", TP, ACTIVATIONS] += of_layers * passes * stream
        found["all_reduce", TP, REPLICATED_GRADIENTS] = _replicated(engine, experiment, stage)
    else:
        found = {
            ("all_reduce", TP, ACTIVATIONS): out + summed_again,
            ("all_reduce", TP, ACTIVATION_GRADIENTS): into,
        }
    if last:
        by_torch, in_parts = not _is_one_program(engine), experiment.train.loss_chunks > 1
        # Of each position: the greatest logit, the sum of exponentials, the target's logit. In parts all is
        # computed anew for backward; XLA leaves out the target's, which backward has no use for.
        numbers = 3 + in_parts * (3 if by_torch else 2)
        kind, copies = ("all_gather", layout.tp) if by_torch else ("all_reduce", 1)
        found[kind, TP, LOSS] = numbers * copies * passes * stream / model.n_embd
    return found


def pipeline_parallel(engine: str, experiment: Experiment, *, stage: int = 0) -> Bytes:
    """Each stage hands a microbatch's activations on, and their gradients back; ends add up what they share.

    torch-manual's ends send each other the gradient of the tied embedding. jax-manual's are one program with
    all other devices: all reduce the gradients of all that is in no layer, and all take part in a tick in
    which any of them sends (`compare.pipeline.ticks`).
    """
    layout = experiment.layout
    if layout.pp == 1:
        return {}
    forward, back = _messages(engine, experiment, stage)
    message = stream_bytes(experiment) / layout.microbatches / (layout.tp if layout.sequence_parallel else 1)
    (token, position), norm = end_parameters(experiment.model)
    shards = layout.dp_shard if layout.zero else 1
    found = {
        ("permute", PP, ACTIVATIONS): forward * message,
        ("permute", PP, ACTIVATION_GRADIENTS): back * message,
    }
    if _is_one_program(engine):
        found["all_reduce", PP, TIED_GRADIENTS] = bytes_of([token, position, *norm], experiment) / shards
    elif stage in (0, layout.pp - 1):
        found["permute", PP, TIED_GRADIENTS] = bytes_of([token], experiment) / shards
    return found


def measured(ledger: list[Communication]) -> Bytes:
    """A ledger in the shape of a closed form."""
    return {(row.kind, row.axis, row.purpose): row.bytes for row in summed(ledger)}


def sums_again(engine: str, layout: Layout) -> bool:
    """True if a block that is recomputed adds up over tp what it added up in forward."""
    return layout.remat == "full" or (layout.remat == "dots" and not _is_one_program(engine))


def _is_one_program(engine: str) -> bool:
    """True if all devices run one program, as those of jax-manual do, and not each rank its own."""
    return ENGINES[engine].side == JAX.name


def _narrow(engine: str, experiment: Experiment) -> float:
    """How wide a layer's output goes to tp, in full widths: with 16 bits half of it is sent.

    XLA on a CPU promotes bfloat16 (and not float16) to float32 where it reduces; gradients, and what the
    embedding puts out, are wide.
    """
    dtype = experiment.precision.dtype
    if dtype in WIDE or (_is_one_program(engine) and dtype == "bfloat16"):
        return 1.0
    return 0.5


def _messages(engine: str, experiment: Experiment, stage: int) -> tuple[int, int]:
    """Messages of a pipeline's rank in a step: activations on, and gradients back."""
    layout, microbatches = experiment.layout, microbatches_of(experiment)
    if _is_one_program(engine):
        ticks = lock_step(
            make_schedule(layout.schedule, ranks=layout.pp, microbatches=microbatches, chunks=layout.chunks)
        )
        return int(ticks.sends_activations.sum()), int(ticks.sends_gradients.sum())
    of_chunks = layout.chunks * microbatches
    return of_chunks - microbatches * (stage == layout.pp - 1), of_chunks - microbatches * (stage == 0)


def _replicated(engine: str, experiment: Experiment, stage: int) -> float:
    """Bytes of the gradients that sequence parallelism leaves partial: of what tp does not split.

    With ZeRO a device reduces its shard of them: jax-manual cuts each leaf evenly, torch-manual flat units.
    """
    layout = experiment.layout
    held = parameters_of_stage(engine, experiment, stage=stage)
    whole = itemsize_of(experiment) * sum(p.size for p in held if not is_split_by_tp(p))
    if not layout.zero:
        return whole
    if _is_one_program(engine):
        return whole / layout.dp_shard
    if layout.zero < SHARDED_FROM["gradients"]:
        raise ValueError(
            "layout.zero = 1 with sequence_parallel: no closed form of which rank has which part"
        )
    return replicated_by_torch(experiment, stage)


def _scattered_by_jax(experiment: Experiment, stage: int) -> float:
    """Bytes of gradients that ZeRO-2 and 3 scatter in a step: of every pass; of ends where they are used."""
    layout = experiment.layout
    (token, position), norm = end_parameters(experiment.model)
    used = [token] if stage in (0, layout.pp - 1) else []
    used += [position] if stage == 0 else []
    used += norm if stage == layout.pp - 1 else []
    layers, _ = _layers_and_ends(experiment)
    return microbatches_of(experiment) * itemsize_of(experiment) * (layers + on_one_of_tp(used, layout))


def _gathered_by_jax(experiment: Experiment) -> float:
    """Bytes that ZeRO-3 gathers in a step."""
    model, layout = experiment.model, experiment.layout
    layers, ends = _layers_and_ends(experiment)
    is_loop = model.n_layer > 1  # XLA unrolls a scan of one layer, and moves its gather out of the passes
    if not is_loop or (layout.pp > 1 and not layout.reshard_after_forward):
        return itemsize_of(experiment) * (ends + layers)
    # Backward needs no bias, but for what it computes anew: then all but the one that is added last.
    without = ".bias" if layout.remat == "none" else "mlp.down.bias"
    unneeded = [p for p in block_parameters(model, 0) if p.name.endswith(without)]
    of_layers = model.n_layer // layout.pp * on_one_of_tp(unneeded, layout)
    again = layers - of_layers if layout.reshard_after_forward else 0
    return itemsize_of(experiment) * (ends + microbatches_of(experiment) * (layers + again))


def _layers_and_ends(experiment: Experiment) -> tuple[float, float]:
    """Elements on a device of jax-manual: of its layers, and of all else."""
    model, layout = experiment.model, experiment.layout
    embeddings, norm = end_parameters(model)
    layers = model.n_layer // layout.pp * on_one_of_tp(block_parameters(model, 0), layout)
    return layers, on_one_of_tp((*embeddings, *norm), layout)


def _bytes_of_stage(engine: str, experiment: Experiment, stage: int) -> float:
    """P, and G: of one rank of a pipeline."""
    return itemsize_of(experiment) * elements_of_stage(engine, experiment, stage=stage)
