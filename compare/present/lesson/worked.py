"""One worked number of a real size: a model of 7B parameters on eight H100, a step under each strategy.

    time = bytes on the wire / bandwidth         beside        FLOPs / the chip's peak

The bytes are the closed forms of this project, halved: activations, parameters and gradients go over the wire
in bfloat16. State is 16 bytes a parameter: bfloat16 weights and gradients, and in float32 a master copy and
Adam's two moments (ZeRO, arXiv 1910.02054, section 3.1). The chip: NVIDIA's data sheet of the H100 SXM. Its
NVLink has 900 GB/s both ways together; a DGX H100 has eight network cards of 400 Gb/s, one for each GPU. That
communication is held against compute in this way is told in "How to Scale Your Model"
(jax-ml.github.io/scaling-book); the share of a pipeline that waits in GPipe (arXiv 1811.06965).
"""

import functools

from msgspec import Struct

from compare.contract.communication import ring_wire_bytes
from compare.judge.closed_forms.communication import communication
from compare.judge.closed_forms.flops import model_flops_per_token
from compare.judge.closed_forms.memory import elements_of_stage
from compare.judge.peaks import peak_flops
from compare.numerics.parameters import parameter_count
from compare.show.findings import Row, Table, Text
from compare.spec.axes import DP_SHARD, PP
from compare.spec.experiment import Experiment, Model, Train, edited
from compare.studies.lessons import FOLDERS, LESSONS
from compare.terminal import human_bytes

GPUS = 8
CHIP = "NVIDIA H100 80GB HBM3"
MEMORY = 80e9
NVLINK, NETWORK = 450e9, 50e9
"""Bytes a second that a GPU sends, one way."""
SENT, OF_STATE = 2, 16
"""Bytes of a number on the wire, and of a parameter's whole state."""
MODEL = Model(n_layer=32, n_head=32, n_embd=4096, block_size=4096, vocab_size=32000)
"""As wide and deep as Llama 2 7B, with nanoGPT's layers."""
ROWS = 16
"""Sequences of a step, of all GPUs together; also the microbatches of the pipeline."""
BY_HAND = next(engine for engine, folder in FOLDERS.items() if folder == "torchpar/manual")
SOURCES = (
    "NVIDIA, data sheet of the H100 SXM; DGX H100 user guide (eight 400 Gb/s network cards). State of 16 "
    "bytes a parameter: ZeRO, arXiv 1910.02054. Communication of tensor parallelism: Megatron, arXiv "
    "1909.08053. Waiting in a pipeline: GPipe, arXiv 1811.06965. The method: How to Scale Your Model, "
    "jax-ml.github.io/scaling-book."
)


class Worked(Struct, frozen=True, kw_only=True):
    """A step of the worked example under one strategy, of the GPU that sends most."""

    strategy: str
    sent: dict[str, tuple[float, float]]
    """Kind of collective -> bytes of the full tensors, and bytes on the wire."""
    state: float
    """Bytes of parameters, gradients and optimizer."""
    compute_s: float
    """Of a GPU at its peak."""
    waits: float
    """Share of the step in which a rank of a pipeline has nothing to do; 0 of the others."""

    @property
    def wire(self) -> float:
        """Bytes on the wire, of all collectives."""
        return sum(wire for _, wire in self.sent.values())

    def seconds(self, bandwidth: float) -> float:
        """Time of all of it, nothing overlapped."""
        return self.wire / bandwidth

    @property
    def fits(self) -> bool:
        """True if the state alone leaves room on the GPU."""
        return self.state < MEMORY


@functools.cache
def worked(strategy: str) -> Worked:
    """The example under a strategy of LESSONS, over all GPUs."""
    experiment = _experiment(LESSONS[strategy].axis)
    layout, scale = experiment.layout, SENT / 4  # the closed forms' numbers have four bytes
    sent: dict[str, tuple[float, float]] = {}
    stages = [communication(BY_HAND, experiment, stage=stage) for stage in range(layout.pp)]
    for (kind, axis, _), size in max(stages, key=lambda stage: sum(stage.values())).items():
        full, wire = sent.get(kind, (0.0, 0.0))
        own = size * scale
        sent[kind] = full + own, wire + ring_wire_bytes(kind, round(own), layout.axes[axis])
    elements = max(elements_of_stage(BY_HAND, experiment, stage=stage) for stage in range(layout.pp))
    peak = peak_flops(CHIP, "bfloat16")
    assert peak is not None
    flops = model_flops_per_token(experiment) * experiment.tokens_per_step / GPUS
    return Worked(
        strategy=strategy,
        sent=sent,
        state=OF_STATE * elements / (layout.dp_shard if layout.zero == 3 else 1),
        compute_s=flops / peak,
        waits=(layout.pp - 1) / (layout.microbatches + layout.pp - 1),
    )


