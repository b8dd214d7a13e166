"""One worked number of a real size: a model of 7B parameters on eight H100, a step under each strategy.

    time = bytes on the wire / bandwidth         beside        FLOPs / the chip's peak

The bytes are the closed forms of this project, halved: activations, parameters and gradients go over the wire
in bfloat16. State is 16 bytes a parameter: bfloat16 weights and gradients, and in float32 a master copy and
Adam's two moments. NVLink has 900 GB/s both ways together; a DGX H100 has eight network cards of 400 Gb/s.
Sources: `SOURCES`.
"""

import functools
import math
from typing import NamedTuple

from compare.contract.communication import ring_wire_bytes
from compare.judge.closed_forms.communication import communication
from compare.judge.closed_forms.flops import model_flops_per_token
from compare.judge.closed_forms.memory import elements_of_stage
from compare.judge.peaks import peak_flops
from compare.numerics.parameters import parameter_count
from compare.show.findings import Row, Table, Text
from compare.spec.axes import DP_SHARD, PP
from compare.spec.experiment import Experiment, Model, Train, edited
from compare.studies.lessons import LESSONS
from compare.terminal import human_bytes

GPUS = 8
CHIP, MEMORY = "NVIDIA H100 80GB HBM3", 80e9
NVLINK, NETWORK = 450e9, 50e9
"""Bytes a second that a GPU sends, one way."""
SENT, OF_STATE = 2, 16
"""Bytes of a number on the wire, and of a parameter's whole state."""
MODEL = Model(n_layer=32, n_head=32, n_embd=4096, block_size=4096, vocab_size=32000)
"""As wide and deep as Llama 2 7B, with nanoGPT's layers."""
ROWS = 16
"""Sequences of a step, of all GPUs together; also the microbatches of the pipeline."""
BY_HAND = "torch-manual"
WHEN = {
    "data_parallel": "while parameters, gradients and optimizer state fit on one device: nothing is simpler. "
    "Its bytes do not depend on the batch, and its compute does: with enough tokens on a GPU the all-reduce "
    "hides behind backward.",
    "fully_sharded": "when the state is too large for one device: each keeps a share of it, and sends half "
    "as much again as under data parallelism (two gathers and a scatter, each half an all-reduce). With few "
    "tokens, shard within a machine and replicate between machines (preset hsdp).",
    "tensor_parallel": "within one machine, when weights or activations of a layer are too large for a "
    "device, or when the batch has fewer rows than there are devices. Every layer waits for its all-reduces, "
    "and more tokens do not help, since both times grow alike; a wider model computes more for each byte.",
    "pipeline_parallel": "between machines: it sends least, activations at a few cuts. It pays with many "
    "microbatches m for p ranks, as a rank waits for (p - 1) / (m + p - 1) of the step; but layers must "
    "divide evenly, and every microbatch in flight holds activations.",
}
"""When to take a strategy."""
SOURCES = (
    "NVIDIA, data sheet of the H100 SXM; DGX H100 user guide (eight 400 Gb/s network cards). State of 16 "
    "bytes a parameter: ZeRO, arXiv 1910.02054. Communication of tensor parallelism: Megatron, arXiv "
    "1909.08053. Waiting in a pipeline: GPipe, arXiv 1811.06965. The method: How to Scale Your Model, "
    "jax-ml.github.io/scaling-book."
)


class Worked(NamedTuple):
    """A step of the worked example under one strategy, of the GPU that sends most."""

    wire: float
    """Bytes on the wire, of all collectives."""
    state: float
    """Bytes of parameters, gradients and optimizer."""
    compute_s: float
    """Of a GPU at its peak."""
    waits: float
    """Share of the step in which a rank of a pipeline has nothing to do; 0 of the others."""


@functools.cache
def worked(strategy: str) -> Worked:
    """The example under a strategy of LESSONS, with all GPUs along its axis."""
    axis = LESSONS[strategy].axis
    more = {DP_SHARD: {"zero": 3}, PP: {"microbatches": ROWS, "schedule": "gpipe"}}.get(axis, {})
    experiment = Experiment(model=MODEL, train=Train(batch_size=ROWS))  # float32, as closed forms take it
    experiment = edited(experiment, {"layout": {axis: GPUS, "remat": "none", **more}})
    layout, stages = experiment.layout, range(experiment.layout.pp)
    wires = [
        sum(
            ring_wire_bytes(kind, round(size * SENT / 4), layout.axes[axis])
            for (kind, axis, _), size in communication(BY_HAND, experiment, stage=stage).items()
        )
        for stage in stages
    ]
    elements = max(elements_of_stage(BY_HAND, experiment, stage=stage) for stage in stages)
    flops = model_flops_per_token(experiment) * experiment.tokens_per_step / GPUS
    return Worked(
        wire=max(wires),
        state=OF_STATE * elements / (layout.dp_shard if layout.zero == 3 else 1),
        compute_s=flops / (peak_flops(CHIP, "bfloat16") or math.nan),
        waits=(layout.pp - 1) / (layout.microbatches + layout.pp - 1),
    )


def sentence() -> str:
    """What the example is."""
    compute = worked(next(iter(LESSONS))).compute_s
    return (
        f"A model of {parameter_count(MODEL) / 1e9:.1f}e9 parameters ({MODEL.n_layer} layers, {MODEL.n_embd} "
        f"wide), {ROWS} sequences of {MODEL.block_size:,} tokens a step, on {GPUS} H100: a GPU computes for "
        f"{compute * 1e3:.0f} ms at its peak under every strategy. What differs is what it holds and sends."
    )


def table(strategy: str) -> Table:
    """All strategies side by side; the row of `strategy` stands out."""
    rows, title = [], LESSONS[strategy].title
    for name, lesson in LESSONS.items():
        step = worked(name)
        fits = step.state < MEMORY
        state = Text(human_bytes(step.state), "" if fits else "more than 80 GB", "" if fits else "fail")
        times = [step.wire / bandwidth for bandwidth in (NVLINK, NETWORK)]
        cells = [
            state,
            Text(human_bytes(step.wire)),
            *(Text(f"{time * 1e3:,.0f} ms", f"{time / step.compute_s:.0%} of the compute") for time in times),
            Text(f"{step.waits:.0%}" if step.waits else "no"),
        ]
        head = Text(lesson.title, "this lesson" if name == strategy else "")
        rows.append(Row(head, cells, is_total=name == strategy))
    columns = ["state of a GPU", "sent in a step", "over NVLink", "over the network", "waits"]
    return Table(
        name=f"7B parameters on {GPUS} H100",
        corner="all GPUs along",
        columns=columns,
        rows=rows,
        below=f"Take {title[0].lower()}{title[1:]} {WHEN[strategy]} {SOURCES}",
    )
