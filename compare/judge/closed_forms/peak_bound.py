"""What a step holds beside its state at most: for `--dry_run`, before anything is allocated.

A bound and no estimate: each term is what the layout may hold at any moment, and they are added up although
not all of them are there at once.

    a block's numbers a token   `activations`: TORCH_BLOCK, JAX_BLOCK or JAX_DOTS; with full recomputation its
                                input. With dropout masks, and attention's weights, which are then not fused
    activations     of all blocks, for each microbatch that is in flight, twice where backward is in halves,
                    and in JAX one more; of both ends; and of one block as backward computes it anew, with its
                    gradients
    parameters      that are gathered: of two blocks and the ends under ZeRO-3, else all
    gradients       once more, whole: as they are summed up, reduced, or copied into buckets; or as the token
                    table's, which is used at both ends. Of ZeRO-3, in JAX or in one pass, those of two
                    blocks and the ends
    logits          torch: `Keeps`, and of a pipeline two for each further microbatch; JAX: four, of which
                    XLA fuses some; a compiler's pipeline has all microbatches', shared by its stages

A number of 16 bits counts as one of 48: some is kept before it is cast, and XLA on a CPU computes in float32.
Sources: docs/memory.md, whose rows the tests hold to it.
"""

from compare.judge.closed_forms.activations import (
    BLOCK_INPUT,
    JAX_BLOCK,
    JAX_DOTS,
    JAX_NORM,
    TORCH_BLOCK,
    TORCH_ENDS,
    StoredActivation,
    numbers_kept,
    tokens,
)
from compare.judge.closed_forms.memory import elements_of_stage, on_one_of_tp
from compare.numerics.parameters import block_parameters, end_parameters, storage_dtype
from compare.spec.engines.engine import Holds
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment

UNKNOWN = Holds(residuals="autograd", logits=5, logits_with_tp=5, logits_with_pp=5)
"""Bound for an engine outside this project: the largest of our engines'."""
JAX_LOGITS = 4
DROPPED = (
    StoredActivation("masks, and what they are put on, of both branches", "stream", width=4),
    StoredActivation("attention's weights, dropped, and their mask", "inside", scores=4),
)
UNFUSED = (StoredActivation("scores, and the gradients of scores and weights", "inside", scores=3),)
EMBEDDED = (StoredActivation("what the embeddings give, its gradient and the stream's", "stream", width=3),)


def held_at_most(engine: str, experiment: Experiment) -> dict[str, list[float]]:
    """Bytes of activations, gathered parameters, buffers and temporaries together, and of logits.

    Args:
        engine: a name in ENGINES.
        experiment: a checked one.

    Returns:
        For each device in the order of the mesh.
    """
    layout = experiment.layout
    of_stage = [held_by_stage(engine, experiment, stage=stage) for stage in range(layout.pp)]
    stages = [layout.stage_of(device) for device in range(layout.devices)]
    return {kind: [of_stage[stage][kind] for stage in stages] for kind in of_stage[0]}


def held_by_stage(engine: str, experiment: Experiment, *, stage: int) -> dict[str, float]:
    """`held_at_most` of each device of one rank of the pipeline."""
    held = _activations(engine, experiment, stage) + _parameters(engine, experiment, stage)
    return {"activations": held, "logits": _logits(engine, experiment, stage)}


def _activations(engine: str, experiment: Experiment, stage: int) -> float:
    layout, model = experiment.layout, experiment.model
    holds = _holds_of(engine)
    dropped = DROPPED if model.dropout else ()
    is_jax = holds.residuals == "scan"
    whole = (*(JAX_BLOCK if is_jax else TORCH_BLOCK), *dropped)
    kept = {
        "full": BLOCK_INPUT,
        "none": whole,
        # eager PyTorch frees nothing of a block before all of it has been recomputed
        "dots": (*JAX_DOTS, *dropped) if is_jax else whole,
        "auto": (*JAX_DOTS, *dropped) if is_jax else whole,
    }[layout.remat]
    blocks = model.n_layer / (layout.pp * layout.chunks) * in_flight(engine, experiment, stage)
    ends = (*(JAX_NORM if is_jax else TORCH_ENDS), *EMBEDDED)
    anew = (*whole, *UNFUSED) if is_jax else whole
    numbers = blocks * numbers_kept(kept, experiment) + 2 * numbers_kept(anew, experiment)
    numbers += numbers_kept(ends, experiment)
    return itemsize(experiment) * tokens(experiment) * numbers