def _experiment(axis: str) -> Experiment:
    """The example with all GPUs along one axis, as the closed forms take it: in float32."""
    settings = {DP_SHARD: {"zero": 3}, PP: {"microbatches": ROWS, "schedule": "gpipe"}}
    layout = {axis: GPUS, "remat": "none", **settings.get(axis, {})}
    whole = Experiment(model=MODEL, train=Train(batch_size=ROWS))
    return edited(whole, {"layout": layout})


def sentence() -> str:
    """What the example is."""
    compute = worked(next(iter(LESSONS))).compute_s
    return (
        f"A model of {parameter_count(MODEL) / 1e9:.1f}e9 parameters ({MODEL.n_layer} layers, {MODEL.n_embd} "
        f"wide), {ROWS} sequences of {MODEL.block_size:,} tokens a step, on {GPUS} H100: a GPU computes for "
        f"{compute * 1e3:.0f} ms at its peak under every strategy. What differs is what it holds and sends."
    )


def derivation(strategy: str) -> list[str]:
    """Time = bytes / bandwidth, one line for each kind of collective of the strategy."""
    lines = []
    for kind, (full, wire) in worked(strategy).sent.items():
        if wire < worked(strategy).wire / 100:
            continue
        lines.append(
            f"{kind}: {human_bytes(full)} of full tensors x {_factor(kind)} = {human_bytes(wire)} on the "
            f"wire; / {NVLINK / 1e9:.0f} GB/s = {_ms(wire / NVLINK)} over NVLink, / {NETWORK / 1e9:.0f} GB/s "
            f"= {_ms(wire / NETWORK)} over the network"
        )
    return lines


def table(strategy: str = "") -> Table:
    """All strategies side by side; the row of `strategy` stands out."""
    rows = []
    for name in LESSONS:
        one = worked(name)
        state = Text(
            human_bytes(one.state), "" if one.fits else "more than 80 GB", "" if one.fits else "fail"
        )
        cells = [state, Text(human_bytes(one.wire)), *(_time(one, speed) for speed in (NVLINK, NETWORK))]
        cells.append(Text(f"{one.waits:.0%}" if one.waits else "no"))
        head = Text(LESSONS[name].title, "this lesson" if name == strategy else "")
        rows.append(Row(head, cells, is_total=name == strategy))
    columns = ["state of a GPU", "sent in a step", "over NVLink", "over the network", "waits"]
    return Table(name=f"7B parameters on {GPUS} H100", corner="all GPUs along", columns=columns, rows=rows)


def when_it_pays(strategy: str) -> list[str]:
    """When the strategy is the one to take, with the example's numbers."""
    one = worked(strategy)
    near, far = (one.seconds(speed) / one.compute_s for speed in (NVLINK, NETWORK))
    tokens = ROWS * MODEL.block_size / GPUS
    words = {
        "data_parallel": [
            "Take it while parameters, gradients and optimizer state fit on one device: nothing is simpler.",
            "Its bytes do not depend on the batch, and its compute does: with enough tokens on a GPU the "
            "all-reduce hides behind backward. Here compute and communication are even at "
            f"{tokens * near:,.0f} tokens a GPU over NVLink, and at {tokens * far:,.0f} over the network.",
        ],
        "fully_sharded": [
            "Take it when the state is too large for one device: each device keeps a share of it, and sends "
            "half as much again as under data parallelism (two gathers and a scatter, each half an "
            "all-reduce).",
            "It hides behind compute as data parallelism's all-reduce does: both are even at "
            f"{tokens * near:,.0f} tokens a GPU over NVLink, and at {tokens * far:,.0f} over the network. "
            "With fewer tokens, shard within a machine and replicate between machines (preset hsdp).",
        ],
        "tensor_parallel": [
            "Take it within one machine, when the weights or activations of a layer are too large for a "
            "device, or when the batch has fewer rows than there are devices.",
            "Every layer waits for its all-reduces, and more tokens do not help, since both times grow "
            f"alike. Here communication takes {near:.0%} of the compute over NVLink, and {far:.0%} over the "
            "network. A wider model computes more for each byte.",
        ],
        "pipeline_parallel": [
            "Take it between machines: it sends least, activations at a few cuts "
            f"({far:.0%} of the compute over the network).",
            "It pays with many microbatches m for p ranks: a rank waits for (p - 1) / (m + p - 1) of the "
            f"step, here {one.waits:.0%}, and for a tenth of it with m = {9 * (GPUS - 1)}. Layers must "
            "divide evenly, and every microbatch in flight holds activations.",
        ],
    }
    return words[strategy]


def _factor(kind: str) -> str:
    n = GPUS
    return {"all_reduce": f"2 ({n} - 1) / {n}", "permute": "1"}.get(kind, f"({n} - 1) / {n}")


def _time(one: Worked, bandwidth: float) -> Text:
    seconds = one.seconds(bandwidth)
    return Text(_ms(seconds), f"{seconds / one.compute_s:.0%} of the compute")


def _ms(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
