"""Tensor parallelism by the compiler: one table says which dims are split, and XLA does Megatron's split.

The parameters' placement follows from the table. The code says beyond it where activations live at both ends
of a region of split work; what XLA would do without each of these lines, docs/compilers.md measures. It also
says that padded logits do not count, where the vocabulary does not divide.

Legend: B batch, T position, C n_embd, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from compare.spec.axes import TP
from jaxpar.derivatives import product
from jaxpar.model import Embedding, Linear
from jaxpar.problem import Edit, Problem
from jaxpar.tracing.sites import Site, find_sites

AXIS = TP
SPLIT = {"heads": AXIS, "mlp": AXIS, "vocab": AXIS}
"""Logical axis -> mesh axis: what is split, in every leaf that has it."""

B = P.UNCONSTRAINED  # the batch is data parallelism's affair
POSITION_DIM = 1


def split_layers(problem: Problem, placements: Any, *, mesh: Mesh, sequence_parallel: bool) -> Edit:
    """An edit of the model: activations at both ends of a region of split work say where they live.

    Args:
        problem: the training problem.
        placements: of its leaves.
        mesh: has an axis tp.
        sequence_parallel: between the regions, positions are split.
    """
    where: dict[str, Any] = {"mesh": mesh, "sequence_parallel": sequence_parallel}

    def edit(model: Any) -> None:
        for site in find_sites(model, problem, placements):
            is_table = isinstance(site.module, Embedding)
            module = PlacedEmbedding(site.module, **where) if is_table else PlacedLinear(site, **where)
            site.replace(model, module)
        if problem.vocab_size:
            model.cross_entropy = without_padding(model.cross_entropy, vocab_size=problem.vocab_size)

    return edit


class PlacedLinear(Linear):
    """A Linear that says where its input and output live."""

    def __init__(self, site: Site, *, mesh: Mesh, sequence_parallel: bool):
        linear = site.module
        self.contracted, self.compute = linear.contracted, linear.compute
        self.weight, self.bias = linear.weight, linear.bias
        self.mesh, self.sequence_parallel = mesh, sequence_parallel
        self.splits_inputs, self.dim = site.splits_inputs, site.dim

    def __call__(self, x: jax.Array) -> jax.Array:
        of_batch = x.ndim - self.contracted  # dims of x in front of those that are contracted
        if self.splits_inputs:
            y = super().__call__(placed(x, self.mesh, split=of_batch + self.dim))
            return placed(y, self.mesh, split=POSITION_DIM if self.sequence_parallel else None)
        y = super().__call__(placed(x, self.mesh))
        return placed(y, self.mesh, split=of_batch + self.dim - self.contracted)

    def product(self, x: jax.Array) -> jax.Array:
        """x (..., N) times the weight, dim by dim: joining a split dim with another would gather it."""
        return product(x.astype(self.compute), self.weight[...].astype(self.compute), self.contracted)


class PlacedEmbedding(Embedding):
    """An Embedding that says where its activations live."""

    def __init__(self, embedding: Embedding, *, mesh: Mesh, sequence_parallel: bool):
        self.compute, self.token, self.position = embedding.compute, embedding.token, embedding.position
        self.mesh, self.sequence_parallel = mesh, sequence_parallel

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTC = super().__call__(tokens_BT)
        return placed(x_BTC, self.mesh, split=POSITION_DIM if self.sequence_parallel else None)

    def enter_head(self, x_BTC: jax.Array) -> jax.Array:
        return placed(x_BTC, self.mesh)

    def project(self, x_BTC: jax.Array) -> jax.Array:
        logits_BTV = super().project(x_BTC)
        return placed(logits_BTV, self.mesh, split=logits_BTV.ndim - 1)


def placed(x: jax.Array, mesh: Mesh, *, split: int | None = None) -> jax.Array:
    """Say that x (B, ...) is whole along tp, but for one dim, if any."""
    spec = P(B, *(AXIS if dim == split else None for dim in range(1, x.ndim)))
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def without_padding(cross_entropy: Callable[..., jax.Array], *, vocab_size: int) -> Callable[..., jax.Array]:
    """The cross-entropy of logits (..., V) that may be padded: those from `vocab_size` on do not count."""

    def unpadded(logits: jax.Array, targets: jax.Array) -> jax.Array:
        if logits.shape[-1] > vocab_size:
            logits = jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)
        return cross_entropy(logits, targets)

    return unpadded
