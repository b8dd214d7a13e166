"""nanoGPT in flax.nnx, for one device: it knows nothing of meshes, ranks or collectives.

Blocks are stacked along a leading layer dim and scanned: one block is compiled once, and backward can compute
its activations anew. Tensor parallelism sets the hooks of `Linear` and `Embedding`.

Legend: B batch, T and S position, C n_embd, H heads, K of them of keys and values, D head_dim = C/H, V
vocabulary; L layers.
"""

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from compare.numerics.dropout import DropoutSite
from compare.numerics.parameters import qkv_dims, split_qkv
from compare.numerics.rotation import turns
from compare.spec.experiment import Experiment, Model
from jaxpar.derivatives import attention_scores
from jaxpar.dropout import Dropout, Noise
from jaxpar.linear import KEEPS, Dtypes, Hook, Linear, same
from jaxpar.mlp import MLP, Experts, RouterOutput, Routing
from jaxpar.remat import Remat, apply_remat, remat_of

HEAD = "head_loss"
"""The scope, in the compiled program, of what makes logits and the loss of them."""
Positions = Callable[[jax.Array], jax.Array] | None


def norm(config: Model, dtypes: Dtypes) -> nnx.LayerNorm | nnx.RMSNorm:
    """PyTorch's norms: flax's own default is a one-pass variance, which cancels in float32."""
    how: dict[str, Any] = {"dtype": dtypes.storage, "param_dtype": dtypes.storage, "rngs": nnx.Rngs(0)}
    how |= {"epsilon": config.norm_eps, "use_fast_variance": False}
    if config.norm == "rmsnorm":
        return nnx.RMSNorm(config.n_embd, **how)
    return nnx.LayerNorm(config.n_embd, use_bias=config.bias, **how)


def causal_attention(
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    *,
    softmax_dtype: DTypeLike,
    positions: tuple[ArrayLike, ArrayLike] | None = None,
    factor: Callable[[tuple[int, ...]], jax.Array] | None = None,
) -> jax.Array:
    """softmax(q k / sqrt(D)) v over positions S <= T, softmax in `softmax_dtype`: (B, T, H, D).

    K is H, or divides it: each head of k and v is then for H / K heads of q, one after the other.
    Not jax.nn.dot_product_attention, whose softmax is float32 even for float64 inputs. `positions` are those
    of q (T,) and of k (S,), by default the first ones. `factor` makes, for a shape (H, T, S) whose S are in
    the order of the sequence, the constant that weights are multiplied by after the softmax: dropout's. Heads
    come before positions in products, which is how XLA multiplies: anything else it copies into that first.
    """
    q_BHTD, k_BKSD, v_BKSD = (x.swapaxes(1, 2) for x in (q_BTHD, k_BSKD, v_BSKD))
    k_BHSD, v_BHSD = (over_group(x_BKSD, q_BHTD.shape[1]) for x_BKSD in (k_BKSD, v_BKSD))
    logits_BHTS = attention_scores(q_BHTD, k_BHSD, softmax_dtype)
    with jax.named_scope(f"{KEEPS}softmax"):
        visible_TS = is_visible(*positions) if positions else jnp.tril(jnp.ones(logits_BHTS.shape[-2:], bool))
        logits_BHTS = jnp.where(visible_TS, logits_BHTS / math.sqrt(q_BHTD.shape[-1]), -jnp.inf)
        weights_BHTS = jax.nn.softmax(logits_BHTS, axis=-1)
    if factor is not None:
        factor_BHTS = factor(weights_BHTS.shape[1:])
        weights_BHTS = weights_BHTS * (factor_BHTS[..., positions[1]] if positions else factor_BHTS)
    return jnp.einsum("BHTS,BHSD->BHTD", weights_BHTS.astype(v_BHSD.dtype), v_BHSD).swapaxes(1, 2)


def rotated(x_BTHD: jax.Array, positions: Positions, *, model: Model, dtype: DTypeLike) -> jax.Array:
    """RoPE: each pair of a head's features turned by its position (`turns`), computed in `dtype`."""
    table_T2d = jnp.asarray(turns(model).swapaxes(0, 1), dtype)
    turn_T2d = at_positions(table_T2d, x_BTHD.shape[1], positions)
    cos_T1d, sin_T1d = turn_T2d[:, :1], turn_T2d[:, 1:]
    first, second = jnp.split(x_BTHD, 2, axis=-1)
    turned = first * cos_T1d - second * sin_T1d, second * cos_T1d + first * sin_T1d
    return jnp.concatenate(turned, axis=-1).astype(x_BTHD.dtype)


