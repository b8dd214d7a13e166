"""Estimated memory of a device at the peak of a step, when backward makes the gradient of the logits.

    state         parameters, gradients and optimizer as at rest (`compare.theory.memory`)
    activations   blocks in flight, one block that backward recomputes, and both ends; parameters that ZeRO
                  gathers, and gradients before they are accumulated
    logits        several tensors of their size, by engine

`TORCH` and `JAX` count the numbers that a block keeps per token, of width C, with H heads and T positions. A
fused or blockwise attention keeps no scores, and JAX keeps residuals of each operation of a norm or a GELU.
In JAX each expert computes each token, in PyTorch only the chosen ones. torch-compiler exchanges room for all
tokens.

tp splits numbers inside its regions; sequence parallelism also splits the stream. Under cp a device
keeps its own positions, and inside also keys and values of other devices: all of them if they are gathered,
else one device's. In 16 bits the stream and the scores have 32 bits. Numbers that enter tp or are inside have
16 bits, and so have casts of a block's weights, which are kept. The estimate was LEAST to MOST times a
measured peak (`tests/data/peaks.json`).
"""

from functools import partial
from typing import NamedTuple

from compare.contract.record import ON_HOST
from compare.numerics.parameters import block_parameters, end_parameters, storage_dtype
from compare.spec.attention import core_in_jax
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment
from compare.theory.memory import by_device, elements_of_stage, on_one_device, state_of_stage

LEAST, MOST = 0.8, 1.7


class Stored(NamedTuple):
    """Numbers per token that are kept for backward, as multiples of C; scores as multiples of H T."""

    stream: float = 0
    entering: float = 0
    inside: float = 0
    scores: float = 0


class Framework(NamedTuple):
    """Numbers that a framework keeps."""

    block: Stored
    dots: Stored
    """Numbers of a block whose backward recomputes all but products."""
    dropped: Stored
    """Addition of dropout."""
    rms: Stored
    """Addition of both norms of a block, if a norm is several operations."""
    expert: int
    """Inside each expert that computes a token: its row, before and after the activation, and the result; in
    JAX three of all features inside."""
    running: Stored
    """Both ends of the model, and in the running block the scores and the gradients of scores and weights."""
    logits: tuple[int, int]
    """Copies of the logits in 32 bits, and in the dtype of products."""


TORCH = Framework(
    block=Stored(2, 2, 12),
    dots=Stored(1, 2, 8),
    dropped=Stored(2, scores=2),
    rms=Stored(4),
    expert=10,
    running=Stored(4, 1),
    logits=(3, 1),
)
JAX = Framework(
    block=Stored(6, 2, 13, 1),
    dots=Stored(2, 0, 8, 1),
    dropped=Stored(4, scores=4),
    rms=Stored(0),
    expert=12,
    running=Stored(6, 1, scores=3),
    logits=(2, 0),
)
MLP, MLP_DOTS = 8, 4
"""Numbers of a dense MLP in a block, and with dots."""
NARROW = 2.0
"""Bytes of a number in 16 bits."""


def peak_of_stage(engine: str, experiment: Experiment, *, stage: int) -> dict[str, float]:
    """Bytes by kind on each device of one stage."""
    return state_of_stage(engine, experiment, stage=stage) | {
        "activations": _activations(engine, experiment, stage) + _passing(engine, experiment, stage),
        "logits": _logits(engine, experiment, stage),
    }


def peak_estimate(engine: str, experiment: Experiment) -> dict[str, list[float]]:
    """`peak_of_stage` for each device in the order of the mesh; with offload also bytes on the host."""
    return by_device(peak_of_stage, engine, experiment)


def peak_per_device(engine: str, experiment: Experiment) -> list[float]:
    """Bytes of each device at its peak, summed over kinds, without bytes on the host."""
    by_kind = peak_estimate(engine, experiment)
    return [sum(sizes) for sizes in zip(*(by_kind[kind] for kind in by_kind if kind != ON_HOST), strict=True)]


def in_flight(engine: str, experiment: Experiment, stage: int) -> int:
    """Microbatches times chunks whose activations a stage keeps at one time."""
    layout, microbatches = experiment.layout, experiment.microbatches_per_step
    ranks, chunks = layout.pp, layout.chunks
    if ranks == 1:
        return 1
    if ENGINES[engine].sent_by_xla:
        return chunks * microbatches + ranks - 1  # a scan also keeps results of the bubble
    is_jax = ENGINES[engine].is_jax
    place = 0 if is_jax else stage  # one program has equal buffers on all devices
    counts = {
        "gpipe": chunks * microbatches,
        "1f1b": min(microbatches, ranks - place),
        "interleaved": min(chunks * microbatches, 2 * (ranks - place - 1) + (chunks - 1) * ranks + 1),
        "zero_bubble": 2 * min(microbatches, ranks),  # weight gradients keep more than activations
    }
    return counts[layout.schedule] + is_jax  # and the activations of the tick itself


