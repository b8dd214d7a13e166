"""Memory at the peak of a step, by class, in closed form, for this model.

A step peaks where the gradient of the logits is made: every activation is still there, and logits several
times. That holds where logits, or a pipeline's microbatches, outweigh gradients and a block's temporaries.

    parameters, optimizer   as at rest
    gradients               torch: those of the accumulated passes before, and DDP's buckets, which are
                            always there; JAX: those of the blocks, to which backward's loop will add, shards
                            with ZeRO-3, and that of the token table, whole, which is made right there
    gathered parameters     ZeRO-3: token and position tables and the last norm, which are a unit; without
                            reshard_after_forward, and in FSDP2's ZeRO-2, all
    activations             `activations`: of all blocks and both ends
    logits                  torch: what log_softmax made, its gradient and the logits', and the logits, which
                            the training loop holds until backward has ended (our pipeline drops them); JAX:
                            they and their gradient, into which XLA fuses the softmax, and by hand, split by
                            vocabulary, the exponentials as well
    XLA's temporaries       gradients, gathered parameters, activations and logits of JAX together

A pipeline's rank keeps the activations of the microbatches that its schedule has in flight; all ranks but
the last peak without logits, when as many are in flight as ever are.
"""

from msgspec import Struct

from compare.contract.memory_profile import Class
from compare.judge.closed_forms.activations import (
    BLOCK_INPUT,
    JAX_BLOCK,
    JAX_DOTS,
    JAX_NORM,
    TORCH_BLOCK,
    TORCH_ENDS,
    numbers_kept,
    tokens,
)
from compare.judge.closed_forms.memory import closed_form, on_one_of_tp
from compare.numerics.parameters import block_parameters, end_parameters, storage_dtype
from compare.spec.engines.engine import Holds
from compare.spec.engines.registry import ENGINES, FSDP2
from compare.spec.experiment import Experiment

STATE_LIMIT, ACTIVATIONS_LIMIT = 0.05, 0.10
"""Of a class: padding and scalars; and positions, masks and indices, which the form leaves out, or in a
compiled step what one operation needs beside what it reads."""
OF_ACTIVATIONS: tuple[Class, ...] = ("activations", "XLA's temporaries")


class PeakForm(Struct, frozen=True, kw_only=True):
    """Bytes of one device at the peak, by class. What has no form is not there: temporaries, for one."""

    moment: str
    """When that is."""
    bytes: dict[Class, float]

    @property
    def is_of_state(self) -> bool:
        """True if it is of parameters and optimizer alone, which are the same at every moment."""
        return self.bytes.keys().isdisjoint(OF_ACTIVATIONS)

    def fits(self, kind: Class, measured: float) -> bool:
        """True if the measured bytes of a class are within its limit, or it has no form."""
        limit = ACTIVATIONS_LIMIT if kind in OF_ACTIVATIONS else STATE_LIMIT
        expected = self.bytes.get(kind, measured)
        return abs(measured - expected) <= limit * expected


def peak_form(engine: str, experiment: Experiment, *, device: int = 0) -> PeakForm | None:
    """The memory of a device at the peak of a step.

    Args:
        engine: a name in ENGINES.
        experiment: its layout, model, precision.
        device: in the order of the mesh.

    Returns:
        Parameters and optimizer alone for what peaks elsewhere: in torch selective recomputation, and
        pipelines but 1F1B alone; in JAX full recomputation, accumulation and pipelines. None for what it
        does not know: 16-bit precision and dropout, which keep casts and masks as well; logits in parts,
        offload, chunks; and engines that are not ours. Of gradients that add up before they are scattered
        there is none.
    """
    layout, model = experiment.layout, experiment.model
    is_plain = experiment.precision.dtype in ("float32", "float64") and not model.dropout
    is_whole = experiment.train.loss_chunks == 1 and layout.offload == "none" and layout.chunks == 1
    holds = ENGINES[engine].holds if engine in ENGINES else Holds()
    if not holds.residuals or not is_plain or not is_whole:
        return None
    make = {"autograd": _torch_form, "scan": _jax_form}[holds.residuals]
    return make(engine, experiment, device, holds)


