"""nanoGPT in flax.nnx, for one device. A parallelism strategy changes it by the hooks (`jaxpar.hooks`) alone.

Blocks are stacked along a leading layer dim and scanned, so XLA compiles one block. Backward can recompute
the activations of a block (`jaxpar.remat`).

Legend: B batch, T and S position, C n_embd, H heads, K heads of keys and values, D head_dim = C/H, V
vocabulary, L layers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import ArrayLike

from compare.numerics.dropout import DropoutSite
from compare.numerics.parameters import qkv_dims, split_qkv
from compare.numerics.rotation import turns
from compare.spec.experiment import Experiment, Model
from jaxpar.dropout import Dropout, Noise
from jaxpar.functional import KEEPS, rotate
from jaxpar.hooks import Hook, Hooks, identity
from jaxpar.linear import Dtypes, Linear, Norm
from jaxpar.mlp import MLP, Experts, RouterOutput, Routing
from jaxpar.remat import apply_remat

HEAD = "head_loss"
"""Name scope of the logits and the loss in the compiled program."""


class Attention(nnx.Module):
    """Causal self-attention with one fused projection."""

    def __init__(self, config: Model, dtypes: Dtypes, hooks: Hooks):
        heads, self.config = (config.n_head, config.n_embd // config.n_head), config
        self.qkv = Linear(
            (config.n_embd,), qkv_dims(config)[0], bias=config.bias, dtypes=dtypes, hooks=hooks.qkv
        )
        self.out = Linear(heads, (config.n_embd,), bias=config.bias, dtypes=dtypes, hooks=hooks.out)
        self.storage, self.hooks = dtypes.storage, hooks
        self.dropout = Dropout(
            config.dropout, DropoutSite.ATTENTION, positions=hooks.query_positions, heads=hooks.heads
        )
        self.out_dropout = Dropout(
            config.dropout, DropoutSite.ATTENTION_OUT, positions=hooks.stream_positions
        )

    def __call__(self, x_BTC: jax.Array, noise: Noise | None = None) -> jax.Array:
        q_BTHD, k_BTKD, v_BTKD = split_qkv(self.qkv(x_BTC), self.config.group)
        if self.config.position == "rope":
            q_BTHD, k_BTKD = (self.rotate(x) for x in (q_BTHD, k_BTKD))
        factor = noise and partial(self.dropout.factor, noise=noise, dtype=self.storage)
        y_BTHD = self.hooks.attention(self.hooks.core, q_BTHD, k_BTKD, v_BTKD, factor=factor)
        return self.out_dropout(self.out(y_BTHD), noise)

    def rotate(self, x_BTHD: jax.Array) -> jax.Array:
        """Rotate queries or keys by their positions, in the storage dtype."""
        with jax.named_scope(f"{KEEPS}rotation"):
            table_T2d = jnp.asarray(turns(self.config).swapaxes(0, 1), self.storage)
            turns_T2d = self.hooks.local_rows(table_T2d, x_BTHD.shape[1])
        return rotate(x_BTHD, turns_T2d)


class Block(nnx.Module):
    """A pre-LayerNorm transformer block; the residual stream stays in the storage dtype."""

    def __init__(self, config: Model, dtypes: Dtypes, hooks: Hooks):
        self.norm1 = Norm(config, dtypes, hooks)
        self.attention = Attention(config, dtypes, hooks)
        self.norm2 = Norm(config, dtypes, hooks)
        self.mlp = (Experts if config.n_experts else MLP)(config, dtypes, hooks)

    def __call__(self, x_BTC: jax.Array, noise: Noise | None = None) -> tuple[jax.Array, RouterOutput | None]:
        x_BTC = add(x_BTC, self.attention(self.norm1(x_BTC), noise))
        y_BTC, routing = self.mlp(self.norm2(x_BTC), noise)
        return add(x_BTC, y_BTC), routing


@jax.named_scope(f"{KEEPS}residual")
def add(x_BTC: jax.Array, y_BTC: jax.Array) -> jax.Array:
    """Add the output y of a branch to the residual stream x."""
    return x_BTC + y_BTC


class Embedding(nnx.Module):
    """Token and position tables; the token table is also the output head."""

    def __init__(self, config: Model, dtypes: Dtypes, hooks: Hooks):
        self.compute, self.vocab_size, self.hooks = dtypes.compute, config.vocab_size, hooks
        self.token = nnx.Param(jnp.zeros((config.vocab_size, config.n_embd), dtypes.storage))
        zeros = jnp.zeros((config.block_size, config.n_embd), dtypes.storage)
        self.position = nnx.Param(zeros) if config.position == "learned" else None

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Vectors (B, T, C) of tokens at these positions."""
        x_BTC = self.hooks.look_up(self.token[...], tokens_BT)
        if self.position is not None:
            positions = self.hooks.position_vectors(self.position[...], x_BTC)
            x_BTC = x_BTC + self.hooks.broadcast(positions, x_BTC)
        return self.hooks.after_embedding(x_BTC)

    def logits(self, x_BTC: jax.Array) -> jax.Array:
        """Logits (B, T, V), given x after the hook `before_logits`."""
        logits_BTV = jnp.einsum(
            "BTC,VC->BTV", x_BTC.astype(self.compute), self.token[...].astype(self.compute)
        )
        if self.hooks.vocabulary is None:
            return logits_BTV
        ids_V = jnp.asarray(self.hooks.vocabulary(logits_BTV.shape[-1]))
        return jnp.where(ids_V < self.vocab_size, logits_BTV, -jnp.inf)


