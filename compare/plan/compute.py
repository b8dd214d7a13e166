"""A device's own work in a step, operation by operation.

    product      max(2 m k n FLOPs / (sustained x share), bytes / memory bandwidth): a roofline. The share
                 falls with size (PRODUCTS); the sustained rate is the machine's, or SUSTAINED of its peak
    attention    4 a T FLOPs a token, a the width of all heads. Fused: half of them, as masked scores are
                 skipped, at the machine's share of the peak; backward 2.5 times forward, as it computes
                 scores again. Else two products, and every score in memory
    vectors      bytes / memory bandwidth: norms 4C, sums with the residual 6C, the MLP's activation each of
                 its inputs and its result; the loss, casts of weights, sums of gradients and the update

Backward has two products for each of forward's, and twice its vectors. tp splits what is inside of its
regions; sequence parallelism the norms and sums as well. cp splits the tokens: of contiguous parts the last
sees all that is before it, and takes (2 n - 1) / n times the mean of a fused attention. Of experts a device
computes its own, on as many rows as a fair router gives each.

Sources: Megatron (arXiv 1909.08053); FlashAttention-2 (2307.08691). PRODUCTS, SUSTAINED and MEMORY: Calculon
(2310.06003, systems/a100_80g.json), its steps joined by lines. They are the same on every chip, and were not
fitted to a row that is predicted.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

import numpy as np
from msgspec import Meta, Struct

from compare.numerics.optimizer import moment_names
from compare.numerics.parameters import MLP_RATIO
from compare.plan.machine import Machine
from compare.spec.axes import SHARDED_FROM
from compare.spec.experiment import Experiment, Model
from compare.theory.memory import elements_of_stage

SUSTAINED, MEMORY = 0.95, 0.90
PRODUCTS = [(1e6, 0.1 / 0.95), (1e9, 0.6 / 0.95), (16e9, 0.9 / 0.95), (128e9, 1.0)]
"""FLOPs of a product, and the share of the sustained rate that it reaches."""
FUSED_BACKWARD = 2.5
SCORES = 6
"""Times that each score is written or read where attention is not fused."""
LOGITS = 6 * 4.0
"""Bytes of a logit, in float32, that the loss and its gradient read or write."""
UPDATED, MOMENT, SUMMED, CAST = 4 * 4.0, 2 * 4.0, 3 * 4.0, 4.0 + 2.0
"""Bytes of a parameter: clipping reads a gradient, the optimizer reads it again, and reads and writes the
weight and each moment; a pass adds its gradient to the sum; a cast reads 32 bits and writes 16."""

Part = Literal["products", "attention", "vectors", "again", "tp", "ep", "cp", "pp", "dp", "update"]
PARTS: tuple[Part, ...] = get_args(Part)
"""What the time of a step is spent on; of collectives, what nothing hides."""


class Term(Struct, frozen=True, kw_only=True):
    """One summand of a step's time."""

    part: Part
    label: str
    seconds: float
    forward: float = 1 / 3
    """Share of it that is in forward."""


class Shape(Struct, frozen=True, kw_only=True):
    """Sizes of a transformer, as far as its work depends on them."""

    layers: int
    width: int
    """C: of the residual stream."""
    attention: int
    """a: heads times their width."""
    keys: int
    """Heads of keys and of values, times their width: a, or less with grouped queries."""
    mlp: int
    """Width inside the MLP."""
    gates: int = 1
    """Products into the MLP: two where one gates the other (SwiGLU)."""
    vocabulary: int
    context: int
    """T: tokens of a sequence."""
    heads: int
    experts: int = 1
    """MLPs of a block; one without experts."""
    chosen: int = 1
    """Of these, MLPs that compute a token."""

    def block_products(self, tokens: float, tp: int, ep: int = 1) -> list[tuple[float, float, float]]:
        """(m, k, n) of those of one block's forward on a device: q, k, v; out; up and down of each expert."""
        width, attention, mlp = self.width, self.attention / tp, self.mlp / tp
        into, here = attention + 2 * self.keys / tp, self.experts // ep
        rows = tokens * self.chosen / here
        return [(tokens, w, n) for w, n in ((width, into), (attention, width))] + here * [
            (rows, width, self.gates * mlp),
            (rows, mlp, width),
        ]

    def attention_flops(self, tokens: float, tp: int) -> float:
        """Of one block's forward, nothing skipped."""
        return 4.0 * tokens * self.context * self.attention / tp

    @property
    def kept(self) -> float:
        """Numbers a token that backward reads of a block in eager PyTorch: 16 C of nanoGPT's."""
        return 4 * self.width + 2 * (self.attention + self.keys) + 2 * self.gates * self.mlp

    @property
    def block_parameters(self) -> float:
        """Weights of the products of one block."""
        return sum(k * n for _, k, n in self.block_products(1, 1))

    @property
    def flops_per_token(self) -> float:
        """Forward and backward, as MFU counts them: no recomputation, masked scores included."""
        products = self.layers * sum(m * k * n for m, k, n in self.block_products(1, 1))
        return 6.0 * (products + self.vocabulary * self.width) + 3 * self.layers * self.attention_flops(1, 1)


