"""Seconds of a device's own work in a step: products, attention, what lies between them, and the update.

    product      max(FLOPs / (sustained x share), bytes / memory bandwidth): a roofline. The share falls with
                 size (PRODUCTS); the sustained rate is the machine's, or SUSTAINED of its peak
    attention    fused: half the FLOPs, as masked scores are skipped, at the machine's share of the peak;
                 backward 2.5 times forward, as it computes scores again. Else two products, and every score
                 in memory
    vectors      bytes / memory bandwidth; so the loss, casts of weights, sums of gradients and the update

Source of PRODUCTS, SUSTAINED and MEMORY: Calculon (arXiv 2310.06003, systems/a100_80g.json), its steps joined
by lines. They are the same on every chip, and were not fitted to a row that is predicted.
"""

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
from msgspec import Struct

from compare.judge.closed_forms.communication import microbatches_of
from compare.judge.closed_forms.memory import elements_of_stage
from compare.numerics.optimizer import moment_names
from compare.plan.machine import Machine
from compare.plan.traffic import NOTHING
from compare.plan.work import Product, Shape
from compare.spec.axes import SHARDED_FROM
from compare.spec.experiment import Experiment, ExperimentError

SUSTAINED, MEMORY = 0.95, 0.90
PRODUCTS = [(1e6, 0.1 / 0.95), (1e9, 0.6 / 0.95), (16e9, 0.9 / 0.95), (128e9, 1.0)]
"""FLOPs of a product, and the share of the sustained rate that it reaches."""
FUSED_BACKWARD = 2.5
LOGITS = 6 * 4.0
"""Bytes of a logit, in float32, that the loss and its gradient read or write."""
UPDATED, MOMENT, SUMMED, CAST = 4 * 4.0, 2 * 4.0, 3 * 4.0, 4.0 + 2.0
"""Bytes of a parameter: clipping reads a gradient, the optimizer reads it again, and reads and writes the
weight and each moment; a pass adds its gradient to the sum; a cast reads 32 bits and writes 16."""

Part = Literal["products", "attention", "vectors", "recomputed", "tensor", "pipeline", "data", "update"]


class Term(Struct, frozen=True, kw_only=True):
    """One summand of a step's time."""

    part: Part
    what: str
    seconds: float
    formula: str
    forward: float = 1 / 3
    """Share of it that is in forward."""


class Ways(Struct, frozen=True, kw_only=True):
    """How a step is carried out, as far as its time depends on it and the layout does not say."""

    number: float
    """Bytes of a number in products and MLPs."""
    stream: float
    """Bytes of a number of the residual stream."""
    fused: bool
    """Whether attention is one kernel that writes no scores."""
    hidden: frozenset[str]
    """Axes, or an axis and a purpose, whose collectives run beside compute."""
    remat: Literal["none", "dots", "half", "full", "selective"]
    """As `layout.remat`, resolved; or half: dots, and every second product; or selective: attention alone."""
    casts: bool = False
    """Whether weights are cast to 16 bits in every pass."""
    scale: Mapping[str, float] = NOTHING
    """By purpose, what the closed forms' bytes are multiplied by."""


class Setting(Struct, frozen=True, kw_only=True):
    """One layout of one experiment on one machine."""

    engine: str
    experiment: Experiment
    machine: Machine
    ways: Ways
    shape: Shape

    @property
    def peak(self) -> float:
        """FLOP/s of a device. Raises ExperimentError: nobody says."""
        return peak_of(self.machine, self.experiment.precision.product_dtype)

    @property
    def sustained(self) -> float:
        """FLOP/s of a large product."""
        return self.machine.sustained.get(self.experiment.precision.product_dtype, SUSTAINED * self.peak)

    @property
    def memory(self) -> float:
        """Bytes/s that large vectors are read or written at."""
        return MEMORY * self.machine.memory_bytes_per_s

    @property
    def passes(self) -> int:
        """Forwards of a layer in a step: microbatches of all accumulated passes."""
        return microbatches_of(self.experiment)

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on one device; its neighbours along tp work on the same."""
        return self.experiment.tokens_per_step / self.passes / self.experiment.layout.data_parallel

    @property
    def blocks(self) -> float:
        """Times that a device runs a block's forward."""
        return self.passes * self.shape.layers / self.experiment.layout.pp

    def product_s(self, product: Product) -> float:
        """Seconds of one product: the slower of its FLOPs and its bytes."""
        by_flops = product.flops / (self.sustained * self._share(product.flops))
        return max(by_flops, product.numbers * self.ways.number / self.memory)

    def block_product_s(self) -> float:
        """Seconds of one block's products, forward."""
        return sum(map(self.product_s, self.shape.block_products(self.tokens, self.experiment.layout.tp)))

    def attention_s(self) -> tuple[float, float, str]:
        """Seconds of one block's attention, forward and backward, and how they come about."""
        tp = self.experiment.layout.tp
        flops = self.shape.attention_flops(self.tokens, tp)
        if self.ways.fused:
            share = self.machine.attention
            forward = flops / 2 / (share * self.peak)
            how = f"{flops / 2e9:,.3g} GFLOP / ({share:g} x {self.peak / 1e12:g} TFLOP/s)"
            return forward, FUSED_BACKWARD * forward, f"{how} x (1 + {FUSED_BACKWARD})"
        size = self.ways.number * self.shape.score_numbers(self.tokens, tp)
        forward = flops / (self.sustained * self._share(flops)) + size / self.memory
        return forward, 2 * forward, f"3 x ({flops / 1e9:,.3g} GFLOP, and {size / 1e6:,.1f} MB of scores)"

    def _share(self, flops: float) -> float:
        sizes, shares = zip(*(self.machine.products or PRODUCTS), strict=True)
        return float(np.interp(math.log(max(flops, 1.0)), np.log(sizes), shares))

    def per_s(self, size: float) -> str:
        """Bytes over bandwidth, as formulas have it."""
        return f"{size / 1e6:,.2f} MB / {self.memory / 1e9:,.4g} GB/s"


