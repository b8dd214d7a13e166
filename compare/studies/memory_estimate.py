"""Memory of a run, before anything is allocated: an estimate of its peak, and what it needs for certain.

What is less than parameters, moments and a batch or logits cannot run, and is refused. Up to the estimate
(`compare.judge.closed_forms.peak`) it may not fit, and that is said.
"""

from msgspec import Struct

from compare.contract.record import ON_HOST
from compare.execute.machine import gpu_memory_bytes, memory_bytes
from compare.judge.closed_forms.peak import peak_estimate
from compare.numerics.parameters import parameter_count, storage_dtype
from compare.spec.experiment import Experiment, ExperimentError
from compare.terminal import human_bytes

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
    """Estimate what an engine needs for a checked experiment, in closed form: nothing is allocated."""
    by_kind = peak_estimate(engine, experiment)
    on_host = by_kind.pop(ON_HOST, [0.0] * experiment.layout.devices)
    return MemoryEstimate(
        engine=engine,
        on_host=on_host,
        by_kind=by_kind,
        initial_weights=parameter_count(experiment.model) * storage_dtype(experiment).itemsize,
        batch=BATCH_BYTES * experiment.tokens_per_step,
    )


def require_memory(engine: str, experiment: Experiment, *, platform: str) -> None:
    """Refuse what cannot fit, whatever an engine does.

    That is less than the estimate: parameters, optimizer state, and beside them a batch as it is drawn, or
    the logits of one microbatch of one share of it. Devices of a CPU share the machine's memory; a GPU has
    its own, and the host draws weights and batches.

    Raises:
        ExperimentError: with what is needed, what there is, and what to do.
    """
    estimate, here = estimate_memory(engine, experiment), memory_bytes()
    state = list(zip(estimate.by_kind["parameters"], estimate.by_kind["optimizer"], strict=True))
    names = ("parameters", "optimizer state")
    if platform == "cpu":
        parameters, optimizer = (sum(sizes) for sizes in zip(*state, strict=True))
        held = dict(zip(names, (parameters, optimizer + sum(estimate.on_host)), strict=True))
        _refuse(engine, held | {"one batch": estimate.batch}, here, "this machine")
        _refuse(engine, held | {"logits": _logits(experiment)}, here, "this machine")
        return
    _refuse(engine, {"one batch": estimate.batch}, here, "this machine")
    _refuse(engine, {"initial weights": estimate.initial_weights}, here, "this machine")
    if has := gpu_memory_bytes():
        _refuse(engine, dict(zip(names, max(state, key=sum), strict=True)), has, "a GPU here")


def may_not_fit(engine: str, experiment: Experiment, *, platform: str) -> str:
    """Why an engine's estimated peak is more than there is; "" if it is not.

    Devices of a CPU share the machine's memory; those of GPUs have their own.
    """
    estimate = estimate_memory(engine, experiment)
    if platform == "cpu":
        most = sum(estimate.per_device) + sum(estimate.on_host) + estimate.batch
        devices, has, where = f"{len(estimate.per_device)} devices", memory_bytes(), "this machine"
    else:
        most, devices, has, where = max(estimate.per_device), "a device", gpu_memory_bytes(), "a GPU here"
    if most <= has or not has:
        return ""
    held = f"{devices} would hold about {human_bytes(most)}"
    return f"{engine} may not fit: {held}, and {where} has {human_bytes(has)}"


def _refuse(engine: str, needs: dict[str, float], has: int, where: str) -> None:
    if sum(needs.values()) > has:
        parts = " + ".join(f"{human_bytes(size)} of {what}" for what, size in needs.items())
        raise ExperimentError(
            f"{engine} would need {human_bytes(sum(needs.values()))} ({parts}), and {where} has "
            f"{human_bytes(has)}: make the model or the batch smaller"
        )


def _logits(experiment: Experiment) -> float:
    """Bytes of the logits of one microbatch, or a part of it, over all devices that share its work."""
    model, train, layout = experiment.model, experiment.train, experiment.layout
    sequences = train.batch_size / layout.data_parallel / layout.microbatches
    itemsize = COMPUTE_BYTES[experiment.precision.dtype]
    return itemsize * sequences * model.block_size // train.loss_chunks * model.vocab_size