def over_group(x_BKSD: jax.Array, heads: int) -> jax.Array:
    """Keys or values for each of the heads of queries: (B, H, S, D)."""
    batch, kv_heads, *others = x_BKSD.shape
    if kv_heads == heads:
        return x_BKSD
    x_BKGSD = jnp.broadcast_to(x_BKSD[:, :, None], (batch, kv_heads, heads // kv_heads, *others))
    return x_BKGSD.reshape(batch, heads, *others)


def is_visible(of_q_T: ArrayLike, of_k_S: ArrayLike) -> jax.Array:
    """The causal mask, bool (T, S), of queries and keys at these positions."""
    return jnp.asarray(of_q_T)[:, None] >= jnp.asarray(of_k_S)


class Attention(nnx.Module):
    """Causal self-attention with one fused projection; an edit may put another `core` in its place."""

    def __init__(self, config: Model, dtypes: Dtypes):
        heads, self.group = (config.n_head, config.n_embd // config.n_head), config.group
        self.qkv = Linear((config.n_embd,), qkv_dims(config)[0], bias=config.bias, dtypes=dtypes)
        rotate = partial(rotated, model=config, dtype=dtypes.storage)
        self.rotate = rotate if config.position == "rope" else None
        self.core: Callable[..., jax.Array] = partial(causal_attention, softmax_dtype=dtypes.storage)
        self.out = Linear(heads, (config.n_embd,), bias=config.bias, dtypes=dtypes)
        self.storage = dtypes.storage
        self.dropout = Dropout(config.dropout, DropoutSite.ATTENTION)
        self.out_dropout = Dropout(config.dropout, DropoutSite.ATTENTION_OUT)

    def __call__(
        self, x_BTC: jax.Array, noise: Noise | None = None, positions: Positions = None
    ) -> jax.Array:
        q_BTHD, k_BTKD, v_BTKD = split_qkv(self.qkv(x_BTC), self.group)
        if self.rotate is not None:
            q_BTHD, k_BTKD = (self.rotate(x, positions) for x in (q_BTHD, k_BTKD))
        factor = noise and partial(self.dropout.factor, noise=noise, dtype=self.storage)
        return self.out_dropout(self.out(self.core(q_BTHD, k_BTKD, v_BTKD, factor=factor)), noise)


class Block(nnx.Module):
    """A pre-LayerNorm transformer block; the residual stream stays in the storage dtype."""

    def __init__(self, config: Model, dtypes: Dtypes):
        self.norm1 = norm(config, dtypes)
        self.attention = Attention(config, dtypes)
        self.norm2 = norm(config, dtypes)
        self.mlp = (Experts if config.n_experts else MLP)(config, dtypes)

    def __call__(
        self, x_BTC: jax.Array, noise: Noise | None = None, positions: Positions = None
    ) -> tuple[jax.Array, RouterOutput | None]:
        x_BTC = add(x_BTC, self.attention(self.norm1(x_BTC), noise, positions))
        y_BTC, routing = self.mlp(self.norm2(x_BTC), noise)
        return add(x_BTC, y_BTC), routing


@jax.named_scope(f"{KEEPS}residual")
def add(x_BTC: jax.Array, y_BTC: jax.Array) -> jax.Array:
    """The residual stream, and what a branch adds to it."""
    return x_BTC + y_BTC


def at_positions(table: jax.Array, length: int, positions: Positions) -> jax.Array:
    """Rows (T, ..) of a table for the positions of T places, by default the first T."""
    return table[:length] if positions is None else positions(table)


class Embedding(nnx.Module):
    """Token and position tables; the token table is also the output head.

    Hooks: `look_up` takes (table, tokens), `positions` a table of all positions to the rows whose places are
    here, by default the first T; `cut_positions` the vectors (T, C) of the positions, `leave` the sum of
    both, and `enter` the residual stream, before it becomes logits.
    """

    def __init__(self, config: Model, dtypes: Dtypes):
        self.compute = dtypes.compute
        self.token = nnx.Param(jnp.zeros((config.vocab_size, config.n_embd), dtypes.storage))
        zeros = jnp.zeros((config.block_size, config.n_embd), dtypes.storage)
        self.position = nnx.Param(zeros) if config.position == "learned" else None
        self.look_up: Callable[[jax.Array, jax.Array], jax.Array] = operator.getitem
        self.positions: Positions = None
        self.cut_positions: Hook = same
        self.leave: Hook = same
        self.enter: Hook = same

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Vectors (B, T, C) of tokens at these positions."""
        x_BTC = self.look_up(self.token[...], tokens_BT)
        if self.position is not None:
            position_TC = at_positions(self.position[...], tokens_BT.shape[1], self.positions)
            x_BTC = x_BTC + self.cut_positions(position_TC)
        return self.leave(x_BTC)

    def logits(self, x_BTC: jax.Array) -> jax.Array:
        """Logits (B, T, V) of any positions, from what has entered."""
        return jnp.einsum("BTC,VC->BTV", x_BTC.astype(self.compute), self.token[...].astype(self.compute))


class GPT(nnx.Module):
    """nanoGPT. Its weights start at zero: load the canonical ones (`weights.from_canonical`).

    Attributes, which an edit of the model may replace:
        gather_layer: (parameters of a layer as stored, x_BTC) -> full parameters: nested dicts.
        wrap_layer: applied to the scanned block, which begins with `gather_layer`.
        cross_entropy: (logits, targets) -> mean loss.
        total_counts, mean_probability: of `RouterOutput`'s (L, E) that these tokens have to that of all.
    """

    def __init__(self, experiment: Experiment, *, remat: Remat = "none"):
        config, dtypes = experiment.model, Dtypes(experiment.precision)
        self.loss_chunks = experiment.train.loss_chunks
        self.gather_layer: Callable[[Any, jax.Array], Any] = lambda layer, x_BTC: layer
        self.wrap_layer = partial(apply_remat, remat=remat)
        self.cross_entropy: Callable[[jax.Array, jax.Array], jax.Array] = cross_entropy
        self.total_counts: Hook = same
        self.mean_probability: Hook = same
        self.alpha = config.balance
        self.embedding = Embedding(config, dtypes)
        self.blocks = nnx.vmap(lambda: Block(config, dtypes), axis_size=config.n_layer)()
        self.norm = norm(config, dtypes)
        self.dropout = Dropout(config.dropout, DropoutSite.EMBEDDING)

    def __call__(self, tokens_BT: jax.Array, keys_B2: jax.Array | None = None) -> jax.Array:
        """Logits (B, T, V) in the compute dtype; without keys of the sequences nothing is dropped."""
        return self.logits(self.layers(self.embed(tokens_BT, keys_B2), keys_B2)[0])

    def embed(self, tokens_BT: jax.Array, keys_B2: jax.Array | None = None) -> jax.Array:
        """The residual stream (B, T, C) before the first block."""
        return self.dropout(self.embedding(tokens_BT), Noise.of(keys_B2))

    def layers(
        self, x_BTC: jax.Array, keys_B2: jax.Array | None = None, first: ArrayLike = 0
    ) -> tuple[jax.Array, RouterOutput | None]:
        """The residual stream after all blocks; `first` is the number of the first of them."""
        graph, layers = nnx.split(self.blocks)

        def apply_layer(x: tuple[jax.Array, Noise | None], layer: Any) -> tuple[Any, RouterOutput | None]:
            x_BTC, noise = x
            block = nnx.merge(graph, self.gather_layer(layer, x_BTC))
            x_BTC, routing = block(x_BTC, noise, self.embedding.positions)
            return (x_BTC, noise and noise.next_layer), routing

        start = x_BTC, Noise.of(keys_B2, first + 1)
        (x_BTC, _), routing = lax.scan(self.wrap_layer(apply_layer), start, nnx.to_pure_dict(layers))
        return x_BTC, routing

    def balance(self, routing: RouterOutput) -> tuple[jax.Array, jax.Array]:
        """The load-balance loss of all layers, alpha E sum_e f_e P_e of each; and how often each expert was
        chosen in the batch of this pass, int32 (L, E), of which f_e is the share.

        Source: Switch Transformer (arXiv 2101.03961, section 2.2), with k choices.
        """
        counts_LE = self.total_counts(routing.count)
        probability_LE = self.mean_probability(routing.probability)
        share_LE = counts_LE / counts_LE.sum(axis=-1, keepdims=True).astype(probability_LE.dtype)
        return self.alpha * counts_LE.shape[-1] * (share_LE * probability_LE).sum(), counts_LE

    def logits(self, x_BTC: jax.Array) -> jax.Array:
        """Logits (B, T, V) from the residual stream."""
        return self.embedding.logits(self.embedding.enter(self.norm(x_BTC)))

    @jax.named_scope(HEAD)
    def head_loss(self, x_BTC: jax.Array, targets_BT: jax.Array) -> jax.Array:
        """Mean cross-entropy in nats of the targets, from the residual stream after all blocks.

        Logits exist for one of `loss_chunks` equal parts of the positions at a time.
        """
        if self.loss_chunks == 1:
            return self.cross_entropy(self.logits(x_BTC), targets_BT)

        @jax.checkpoint  # backward makes the logits of a part again
        def loss_of_part(x_BtC: jax.Array, targets_Bt: jax.Array) -> jax.Array:
            return self.cross_entropy(self.embedding.logits(x_BtC), targets_Bt)

        def in_parts(x_BT: jax.Array, enter: Hook = same) -> jax.Array:
            """(B, T, ..) -> (parts, B, T / parts, ..). `jnp.stack` has a derivative without a type."""
            x_BTt = x_BT.reshape(len(x_BT), self.loss_chunks, -1, *x_BT.shape[2:])
            return jnp.moveaxis(enter(x_BTt), 1, 0)

        parts = in_parts(self.norm(x_BTC), self.embedding.enter), in_parts(targets_BT)
        return lax.map(lambda part: loss_of_part(*part), parts).mean()


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats over all tokens, in at least float32."""
    logits_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT).mean()


Loss = Callable[[Any, Any], tuple[jax.Array, Routing]]
"""loss(params, batch) -> the mean loss of the batch's rows, a scalar, and the routing of its tokens.

The batch has "inputs" and "targets" (B, T), and with dropout "keys" (B, 2)."""
ModelPatch = Callable[[GPT], None]
"""A change that a strategy makes to the model, which knows no layout. Paths of parameters stay."""


class PipelineParts(NamedTuple):
    """The model, cut where a pipeline cuts it. Each function takes all parameters and uses some of them."""

    embed: Callable[[Any, Any], jax.Array]
    """embed(params, batch) -> the residual stream (B, T, C) before the first block."""
    layers: Callable[[Any, jax.Array, Any, ArrayLike], jax.Array]
    """layers(params, x, batch, first) -> x (B, T, C) after the blocks in `params`, from block `first` on."""
    loss: Callable[[Any, jax.Array, Any], jax.Array]
    """loss(params, x, batch) -> the mean loss, from x (B, T, C) after the last block."""


def loss_function(experiment: Experiment, patches: Sequence[ModelPatch] = ()) -> Loss:
    """The loss of the patched model. With experts it includes the load-balance loss."""
    merge = partial(nnx.merge, _structure(experiment, patches))

    def loss(params: Any, batch: Any) -> tuple[jax.Array, Routing]:
        model, keys_B2 = merge(params), batch.get("keys")
        x_BTC, routing = model.layers(model.embed(batch["inputs"], keys_B2), keys_B2)
        value = model.head_loss(x_BTC, batch["targets"])
        if routing is None:
            return value, Routing()
        balance, tokens_LE = model.balance(routing)
        return value + balance, Routing(routing.chosen, tokens_LE)

    return loss


def pipeline_parts(experiment: Experiment, patches: Sequence[ModelPatch] = ()) -> PipelineParts:
    """The parts of the patched model, which has no experts."""
    model = partial(nnx.merge, _structure(experiment, patches))
    return PipelineParts(
        embed=lambda params, batch: model(params).embed(batch["inputs"], batch.get("keys")),
        layers=lambda params, x, batch, first: model(params).layers(x, batch.get("keys"), first)[0],
        loss=lambda params, x_BTC, batch: model(params).head_loss(x_BTC, batch["targets"]),
    )


def _structure(experiment: Experiment, patches: Sequence[ModelPatch]) -> nnx.GraphDef:
    """The structure of the patched model, made without allocating its parameters."""

    def patched() -> GPT:
        model = GPT(experiment, remat=remat_of(experiment.layout))
        for patch in patches:
            patch(model)
        return model

    return nnx.split(nnx.eval_shape(patched))[0]