def peak_of(machine: Machine, dtype: str) -> float:
    """FLOP/s of a device. Raises ExperimentError: nobody says."""
    if dtype not in machine.peak:
        raise ExperimentError(
            f"--machine {machine.name}: no peak is known for {dtype} (there is {', '.join(machine.peak)}): "
            f"set precision.dtype"
        )
    return machine.peak[dtype]


def own_work(setting: Setting) -> list[Term]:
    """Products, attention and vectors of a rank's blocks in all passes, and what is computed anew."""
    layout, shape, ways, times = setting.experiment.layout, setting.shape, setting.ways, setting.blocks
    products = shape.block_products(setting.tokens, layout.tp)
    forward, backward, how = setting.attention_s()
    split = layout.tp if layout.sequence_parallel else 1
    size = ways.stream * shape.stream_numbers(setting.tokens, split)
    size += ways.number * shape.mlp_numbers(setting.tokens, layout.tp)
    vectors, once = size / setting.memory, setting.block_product_s()
    attention = 0.0 if ways.fused and ways.remat == "dots" else forward  # its result is kept
    again = {
        "none": 0.0,
        "selective": attention,
        "dots": vectors + attention,
        "half": vectors + once / 2,
        "full": once + forward + vectors,
    }[ways.remat]
    said = ", ".join(
        f"{one.name} {one.flops / 1e9:,.4g} GFLOP {setting.product_s(one) * 1e6:,.1f} us" for one in products
    )
    return [
        Term(part="products", what="blocks", seconds=3 * times * once, formula=f"{times:g} x 3 x ({said})"),
        Term(
            part="attention",
            what="scores and their sums",
            seconds=times * (forward + backward),
            forward=forward / (forward + backward),
            formula=f"{times:g} x {how}",
        ),
        Term(
            part="vectors",
            what="norms, activation, residual",
            seconds=3 * times * vectors,
            formula=f"{times:g} x 3 x {setting.per_s(size)}",
        ),
        Term(
            part="recomputed",
            what="forward again",
            seconds=times * again,
            forward=0.0,
            formula=f"{times:g} x {again * 1e6:,.1f} us of forward: remat = {ways.remat}",
        ),
    ]


def head_and_loss(setting: Setting) -> list[Term]:
    """Logits and loss, on the rank that has them; computed anew where they come in parts."""
    chunks = setting.experiment.train.loss_chunks
    product = setting.shape.head_product(setting.tokens / chunks, setting.experiment.layout.tp)
    once, times, turns = setting.product_s(product), setting.passes * chunks, 4 if chunks > 1 else 3
    size = LOGITS * product.m * product.n
    return [
        Term(
            part="products",
            what="head",
            seconds=turns * times * once,
            formula=f"{times:g} x {turns} x {product.flops / 1e9:,.4g} GFLOP {once * 1e6:,.1f} us",
        ),
        Term(
            part="vectors",
            what="loss",
            seconds=times * size / setting.memory,
            formula=f"{times:g} x {setting.per_s(size)}",
        ),
    ]


def update(setting: Setting, *, stage: int) -> list[Term]:
    """The optimizer on a device's shard, and what a pass does to all parameters."""
    layout, ways = setting.experiment.layout, setting.ways
    held = elements_of_stage(setting.engine, setting.experiment, stage=stage) * ways.scale.get("weights", 1.0)
    moments = len(moment_names(setting.experiment.optimizer))
    shard = held / (layout.dp_shard if layout.zero >= SHARDED_FROM["optimizer"] else 1)
    parts = {
        "optimizer and clipping": (1, UPDATED + MOMENT * moments, shard),
        "gradients added up": (setting.passes if setting.passes > 1 else 0, SUMMED, held),
        "weights cast to 16 bits": (setting.passes * ways.casts, CAST, held),
    }
    return [
        Term(
            part="update",
            what=what,
            seconds=times * size * elements / setting.memory,
            formula=f"{times:g} x {size:g} B x {elements / 1e6:,.2f} M parameters / "
            f"{setting.memory / 1e9:,.4g} GB/s",
        )
        for what, (times, size, elements) in parts.items()
    ]