class Variant(Struct, frozen=True, kw_only=True):
    """Sizes in which a model of today differs from those here: it is planned, and not trained."""

    mlp: Annotated[int, Meta(ge=0)] = 0
    """Width inside the MLP; 0 for 4 n_embd."""
    gated: bool = False
    """Two products into the MLP, of which one gates the other (SwiGLU)."""
    untied: bool = False
    """A head of its own beside the token embedding."""


GPT = Variant()


def shape_of(model: Model, variant: Variant = GPT) -> Shape:
    """Sizes of the model, or of one that differs."""
    return Shape(
        layers=model.n_layer,
        width=model.n_embd,
        attention=model.n_embd,
        keys=model.n_embd // model.group,
        mlp=variant.mlp or MLP_RATIO * model.n_embd,
        gates=1 + variant.gated,
        vocabulary=model.vocab_size,
        context=model.block_size,
        heads=model.n_head,
        experts=model.n_experts or 1,
        chosen=model.experts_per_token if model.n_experts else 1,
    )


class Setting(Struct, frozen=True, kw_only=True):
    """One layout of one experiment on one machine, and how a step of it is carried out."""

    engine: str
    experiment: Experiment
    machine: Machine
    shape: Shape
    number: float
    """Bytes of a number in products and MLPs."""
    stream: float
    """Bytes of a number of the residual stream."""
    fused: bool
    """Whether attention is one kernel that writes no scores."""
    hidden: frozenset[str]
    """Axes, or an axis and a purpose, whose collectives run beside compute."""
    remat: str
    """As `layout.remat`, resolved; or half: dots, and every second product; or selective: attention alone."""
    casts: bool = False
    """Whether weights are cast to 16 bits in every pass."""
    scale: Mapping[str, float] = {}
    """By purpose, what the textbook's bytes are multiplied by: other widths, another model."""

    @property
    def peak(self) -> float:
        """FLOP/s of a device. Raises ExperimentError: nobody says."""
        return self.machine.peak_of(self.experiment.precision.product_dtype)

    @property
    def sustained(self) -> float:
        """FLOP/s of a large product."""
        dtype, machine = self.experiment.precision.product_dtype, self.machine
        return machine.sustained.get(dtype, SUSTAINED * self.peak) / machine.slowdown

    @property
    def memory(self) -> float:
        """Bytes/s that large vectors are read or written at."""
        return MEMORY * self.machine.memory_bytes_per_s / self.machine.slowdown

    @property
    def passes(self) -> int:
        """Forwards of a layer in a step: microbatches of all accumulated passes."""
        return self.experiment.microbatches_per_step

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on one device; its neighbours along tp work on the same."""
        layout = self.experiment.layout
        return self.experiment.tokens_per_step / self.passes / layout.data_parallel / layout.cp

    @property
    def blocks(self) -> float:
        """Times that a device runs a block's forward."""
        return self.passes * self.shape.layers / self.experiment.layout.pp

    def product_s(self, m: float, k: float, n: float) -> float:
        """Seconds of one product: the slower of its FLOPs and its bytes."""
        size = (m * k + k * n + m * n) * self.number
        return max(self._flops_s(2.0 * m * k * n), size / self.memory)

    def block_product_s(self) -> float:
        """Seconds of one block's products, forward."""
        layout = self.experiment.layout
        products = self.shape.block_products(self.tokens, layout.tp, layout.ep)
        return sum(self.product_s(*product) for product in products)

    def attention_s(self) -> tuple[float, float]:
        """Seconds of one block's attention, forward and backward."""
        layout, tp = self.experiment.layout, self.experiment.layout.tp
        flops = self.shape.attention_flops(self.tokens, tp)
        if self.fused:
            if not layout.zigzag and layout.context != "ulysses":
                flops *= 2 - 1 / layout.cp  # of the last device, for which the others wait
            forward = flops / 2 / (self.machine.attention * self.peak) * self.machine.slowdown
            return forward, FUSED_BACKWARD * forward
        scores = SCORES * self.tokens * self.shape.context * self.shape.heads / tp
        forward = self._flops_s(flops) + self.number * scores / self.memory
        return forward, 2 * forward

    def _flops_s(self, flops: float) -> float:
        sizes, shares = zip(*sorted(self.machine.products or PRODUCTS), strict=True)
        share = float(np.interp(math.log(max(flops, 1.0)), np.log(sizes), shares))
        return flops / (self.sustained * share)


