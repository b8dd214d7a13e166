"""Memory of a device at the peak of a step, estimated: where the gradient of the logits is made.

    state         parameters, gradients and optimizer as at rest (`compare.judge.closed_forms.memory`)
    activations   of blocks in flight, of one block that backward computes anew, and of both ends; parameters
                  that ZeRO gathers, and whole gradients that it scatters
    logits        as often as an engine keeps tensors of their size

A block keeps so many numbers a token, of width C, with H heads and T positions:

                stream   entering tp   inside tp
    torch       2C       2C            12C          a fused attention keeps no scores
    JAX         6C       2C            13C + HT     residuals of each operation of a norm or a GELU
    JAX, dots   2C       -             8C + HT
    full        C        -             -

tp splits what is inside of its regions, sequence parallelism the stream as well. Against 70 peaks that were
measured on a CPU (`tests/data/peaks.json`) the estimate was 0.88 to 1.53 times as much: LEAST and MOST.
"""

from typing import NamedTuple

from compare.judge.closed_forms.memory import by_device, elements_of_stage, on_one_of_tp, state_of_stage
from compare.numerics.parameters import block_parameters, end_parameters, storage_dtype
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment

LEAST, MOST = 0.85, 1.6


class StoredNumbers(NamedTuple):
    """Numbers a token that are kept for backward, as multiples of C, and of H T."""

    stream: int
    entering: int = 0
    inside: int = 0
    scores: int = 0


INPUT = StoredNumbers(1)
BLOCK = {"autograd": StoredNumbers(2, 2, 12), "scan": StoredNumbers(6, 2, 13, 1)}
DOTS = {"autograd": BLOCK["autograd"], "scan": StoredNumbers(2, 0, 8, 1)}
"""Eager PyTorch frees nothing of a block before all of it has been recomputed."""
DROPPED = StoredNumbers(4, scores=4)
UNFUSED = {"autograd": StoredNumbers(0), "scan": StoredNumbers(0, scores=3)}
"""In the block that runs: scores, and the gradients of scores and weights."""
ENDS = {"autograd": StoredNumbers(4, 1), "scan": StoredNumbers(6, 1)}
LOGITS = {"autograd": 4, "scan": 2}


def peak_of_stage(engine: str, experiment: Experiment, *, stage: int) -> dict[str, float]:
    """Bytes by kind of each device of one rank of the pipeline."""
    return state_of_stage(engine, experiment, stage=stage) | {
        "activations": _activations(engine, experiment, stage) + _gathered(engine, experiment, stage),
        "logits": _logits(engine, experiment, stage),
    }


def peak_estimate(engine: str, experiment: Experiment) -> dict[str, list[float]]:
    """`peak_of_stage` for each device in the order of the mesh; what offload keeps on the host with it."""
    return by_device(peak_of_stage, engine, experiment)


def in_flight(engine: str, experiment: Experiment, stage: int) -> int:
    """Microbatches times chunks whose activations a rank of a pipeline keeps at once."""
    layout, microbatches = experiment.layout, experiment.microbatches_per_step
    ranks, chunks = layout.pp, layout.chunks
    if ranks == 1:
        return 1
    if ENGINES[engine].sent_by_xla:
        return chunks * microbatches + ranks - 1  # a scan keeps what is computed in the bubble, too
    is_scan = ENGINES[engine].holds.residuals == "scan"
    place = 0 if is_scan else stage  # one program for all devices has buffers as large on each
    counts = {
        "gpipe": chunks * microbatches,
        "1f1b": min(microbatches, ranks - place),
        "interleaved": min(chunks * microbatches, 2 * (ranks - place - 1) + (chunks - 1) * ranks + 1),
        "zero_bubble": 2 * min(microbatches, ranks),  # what weights wait for is kept beside activations
    }
    return counts[layout.schedule] + is_scan  # and those of the tick itself


def _activations(engine: str, experiment: Experiment, stage: int) -> float:
    layout, model, residuals = experiment.layout, experiment.model, ENGINES[engine].holds.residuals
    dropped = [DROPPED] if model.dropout else []
    block = [BLOCK[residuals], *dropped]
    remat = ENGINES[engine].remat_for(layout)
    stored = {"full": [INPUT], "none": block, "dots": [DOTS[residuals], *dropped]}[remat]
    blocks = model.n_layer / (layout.pp * layout.chunks) * in_flight(engine, experiment, stage)
    numbers = blocks * _numbers(stored, experiment) + _numbers([ENDS[residuals]], experiment)
    numbers += _numbers([*block, UNFUSED[residuals]], experiment)
    return _bytes_of_tokens(experiment) * numbers


def _numbers(stored: list[StoredNumbers], experiment: Experiment) -> float:
    model, layout = experiment.model, experiment.layout
    split = layout.tp if layout.sequence_parallel else 1
    return sum(
        model.n_embd * (each.stream / split + each.entering + each.inside / layout.tp)
        + model.n_head * model.block_size * each.scores / layout.tp
        for each in stored
    )


def _gathered(engine: str, experiment: Experiment, stage: int) -> float:
    """Bytes of parameters that are gathered, and of gradients that are whole until they are scattered."""
    layout, model = experiment.layout, experiment.model
    if layout.dp_shard == 1:
        return 0.0
    split_from = ENGINES[engine].holds.sharded_from
    gathered = everything = elements_of_stage(engine, experiment, stage=stage)
    if layout.zero == 3 and layout.reshard_after_forward:  # the ends, and two blocks
        embeddings, final_norm = end_parameters(model)
        unit = [*embeddings, *final_norm, *2 * block_parameters(model, 0)]
        gathered = min(everything, on_one_of_tp(unit, layout))
    elements = gathered * (layout.zero >= split_from["parameters"])
    elements += everything * (layout.zero >= split_from["gradients"])
    return storage_dtype(experiment).itemsize * elements


def _logits(engine: str, experiment: Experiment, stage: int) -> float:
    layout, residuals = experiment.layout, ENGINES[engine].holds.residuals
    if residuals == "autograd" and stage != layout.pp - 1:
        return 0.0
    copies, microbatches = LOGITS[residuals], experiment.microbatches_per_step
    if layout.pp > 1 and residuals == "autograd":
        copies += 2 * (microbatches - 1)  # GPipe's wait, and results stay
    elif layout.pp > 1 and ENGINES[engine].sent_by_xla:
        copies *= -(-microbatches // layout.pp)  # the stages share all that there are
    columns = -(-experiment.model.vocab_size // layout.tp)
    return _bytes_of_tokens(experiment) * copies / experiment.train.loss_chunks * columns


def _bytes_of_tokens(experiment: Experiment) -> float:
    """Of one number a token that is kept, of the tokens of a microbatch that a device works on.

    Under tp its neighbours work on the same. In 16 bits some is kept in float32 beside what is cast.
    """
    train, layout, stored = experiment.train, experiment.layout, storage_dtype(experiment).itemsize
    tokens = train.batch_size / layout.data_parallel / layout.microbatches * experiment.model.block_size
    return tokens * (stored + 2 if experiment.precision.dtype in ("bfloat16", "float16") else stored)