class GPT(nnx.Module):
    """nanoGPT. Its weights start at zero: load the canonical ones (`weights.from_canonical`)."""

    def __init__(self, experiment: Experiment, hooks: Hooks):
        config, dtypes = experiment.model, Dtypes(experiment.precision)
        self.loss_chunks, self.alpha, self.hooks = experiment.train.loss_chunks, config.balance, hooks
        self.embedding = Embedding(config, dtypes, hooks)
        self.blocks = nnx.vmap(lambda: Block(config, dtypes, hooks), axis_size=config.n_layer)()
        self.norm = Norm(config, dtypes, hooks)
        self.dropout = Dropout(config.dropout, DropoutSite.EMBEDDING, positions=hooks.stream_positions)

    def __call__(self, tokens_BT: jax.Array, keys_B2: jax.Array | None = None) -> jax.Array:
        """Logits (B, T, V) in the compute dtype; without `keys_B2` nothing is dropped."""
        return self.logits(self.layers(self.embed(tokens_BT, keys_B2), keys_B2)[0])

    def embed(self, tokens_BT: jax.Array, keys_B2: jax.Array | None = None) -> jax.Array:
        """The residual stream (B, T, C) before the first block."""
        return self.dropout(self.embedding(tokens_BT), Noise.of(keys_B2))

    def layers(
        self, x_BTC: jax.Array, keys_B2: jax.Array | None = None, first: ArrayLike = 0
    ) -> tuple[jax.Array, RouterOutput | None]:
        """The residual stream after all blocks; `first` is the index of the first block."""
        hooks, (graph, layers) = self.hooks, nnx.split(self.blocks)

        def apply_layer(x: tuple[jax.Array, Noise | None], layer: Any) -> tuple[Any, RouterOutput | None]:
            x_BTC, noise = x
            block = nnx.merge(graph, hooks.gather_layer(layer, x_BTC))
            x_BTC, routing = block(x_BTC, noise)
            return (x_BTC, noise and noise.next_layer), routing

        start = x_BTC, Noise.of(keys_B2, first + 1)
        layer = apply_remat(
            apply_layer, hooks.remat, is_gather=hooks.is_gather, keep_gathered=hooks.keep_gathered
        )
        (x_BTC, _), routing = lax.scan(layer, start, nnx.to_pure_dict(layers))
        return x_BTC, routing

    def balance(self, routing: RouterOutput) -> tuple[jax.Array, jax.Array]:
        """Load-balance loss and int32 counts (L, E): how often the batch of this pass chose each expert.

        The loss of a layer is alpha E sum_e f_e P_e, with f_e the share of expert e in the counts.

        Source: Switch Transformer (arXiv 2101.03961, section 2.2), with k choices.
        """
        counts_LE = self.hooks.sum_counts(routing.count)
        probability_LE = self.hooks.mean_probability(routing.probability) / routing.chosen[0, ..., 0].size
        share_LE = counts_LE / counts_LE.sum(axis=-1, keepdims=True).astype(probability_LE.dtype)
        return self.alpha * counts_LE.shape[-1] * (share_LE * probability_LE).sum(), counts_LE

    def logits(self, x_BTC: jax.Array) -> jax.Array:
        """Logits (B, T, V) from the residual stream."""
        return self.embedding.logits(self.hooks.before_logits(self.norm(x_BTC)))

    @jax.named_scope(HEAD)
    def head_loss(self, x_BTC: jax.Array, targets_BT: jax.Array) -> jax.Array:
        """Mean cross-entropy in nats of the targets, from the residual stream after all blocks.

        Logits exist for one of `loss_chunks` equal chunks of the positions at a time.
        """
        if self.loss_chunks == 1:
            return self.hooks.cross_entropy(self.logits(x_BTC), targets_BT)

        @jax.checkpoint  # backward makes the logits of a part again
        def loss_of_part(x_BtC: jax.Array, targets_Bt: jax.Array) -> jax.Array:
            return self.hooks.cross_entropy(self.embedding.logits(x_BtC), targets_Bt)

        def in_parts(x_BT: jax.Array, before: Hook = identity) -> jax.Array:
            """(B, T, ..) -> (parts, B, T / parts, ..). `jnp.stack` has a derivative without a type."""
            x_BTt = x_BT.reshape(len(x_BT), self.loss_chunks, -1, *x_BT.shape[2:])
            return jnp.moveaxis(before(x_BTt), 1, 0)

        parts = in_parts(self.norm(x_BTC), self.hooks.before_logits), in_parts(targets_BT)
        return lax.map(lambda part: loss_of_part(*part), parts).mean()