def _parameters(engine: str, experiment: Experiment, stage: int) -> float:
    """Bytes of parameters once more, gathered or in 16 bits, and of gradients, whole."""
    layout, model = experiment.layout, experiment.model
    stored = storage_dtype(experiment).itemsize
    (token, position), final_norm = end_parameters(model)
    held = elements_of_stage(engine, experiment, stage=stage)
    unit = on_one_of_tp([token, position, *final_norm], layout)
    unit += 2 * on_one_of_tp(block_parameters(model, 0), layout)
    by_unit = layout.zero == 3 and layout.reshard_after_forward
    is_split = layout.dp_shard > 1 and layout.zero >= ENGINES[engine].holds.sharded_from["parameters"]
    gathered = (min(unit, held) if by_unit else held) if is_split else 0.0
    passes = layout.microbatches * experiment.train.gradient_accumulation_steps
    scatters = layout.zero == 3 and (passes == 1 or _holds_of(engine).residuals == "scan")
    return stored * (gathered + (min(unit, held) if scatters else held))


def _logits(engine: str, experiment: Experiment, stage: int) -> float:
    """Bytes of logits and what is made of them, of a microbatch or a part of it."""
    layout, model, holds = experiment.layout, experiment.model, _holds_of(engine)
    if holds.residuals == "autograd" and stage != layout.pp - 1:
        return 0.0
    microbatches = layout.microbatches * experiment.train.gradient_accumulation_steps
    copies = holds.logits_with_tp if layout.tp > 1 else holds.logits
    if layout.pp > 1:
        copies = max(copies, holds.logits_with_pp) + 2 * (microbatches - 1)  # GPipe's wait, and results stay
    if holds.residuals == "scan":
        is_shared = layout.pp > 1 and ENGINES[engine].sent_by_xla  # the stages share all that there are
        copies = JAX_LOGITS * (-(-microbatches // layout.pp) if is_shared else 1)
    columns = -(-model.vocab_size // layout.tp)
    return itemsize(experiment) * copies * tokens(experiment) / experiment.train.loss_chunks * columns


def in_flight(engine: str, experiment: Experiment, stage: int) -> int:
    """Microbatches times chunks whose activations a rank of a pipeline keeps at once: see `schedules`."""
    layout = experiment.layout
    ranks, chunks = layout.pp, layout.chunks
    microbatches = layout.microbatches * experiment.train.gradient_accumulation_steps
    if ranks == 1:
        return 1
    if ENGINES[engine].sent_by_xla:
        return chunks * microbatches + ranks - 1  # a scan keeps what is computed in the bubble, too
    if _holds_of(engine).residuals == "scan":
        # One program for all devices: buffers are as large on each; and those of the tick itself.
        return 1 + _of_schedule(layout.schedule, microbatches, chunks, ranks, stage=0)
    return _of_schedule(layout.schedule, microbatches, chunks, ranks, stage=stage)


def _of_schedule(schedule: str, microbatches: int, chunks: int, ranks: int, *, stage: int) -> int:
    return {
        "gpipe": chunks * microbatches,
        "1f1b": min(microbatches, ranks - stage),
        "interleaved": min(chunks * microbatches, 2 * (ranks - stage - 1) + (chunks - 1) * ranks + 1),
        "zero_bubble": 2 * min(microbatches, ranks),  # what weights wait for is kept beside activations
    }[schedule]


def itemsize(experiment: Experiment) -> float:
    """Bytes of a number that is kept: in 16 bits, beside what is cast, some in float32."""
    stored = storage_dtype(experiment).itemsize
    return stored + 2 if experiment.precision.dtype in ("bfloat16", "float16") else stored


def _holds_of(engine: str) -> Holds:
    holds = ENGINES[engine].holds
    return holds if holds.residuals else UNKNOWN