def _activations(engine: str, experiment: Experiment, stage: int) -> float:
    """Bytes of the blocks in flight, as remat keeps them, and of the block that backward runs."""
    layout, model, able = experiment.layout, experiment.model, ENGINES[engine]
    framework = JAX if able.is_jax else TORCH
    others = layout.cp - 1 if layout.context == "allgather" else min(layout.cp - 1, 1)
    fetched = Stored(inside=2 * others / model.group)  # keys and values of other devices
    grouped = Stored(inside=2 / model.group - 2)  # groups of queries share keys and values
    block, dots = [framework.block, grouped], [framework.dots, grouped]
    if model.dropout:
        block.append(framework.dropped)
        dots.append(framework.dropped)
    if model.attention == "dense" and not (able.is_jax or model.dropout):
        block.append(Stored(scores=2))
        dots.append(Stored(scores=2))
    if model.position == "rope":
        block.append(Stored(inside=1 + 1 / model.group))  # queries and keys, before the rotation
    if model.norm == "rmsnorm":
        block.append(framework.rms)
    if model.n_experts:
        has_all = able.is_jax or (able.sends_by == "dtensor" and layout.ep > 1)
        experts = model.n_experts if has_all else model.experts_per_token
        block.append(Stored(inside=framework.expert * experts - MLP))
        dots.append(Stored(inside=MLP_DOTS * (experts - 1)))
    if layout.context == "allgather":
        block.append(fetched)
    core = core_in_jax(experiment, platform="cpu", by_types=able.sends_by == "types")
    size_of = partial(_bytes, experiment=experiment, has_scores=core == "dense")
    remat = able.remat_for(layout)
    stored = {"full": [Stored(stream=1)], "dots": dots, "none": block}[remat]
    blocks = model.n_layer / (layout.pp * layout.chunks) * in_flight(engine, experiment, stage)
    tokens, casts = _tokens(experiment), 0.0
    if _narrow(experiment) == NARROW:
        casts = NARROW * on_one_device(block_parameters(model, 0), layout)
    kept = tokens * size_of(stored) + casts * (remat == "none")
    running = size_of([*block, fetched, framework.running])
    return blocks * kept + tokens * running + casts


def _bytes(stored: list[Stored], experiment: Experiment, *, has_scores: bool) -> float:
    """Bytes per token. Numbers that tp splits have the dtype of products."""
    model, layout = experiment.model, experiment.layout
    wide, narrow = storage_dtype(experiment).itemsize, _narrow(experiment)
    split = layout.tp if layout.sequence_parallel else 1
    return sum(
        model.n_embd * (wide * each.stream / split + narrow * (each.entering + each.inside / layout.tp))
        + model.n_head * model.block_size * wide * each.scores * has_scores / layout.tp
        for each in stored
    )


def _passing(engine: str, experiment: Experiment, stage: int) -> float:
    """Bytes of gathered parameters, and of gradients before they are added to the sum over passes."""
    layout, model, able = experiment.layout, experiment.model, ENGINES[engine]
    everything = elements_of_stage(engine, experiment, stage=stage)
    embeddings, final_norm = end_parameters(model)
    two_blocks = on_one_device([*embeddings, *final_norm, *2 * block_parameters(model, 0)], layout)
    unit, is_sum = min(everything, two_blocks), experiment.microbatches_per_step > 1
    elements = 0.0
    if layout.zero >= able.sharded_from["parameters"]:
        elements += unit if layout.zero == 3 and layout.reshard_after_forward else everything
    if is_sum and able.is_jax:  # gradients of a pass are reduced next to the sum
        copies = 2 if layout.data_parallel * layout.cp > 1 else 1
        elements += copies * elements_of_stage(engine, experiment, stage=stage, sharded=layout.zero == 3)
    elif layout.zero >= able.sharded_from["gradients"]:  # a sum is full until it is scattered
        elements += everything if is_sum else unit
    return storage_dtype(experiment).itemsize * elements


def _logits(engine: str, experiment: Experiment, stage: int) -> float:
    """Bytes of the copies of the logits."""
    layout, able, microbatches = experiment.layout, ENGINES[engine], experiment.microbatches_per_step
    if not able.is_jax and stage != layout.pp - 1:
        return 0.0
    wide, narrow = (JAX if able.is_jax else TORCH).logits
    if layout.pp > 1 and not able.is_jax:
        wide += 2 * (microbatches - 1)  # microbatches of GPipe wait, and results stay
    elif layout.pp > 1 and able.sent_by_xla:
        wide *= -(-microbatches // layout.pp)  # the stages share all microbatches
    columns = -(-experiment.model.vocab_size // layout.tp)
    size = wide * storage_dtype(experiment).itemsize + narrow * _narrow(experiment)
    return _tokens(experiment) * size / experiment.train.loss_chunks * columns


def _tokens(experiment: Experiment) -> float:
    """Tokens of a device's microbatch; devices of tp share them."""
    train, layout = experiment.train, experiment.layout
    rows = train.batch_size / layout.data_parallel / layout.microbatches
    return rows * experiment.model.block_size / layout.cp


def _narrow(experiment: Experiment) -> float:
    """Bytes of a number in matrix products."""
    wide = float(storage_dtype(experiment).itemsize)
    return NARROW if experiment.precision.dtype in ("bfloat16", "float16") else wide