Loss = Callable[[Any, Any], tuple[jax.Array, Routing]]
"""loss(params, batch) -> the mean loss of the batch's rows, a scalar, and the routing of its tokens.

The batch has "inputs" and "targets" (B, T), and with dropout "keys" (B, 2)."""


LossOf = Callable[[Experiment, Hooks], Loss]
"""The function that makes the loss of an engine: `loss_function`, or `traced_loss` of a trace."""


class PipelineParts(NamedTuple):
    """The model, cut where a pipeline cuts it. Each function takes all parameters and uses some of them."""

    embed: Callable[[Any, Any], jax.Array]
    """embed(params, batch) -> the residual stream (B, T, C) before the first block."""
    layers: Callable[[Any, jax.Array, Any, ArrayLike], jax.Array]
    """layers(params, x, batch, first) -> x (B, T, C) after the blocks in `params`, from block `first` on."""
    loss: Callable[[Any, jax.Array, Any], jax.Array]
    """loss(params, x, batch) -> the mean loss, from x (B, T, C) after the last block."""


def loss_function(
    experiment: Experiment, hooks: Hooks, watch: Callable[[GPT], GPT] = lambda model: model
) -> Loss:
    """The loss of the model with these hooks. With experts it includes the load-balance loss.

    `watch` may change each model that is made from parameters.
    """
    merge = partial(nnx.merge, _structure(experiment, hooks))

    def loss(params: Any, batch: Any) -> tuple[jax.Array, Routing]:
        model, keys_B2 = watch(merge(params)), batch.get("keys")
        x_BTC, routing = model.layers(model.embed(batch["inputs"], keys_B2), keys_B2)
        value = model.head_loss(x_BTC, batch["targets"])
        if routing is None:
            return value, Routing()
        balance, tokens_LE = model.balance(routing)
        return value + balance, Routing(routing.chosen, tokens_LE)

    return loss


def pipeline_parts(experiment: Experiment, hooks: Hooks) -> PipelineParts:
    """The parts of the model with these hooks, which has no experts."""
    model = partial(nnx.merge, _structure(experiment, hooks))
    return PipelineParts(
        embed=lambda params, batch: model(params).embed(batch["inputs"], batch.get("keys")),
        layers=lambda params, x, batch, first: model(params).layers(x, batch.get("keys"), first)[0],
        loss=lambda params, x_BTC, batch: model(params).head_loss(x_BTC, batch["targets"]),
    )


def _structure(experiment: Experiment, hooks: Hooks) -> nnx.GraphDef:
    """The structure of the model, made without allocating its parameters."""
    return nnx.split(nnx.eval_shape(lambda: GPT(experiment, hooks)))[0]
