"""The work of a model on one device, operation by operation: what a prediction adds up.

    product      (m, k) (k, n)   2 m k n FLOPs; it reads m k + k n numbers and writes m n
    attention    4 a T FLOPs a token, a the width of all heads: scores, and their sum over values. A fused
                 kernel skips the half that is masked, and never writes the scores; else each score is
                 written or read six times
    vectors      numbers read and written beside products: norms 4C, sums with the residual 6C, the MLP's
                 activation each of its inputs and its result

Backward has two products for each of forward's, and twice its attention and vectors. tp splits what is
inside of its regions; sequence parallelism the norms and sums as well.

Sources: Megatron (arXiv 1909.08053); FlashAttention-2 (2307.08691) for what a fused kernel does.
"""

from typing import NamedTuple

from msgspec import Struct

from compare.numerics.parameters import MLP_RATIO
from compare.spec.experiment import Model

SCORES = 6
"""Times that each score is written or read where attention is not fused."""


class Product(NamedTuple):
    """A product of an (m, k) and a (k, n) matrix on one device."""

    name: str
    m: float
    k: float
    n: float

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.m * self.k * self.n

    @property
    def numbers(self) -> float:
        """Read and written at least."""
        return self.m * self.k + self.k * self.n + self.m * self.n


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
    tied: bool = True
    """Whether the head is the token embedding."""

    def block_products(self, tokens: float, tp: int) -> list[Product]:
        """Those of one block's forward, on one device of tp."""
        width, attention = self.width, self.attention / tp
        return [
            Product("q, k, v", tokens, width, attention + 2 * self.keys / tp),
            Product("out", tokens, attention, width),
            Product("up", tokens, width, self.gates * self.mlp / tp),
            Product("down", tokens, self.mlp / tp, width),
        ]

    def head_product(self, tokens: float, tp: int) -> Product:
        """The logits."""
        return Product("head", tokens, self.width, self.vocabulary / tp)

    def attention_flops(self, tokens: float, tp: int) -> float:
        """Of one block's forward, nothing skipped."""
        return 4.0 * tokens * self.context * self.attention / tp

    def score_numbers(self, tokens: float, tp: int) -> float:
        """Numbers of scores that one block writes or reads in forward, where attention is not fused."""
        return SCORES * tokens * self.context * self.heads / tp

    def stream_numbers(self, tokens: float, split: int) -> float:
        """Numbers of norms and sums with the residual that one block reads or writes in forward."""
        return 10.0 * tokens * self.width / split

    def mlp_numbers(self, tokens: float, tp: int) -> float:
        """Numbers that the MLP's activation reads or writes in forward."""
        return tokens * (self.gates + 1) * self.mlp / tp

    @property
    def block_parameters(self) -> float:
        """Weights of the products of one block."""
        return sum(product.k * product.n for product in self.block_products(1, 1))

    @property
    def flops_per_token(self) -> float:
        """Forward and backward, as MFU counts them: no recomputation, masked scores included."""
        weights = self.layers * self.block_parameters + self.vocabulary * self.width
        return 6.0 * weights + 3 * self.layers * self.attention_flops(1, 1)


def shape_of(model: Model) -> Shape:
    """Sizes of nanoGPT's model."""
    return Shape(
        layers=model.n_layer,
        width=model.n_embd,
        attention=model.n_embd,
        keys=model.n_embd,
        mlp=MLP_RATIO * model.n_embd,
        vocabulary=model.vocab_size,
        context=model.block_size,
        heads=model.n_head,
    )