def _torch_form(engine: str, experiment: Experiment, device: int, holds: Holds) -> PeakForm:
    layout, itemsize = experiment.layout, storage_dtype(experiment).itemsize
    is_pure = layout.devices == layout.pp and layout.schedule == "1f1b"
    if layout.remat == "dots" or (layout.pp > 1 and not is_pure):
        return _state_alone(engine, experiment, device)
    stage, last = layout.stage_of(device), layout.pp - 1
    block = numbers_kept(BLOCK_INPUT if layout.remat == "full" else TORCH_BLOCK, experiment)
    ends = numbers_kept(TORCH_ENDS, experiment) if stage == last else 0.0
    received = experiment.model.n_embd if stage else 0  # its input is a message, not an activation
    kept = experiment.model.n_layer / layout.pp * block + ends - received
    held = _state(engine, experiment, device)
    held["activations"] = itemsize * tokens(experiment) * kept * _in_flight(experiment, stage)
    microbatches = experiment.train.gradient_accumulation_steps * layout.microbatches
    has_run = microbatches > _in_flight(experiment, stage)
    by_fsdp = ENGINES[engine].gradient_sync_for(layout) == FSDP2
    keeps_buckets = holds.buckets and layout.zero <= 1 and layout.data_parallel > 1 and not by_fsdp
    held["gradients"] *= int(has_run) + int(keeps_buckets)  # passes add up outside of DDP's buckets
    if has_run and layout.zero >= 2 and layout.dp_shard > 1:
        del held["gradients"]  # whole ones add up, in buffers that the reduce-scatter is to read
    held["gathered parameters"] = _gathered(engine, experiment)
    is_gathered = layout.zero == 3 and layout.dp_shard > 1 and layout.reshard_after_forward
    if holds.gathers_ahead and is_gathered:
        block = on_one_of_tp(block_parameters(experiment.model, 0), layout)
        held["communication buffers"] = itemsize * block  # FSDP2 gathers the last block for backward by now
    if stage == last:
        held["logits"] = _logits(experiment, holds)
    where = "the gradient of the logits is made" if stage == last else "most microbatches are in flight"
    return PeakForm(moment=f"where {where}", bytes=held)


def _jax_form(engine: str, experiment: Experiment, device: int, holds: Holds) -> PeakForm:
    layout, itemsize = experiment.layout, storage_dtype(experiment).itemsize
    remat = "dots" if layout.remat == "auto" else layout.remat
    if layout.pp > 1 or remat == "full" or experiment.train.gradient_accumulation_steps > 1:
        return _state_alone(engine, experiment, device)
    block = numbers_kept(JAX_BLOCK if remat == "none" else JAX_DOTS, experiment)
    ends = numbers_kept(JAX_NORM, experiment)
    activations = tokens(experiment) * (experiment.model.n_layer * block + ends)
    (token, _), _ = end_parameters(experiment.model)
    blocks = experiment.model.n_layer * on_one_of_tp(block_parameters(experiment.model, 0), layout)
    blocks /= layout.dp_shard if layout.zero >= 3 else 1
    gradients = blocks + on_one_of_tp([token], layout)
    made = itemsize * (activations + gradients) + _gathered(engine, experiment) + _logits(experiment, holds)
    held: dict[Class, float] = _state_alone(engine, experiment, device).bytes | {"XLA's temporaries": made}
    return PeakForm(moment="where the gradient of the logits is made", bytes=held)


def _state_alone(engine: str, experiment: Experiment, device: int) -> PeakForm:
    """What is the same at every moment of a step: the form of a layout that peaks elsewhere."""
    state = _state(engine, experiment, device)
    del state["gradients"]
    return PeakForm(moment="at any moment", bytes=state)


def _state(engine: str, experiment: Experiment, device: int) -> dict[Class, float]:
    """Parameters, optimizer and gradients of a device at rest."""
    at_rest = closed_form(engine, experiment)
    kinds: tuple[Class, ...] = ("parameters", "optimizer", "gradients")
    return {kind: at_rest[kind][device] for kind in kinds}


def _gathered(engine: str, experiment: Experiment) -> float:
    """Bytes of whole parameters that are made of shards."""
    layout, model = experiment.layout, experiment.model
    replicates = layout.data_parallel > 1 and ENGINES[engine].gradient_sync_for(layout) == FSDP2
    splits = layout.zero >= ENGINES[engine].holds.sharded_from["parameters"] and layout.dp_shard > 1
    if not splits and not replicates:
        return 0.0
    (token, position), final_norm = end_parameters(model)
    ends = on_one_of_tp([token, position, *final_norm], layout)
    blocks = model.n_layer * on_one_of_tp(block_parameters(model, 0), layout)
    keeps_all = not splits or layout.zero == 2 or not layout.reshard_after_forward
    return storage_dtype(experiment).itemsize * (ends + (blocks if keeps_all else 0.0))


def _in_flight(experiment: Experiment, stage: int) -> int:
    """Microbatches of which a rank keeps activations at once."""
    layout = experiment.layout
    microbatches = layout.microbatches * experiment.train.gradient_accumulation_steps
    if layout.pp == 1:
        return 1
    return microbatches if layout.schedule == "gpipe" else min(microbatches, layout.pp - stage)


def _logits(experiment: Experiment, holds: Holds) -> float:
    """Bytes of the logits of one microbatch on one device, and of what is made of them."""
    layout = experiment.layout
    with_tp = holds.logits_with_tp if layout.tp > 1 else holds.logits
    copies = holds.logits_with_pp if layout.pp > 1 else with_tp
    columns = -(-experiment.model.vocab_size // layout.tp)
    return storage_dtype(experiment).itemsize * tokens(experiment) * copies * columns
