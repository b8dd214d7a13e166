"""Memory of a run, before anything is allocated: an estimate, and a bound that is certain.

    parameters, gradients, optimizer   `compare.judge.closed_forms.memory`: exact
    activations    numbers that a block keeps for backward, of b sequences of s tokens, width h, a heads:
                   16 sbh + abs^2, and with dropout abs^2 more, and masks of 2 sbh + abs^2 bytes; under tp
                   4 sbh + (12 sbh + abs^2) / t, or all of it / t with sequence parallelism; sbh where all is
                   recomputed; of a pipeline's rank for as many microbatches as its schedule has in flight
    logits         of a microbatch, and their gradient: 2 bsV / t numbers

Sources: Korthikanti et al. (arXiv 2205.05198); our schedules.
An estimate: fused attention keeps no abs^2, a compiler may recompute, and buffers of a moment are not in it.
"""

from msgspec import Struct

from compare.contract.experiment import Experiment, ExperimentError
from compare.contract.parameters import parameter_count, storage_dtype
from compare.contract.record import ON_HOST
from compare.execute.machine import gpu_memory_bytes, memory_bytes
from compare.judge.closed_forms.memory import closed_form
from compare.terminal.units import human_bytes

KINDS = ("parameters", "gradients", "optimizer", "activations", "logits")
COMPUTE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
BATCH_BYTES = 20  # of a token while `Corpus.batch` draws it: two int64 positions and one int32


class MemoryEstimate(Struct, frozen=True, kw_only=True):
    """Bytes that one engine needs for an experiment."""

    engine: str
    by_kind: dict[str, list[float]]
    """For each of KINDS, bytes on each device in the order of the mesh."""
    on_host: list[float]
    """What `layout.offload` keeps of each device's state in the host's memory."""
    initial_weights: int
    """On the host: every process draws all of them."""
    batch: int
    """On the host: every process draws the global batch of a step."""

    @property
    def per_device(self) -> list[float]:
        """The sum over all kinds for each device."""
        return [sum(sizes) for sizes in zip(*self.by_kind.values(), strict=True)]


def estimate_memory(engine: str, experiment: Experiment) -> MemoryEstimate:
    """Estimate what an engine needs for an experiment, in closed form: nothing is allocated.

    Args:
        engine: a name in ENGINES.
        experiment: a checked one.

    Returns:
        Bytes by kind and device.
    """
    layout = experiment.layout
    stages = [device * layout.pp // layout.devices for device in range(layout.devices)]
    # Cross-entropy is computed in float32 at least.
    logits = _logits(experiment, itemsize=storage_dtype(experiment).itemsize)
    tokens = experiment.tokens_per_step
    state = closed_form(engine, experiment)
    on_host = state.pop(ON_HOST, [0.0] * layout.devices)
    return MemoryEstimate(
        engine=engine,
        on_host=on_host,
        by_kind={
            **state,
            "activations": [_activations(experiment, stage) for stage in stages],
            "logits": [2 * logits / layout.tp if stage == layout.pp - 1 else 0.0 for stage in stages],
        },
        initial_weights=parameter_count(experiment.model) * storage_dtype(experiment).itemsize,
        batch=BATCH_BYTES * tokens,
    )


def require_memory(engine: str, experiment: Experiment, *, platform: str) -> None:
    """Refuse what cannot fit, whatever an engine does.

    That is less than the estimate: parameters, optimizer state, and beside them a batch as it is drawn, or
    the logits of one microbatch of one share of it. Devices of a CPU share the machine's memory; a GPU has
    its own, and the host draws weights and batches.

    Raises:
        ExperimentError: with what is needed, what there is, and what to do.
    """
    estimate = estimate_memory(engine, experiment)
    state = list(zip(estimate.by_kind["parameters"], estimate.by_kind["optimizer"], strict=True))
    logits = _logits(experiment, itemsize=COMPUTE_BYTES[experiment.precision.dtype])
    if platform == "cpu":
        parameters, optimizer = (sum(sizes) for sizes in zip(*state, strict=True))
        optimizer += sum(estimate.on_host)
        held = {"parameters": parameters, "optimizer state": optimizer}
        _refuse(engine, held | {"one batch": estimate.batch}, memory_bytes(), "this machine")
        _refuse(engine, held | {"logits": logits}, memory_bytes(), "this machine")
        return
    _refuse(engine, {"one batch": estimate.batch}, memory_bytes(), "this machine")
    _refuse(engine, {"initial weights": estimate.initial_weights}, memory_bytes(), "this machine")
    if has := gpu_memory_bytes():
        parameters, optimizer = max(state, key=sum)
        _refuse(engine, {"parameters": parameters, "optimizer state": optimizer}, has, "a GPU here")


def _refuse(engine: str, needs: dict[str, float], has: int, where: str) -> None:
    if sum(needs.values()) > has:
        parts = " + ".join(f"{human_bytes(size)} of {what}" for what, size in needs.items())
        raise ExperimentError(
            f"{engine} would need {human_bytes(sum(needs.values()))} ({parts}), and {where} has "
            f"{human_bytes(has)}: make the model or the batch smaller"
        )


def _activations(experiment: Experiment, stage: int) -> float:
    """Bytes that a device keeps between forward and backward."""
    model, train, layout = experiment.model, experiment.train, experiment.layout
    itemsize = COMPUTE_BYTES[experiment.precision.dtype]
    sequences = train.batch_size / layout.data_parallel / layout.microbatches
    sbh = sequences * model.block_size * model.n_embd
    scores = sequences * model.n_head * model.block_size**2
    repeated = 1 if layout.sequence_parallel else layout.tp
    kept = itemsize * (4 * sbh * repeated + 12 * sbh + scores)
    if model.dropout:
        kept += itemsize * scores + 2 * sbh * repeated + scores
    if layout.remat == "full":
        kept = itemsize * sbh * repeated
    blocks = model.n_layer / (layout.pp * layout.chunks)
    return blocks * kept / layout.tp * _in_flight(experiment, stage)


def _in_flight(experiment: Experiment, stage: int) -> int:
    """Microbatches times chunks whose activations a rank of a pipeline keeps at once: see `schedules`."""
    train, layout = experiment.train, experiment.layout
    ranks, chunks = layout.pp, layout.chunks
    microbatches = layout.microbatches * train.gradient_accumulation_steps
    if ranks == 1:
        return 1
    return {
        "gpipe": microbatches,
        "1f1b": min(microbatches, ranks - stage),
        "interleaved": min(chunks * microbatches, 2 * (ranks - stage - 1) + (chunks - 1) * ranks + 1),
        "zero_bubble": min(microbatches, ranks),
    }[layout.schedule]


def _logits(experiment: Experiment, *, itemsize: int) -> float:
    """Bytes of the logits of one microbatch, or a part of it, over all devices that share its work."""
    model, train, layout = experiment.model, experiment.train, experiment.layout
    sequences = train.batch_size / layout.data_parallel / layout.microbatches
    return itemsize * sequences * model.block_size // train.loss_chunks * model.vocab_size
