"""Tensor parallelism by the compiler: one table says which dims are split, and XLA does Megatron's split.

The parameters' placement follows from the table. What has to be said beyond it is where activations live,
at the borders of the split work: left to itself XLA splits q, k and v by position and not by head, and
moves them with all-to-alls. And, where the vocabulary does not divide, that padded logits do not count.

Legend: B batch, T position, C n_embd, H heads, D head_dim, M = 4C, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.model import Embedding, Linear
from jaxpar.plan import Edit

AXIS = "tp"
SPLIT = {"heads": AXIS, "mlp": AXIS, "vocab": AXIS}
"""Logical axis -> mesh axis: what is split, in every leaf that has it."""

B = P.UNCONSTRAINED  # the batch is data parallelism's affair
WHOLE_BTC = P(B, None, None)
SEQUENCE_BTC = P(B, AXIS, None)
QKV_BT3HD = P(B, None, None, AXIS, None)
HEADS_BTHD = P(B, None, AXIS, None)
HIDDEN_BTM = P(B, None, AXIS)
LOGITS_BTV = P(B, None, AXIS)


class PlacedLinear(Linear):
    """A Linear that says where its input and output live."""

    def __init__(self, linear: Linear, *, x: NamedSharding, y: NamedSharding):
        self.contracted, self.compute = linear.contracted, linear.compute
        self.weight, self.bias = linear.weight, linear.bias
        self.x, self.y = x, y

    def __call__(self, x: jax.Array) -> jax.Array:
        y = super().__call__(lax.with_sharding_constraint(x, self.x))
        return lax.with_sharding_constraint(y, self.y)


class PlacedEmbedding(Embedding):
    """An Embedding that says where its activations live, and whose padded logits do not count."""

    def __init__(
        self, embedding: Embedding, *, x: NamedSharding, y: NamedSharding, logits: NamedSharding, vocab: int
    ):
        self.compute, self.token, self.position = embedding.compute, embedding.token, embedding.position
        self.x, self.y, self.split_logits, self.vocab = x, y, logits, vocab

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(super().__call__(tokens_BT), self.y)

    def logits(self, x_BTC: jax.Array) -> jax.Array:
        logits_BTV = super().logits(lax.with_sharding_constraint(x_BTC, self.x))
        logits_BTV = lax.with_sharding_constraint(logits_BTV, self.split_logits)
        if logits_BTV.shape[-1] == self.vocab:
            return logits_BTV
        return jnp.where(jnp.arange(logits_BTV.shape[-1]) < self.vocab, logits_BTV, -jnp.inf)


def place_activations(*, mesh: Mesh, sequence_parallel: bool, vocab_size: int) -> Edit:
    """An edit of the model: activations at the borders of split work say where they live.

    Args:
        mesh: has an axis tp.
        sequence_parallel: between the regions, positions are split.
        vocab_size: without padding.
    """
    whole, qkv, heads, hidden, logits = (
        NamedSharding(mesh, spec) for spec in (WHOLE_BTC, QKV_BT3HD, HEADS_BTHD, HIDDEN_BTM, LOGITS_BTV)
    )
    between = NamedSharding(mesh, SEQUENCE_BTC if sequence_parallel else WHOLE_BTC)

    def edit(model: Any) -> None:
        attention, mlp = model.blocks.attention, model.blocks.mlp
        attention.qkv = PlacedLinear(attention.qkv, x=whole, y=qkv)
        attention.out = PlacedLinear(attention.out, x=heads, y=between)
        mlp.up = PlacedLinear(mlp.up, x=whole, y=hidden)
        mlp.down = PlacedLinear(mlp.down, x=hidden, y=between)
        model.embedding = PlacedEmbedding(
            model.embedding, x=whole, y=between, logits=logits, vocab=vocab_size
        )

    return edit