def block_terms(setting: Setting) -> list[Term]:
    """Products, attention and vectors of a rank's blocks in all passes, and what is computed anew."""
    layout, shape, times = setting.experiment.layout, setting.shape, setting.blocks
    forward, backward = setting.attention_s()
    split = layout.tp if layout.sequence_parallel else 1
    size = setting.stream * 10.0 * setting.tokens * shape.width / split
    size += setting.number * setting.tokens * shape.chosen * (shape.gates + 1) * shape.mlp / layout.tp
    vectors, products = size / setting.memory, setting.block_product_s()
    attention = 0.0 if setting.fused and setting.remat == "dots" else forward  # its result is kept
    again = {
        "none": 0.0,
        "selective": attention,
        "dots": vectors + attention,
        "half": vectors + products / 2,
        "full": products + forward + vectors,
    }[setting.remat]
    share = forward / (forward + backward)
    return [
        Term(part="products", label="blocks", seconds=3 * times * products),
        Term(part="attention", label="attention", seconds=times * (forward + backward), forward=share),
        Term(part="vectors", label="norms, activation, residual", seconds=3 * times * vectors),
        Term(part="again", label=f"remat = {setting.remat}", seconds=times * again, forward=0.0),
    ]


def head_terms(setting: Setting) -> list[Term]:
    """Logits and loss, on the rank that has them; computed anew where they come in parts."""
    chunks, shape = setting.experiment.train.loss_chunks, setting.shape
    tokens, columns = setting.tokens / chunks, shape.vocabulary / setting.experiment.layout.tp
    times, turns = setting.passes * chunks, 4 if chunks > 1 else 3
    head, loss = setting.product_s(tokens, shape.width, columns), LOGITS * tokens * columns / setting.memory
    return [
        Term(part="products", label="head", seconds=turns * times * head),
        Term(part="vectors", label="loss", seconds=times * loss),
    ]


def update_terms(setting: Setting, *, stage: int) -> list[Term]:
    """The optimizer on a device's shard, and what a pass does to all parameters."""
    layout = setting.experiment.layout
    scale, is_split = setting.scale.get("weights", 1.0), layout.zero >= SHARDED_FROM["optimizer"]
    elements = scale * elements_of_stage(setting.engine, setting.experiment, stage=stage)
    shard = scale * elements_of_stage(setting.engine, setting.experiment, stage=stage, sharded=is_split)
    moments = len(moment_names(setting.experiment.optimizer))
    sums = setting.passes if setting.passes > 1 else 0
    sizes = {
        "optimizer and clipping": (UPDATED + MOMENT * moments) * shard,
        "gradients added up": sums * SUMMED * elements,
        "weights cast to 16 bits": setting.passes * setting.casts * CAST * elements,
    }
    return [Term(part="update", label=label, seconds=size / setting.memory) for label, size in sizes.items()]
