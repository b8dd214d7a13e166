"""A GPT for one device, with nanoGPT's parameter names and shapes: no mesh and no collectives.

Dropout is at nanoGPT's sites, and depends on the sequences' keys (`compare.numerics.dropout`).

B batch, T and S position, C embedding, H heads, K heads of keys and values, D = C / H.
V vocabulary, L layers, 2 words of a key.
Source: karpathy/nanoGPT, model.py.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compare.numerics.dropout import DropoutSite
from compare.numerics.parameters import QKV, qkv_dims
from compare.numerics.rotation import turns
from compare.spec.experiment import Model
from torchpar.dropout import Dropout
from torchpar.mlp import MLP, Balance, Experts


class LayerNorm(nn.Module):
    """Layer normalization over C with an optional bias, or root-mean-square normalization."""

    def __init__(self, config: Model):
        super().__init__()
        self.by_rms = config.norm == "rmsnorm"
        self.weight = nn.Parameter(torch.ones(config.n_embd))
        has_bias = config.bias and not self.by_rms
        self.bias = nn.Parameter(torch.zeros(config.n_embd)) if has_bias else None
        self.eps = config.norm_eps

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        if self.by_rms:  # F.rms_norm on a CPU saves other tensors under selective recomputation
            mean_square_BT1 = x_BTC.square().mean(-1, keepdim=True)
            return x_BTC * torch.rsqrt(mean_square_BT1 + self.eps) * self.weight
        return F.layer_norm(x_BTC, x_BTC.shape[-1:], self.weight, self.bias, self.eps)


class CausalAttention(nn.Module):
    """The attention core: softmax(q k / sqrt(D)) v over the positions up to the query's.

    PyTorch's fused kernel computes it. With dropout the weights are computed explicitly, since the kernel
    would draw its own mask, and so they are if `model.attention` is dense. K divides H: each head of k and v
    serves H / K consecutive heads of q. Context parallelism replaces the module:
    `block.set_submodule("attn.core", other)`.

    Attributes:
        is_dense: compute the weights explicitly.
        seen_TS: mask of the keys that each query sees. None: T and S are the same positions, in order.
    """

    def __init__(self, config: Model, layer: int):
        super().__init__()
        self.dropout = Dropout(config.dropout, DropoutSite.ATTENTION, layer)
        self.is_dense = config.attention == "dense"
        self.seen_TS: torch.Tensor | None = None

    def forward(
        self,
        q_BTHD: torch.Tensor,
        k_BSKD: torch.Tensor,
        v_BSKD: torch.Tensor,
        keys_B2: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q (B, T, H, D), k and v (B, S, K, D), and keys for dropout, to y (B, T, H, D)."""
        q_BHTD, k_BKSD, v_BKSD = (t.transpose(1, 2) for t in (q_BTHD, k_BSKD, v_BSKD))
        group = q_BHTD.shape[1] // k_BKSD.shape[1]
        if keys_B2 is None and not self.is_dense:
            seen_TS, is_grouped = self.seen_TS, group > 1
            y_BHTD = F.scaled_dot_product_attention(
                q_BHTD, k_BKSD, v_BKSD, attn_mask=seen_TS, is_causal=seen_TS is None, enable_gqa=is_grouped
            )
        else:
            k_BHSD, v_BHSD = (t.repeat_interleave(group, 1) if group > 1 else t for t in (k_BKSD, v_BKSD))
            weights_BHTS = self.dropout(causal_weights(q_BHTD, k_BHSD, self.seen_TS), keys_B2)
            y_BHTD = weights_BHTS.to(v_BHSD.dtype) @ v_BHSD
        return y_BHTD.transpose(1, 2)


def causal_weights(
    q_BHTD: torch.Tensor, k_BHSD: torch.Tensor, seen_TS: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(q k / sqrt(D)) over the keys that are seen, in float32 at least: (B, H, T, S)."""
    length, head_dim = q_BHTD.shape[-2:]
    logits_BHTS = q_BHTD @ k_BHSD.transpose(-2, -1) / math.sqrt(head_dim)
    if seen_TS is None:
        seen_TS = torch.ones(length, length, dtype=torch.bool, device=q_BHTD.device).tril()
    at_least_float32 = torch.promote_types(logits_BHTS.dtype, torch.float32)
    return logits_BHTS.masked_fill(~seen_TS, -math.inf).softmax(-1, dtype=at_least_float32)


class Rotation(nn.Module):
    """RoPE: rotates each pair of a head's features by an angle of its position.

    Source: RoFormer (arXiv 2104.09864).
    """

    def forward(self, x_BTHD: torch.Tensor, turn_2Td: torch.Tensor) -> torch.Tensor:
        """x (B, T, H, D), and cosines and sines (2, T, D / 2), to (B, T, H, D)."""
        cos_T1d, sin_T1d = turn_2Td[:, :, None]
        first, second = x_BTHD.chunk(2, dim=-1)
        turned = first * cos_T1d - second * sin_T1d, second * cos_T1d + first * sin_T1d
        return torch.cat(turned, dim=-1).to(x_BTHD.dtype)


class CausalSelfAttention(nn.Module):
    """Multi-head attention with a fused projection to q, k and v. Under tp H is this rank's heads.

    Attributes:
        qkv_parts: parts of the rows of c_attn that hold heads. Three: q, k and v. One, with grouped queries:
            each group has its key and value behind its queries.
    """

    def __init__(self, config: Model, layer: int):
        super().__init__()
        self.group, self.qkv_parts = config.group, QKV if config.group == 1 else 1
        self.head_dim = config.n_embd // config.n_head
        self.c_attn = nn.Linear(config.n_embd, math.prod(qkv_dims(config)[0]), bias=config.bias)
        self.rotation = Rotation()
        self.core = CausalAttention(config, layer)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = Dropout(config.dropout, DropoutSite.ATTENTION_OUT, layer)

    def forward(
        self, x_BTC: torch.Tensor, keys_B2: torch.Tensor | None = None, turn: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.group == 1:
            q, k, v = self.c_attn(x_BTC).unflatten(-1, (QKV, -1, self.head_dim)).unbind(2)
        else:
            groups = self.c_attn(x_BTC).unflatten(-1, (-1, self.group + 2, self.head_dim))
            q, k, v = (t.flatten(2, 3) for t in groups.split((self.group, 1, 1), dim=3))
        if turn is not None:
            q, k = (self.rotation(t, turn) for t in (q, k))
        keys = () if keys_B2 is None else (keys_B2,)
        y_BTHD = self.core(q, k, v, *keys)
        return self.dropout(self.c_proj(y_BTHD.flatten(2)), keys_B2)


class Block(nn.Module):
    """Attention and MLP, each on the normalized stream, and added to it. Layers count from 1.

    With experts it returns the stream and the arguments of `Balance`.
    """

    def __init__(self, config: Model, layer: int):
        super().__init__()
        self.ln_1 = LayerNorm(config)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = LayerNorm(config)
        self.mlp = (Experts if config.n_experts else MLP)(config, layer)

    def forward(
        self, x_BTC: torch.Tensor, keys_B2: torch.Tensor | None = None, turn: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        x_BTC = x_BTC + self.attn(self.ln_1(x_BTC), keys_B2, turn)
        added = self.mlp(self.ln_2(x_BTC), keys_B2)
        if isinstance(added, tuple):
            return x_BTC + added[0], *added[1:]
        return x_BTC + added


def embed_tokens(idx: torch.Tensor, position_T: torch.Tensor, transformer: nn.ModuleDict) -> torch.Tensor:
    """Vectors (B, T, C) of token ids (B, T), plus vectors of the positions, unless RoPE encodes them."""
    x_BTC = transformer["wte"](idx)
    return x_BTC + transformer["wpe"](position_T) if "wpe" in transformer else x_BTC


def turn_at(position_T: torch.Tensor, turns: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Cosines and sines of these positions, (2, T, D / 2). None without RoPE."""
    return None if turns is None else turns.to(position_T.device, dtype)[:, position_T]


class GPT(nn.Module):
    """The model. It computes logits and loss in `loss_chunks` parts of the positions, which divide T.

    Attributes:
        positions: from T to the positions in the sequence, int64 (T,): by default the first T.
    """

    def __init__(self, config: Model, *, loss_chunks: int = 1):
        super().__init__()
        self.config, self.loss_chunks = config, loss_chunks
        self.positions: Callable[..., torch.Tensor] = torch.arange
        self.turns = torch.tensor(turns(config), device="cpu") if config.position == "rope" else None
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                **({"wpe": nn.Embedding(config.block_size, config.n_embd)} if self.turns is None else {}),
                "drop": Dropout(config.dropout, DropoutSite.EMBEDDING),
                "h": nn.ModuleList(Block(config, layer) for layer in range(1, config.n_layer + 1)),
                "ln_f": LayerNorm(config),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight  # tied
        self.loss = nn.CrossEntropyLoss()
        self.balance = Balance(config) if config.n_experts else None

    @property
    def blocks(self) -> nn.ModuleList:
        """The L transformer blocks."""
        blocks = self.transformer["h"]
        assert isinstance(blocks, nn.ModuleList)
        return blocks

    def forward(
        self,
        idx: torch.Tensor,
        targets: torch.Tensor | None = None,
        keys_B2: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Logits and loss of token ids (B, T), T at most block_size, and targets (B, T).

        Logits are (B, T, V); without targets (B, 1, V) of the last position, as in nanoGPT; None if the loss
        is computed in parts. The loss is the mean cross-entropy in nats, with experts plus `Balance`.
        `keys_B2` are the sequences' keys for dropout, the bits of their words as int32.
        """
        position_T = self.positions(idx.shape[1], device=idx.device)
        turn = turn_at(position_T, self.turns, self.lm_head.weight.dtype)
        x_BTC = embed_tokens(idx, position_T, self.transformer)
        x_BTC = self.transformer["drop"](x_BTC, keys_B2)
        of_layers = []
        for block in self.blocks:
            x_BTC, *of_layer = block(x_BTC, keys_B2, turn) if self.balance else (block(x_BTC, keys_B2, turn),)
            of_layers.append(of_layer)
        x_BTC = self.transformer["ln_f"](x_BTC)
        if targets is None:
            return self.lm_head(x_BTC[:, [-1], :]), None
        if self.loss_chunks == 1:
            logits_BTV = self.lm_head(x_BTC)
            loss = self._loss_of(logits_BTV, targets)
        else:  # the logits of some positions at a time; backward computes them again
            logits_BTV, again = None, partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
            parts = zip(*(t.chunk(self.loss_chunks, dim=1) for t in (x_BTC, targets)), strict=True)
            losses = [again(lambda x, y: self._loss_of(self.lm_head(x), y), *part) for part in parts]
            loss = torch.stack(losses).mean()
        if self.balance:
            loss = loss + self.balance(*map(torch.stack, zip(*of_layers, strict=True)))
        return logits_BTV, loss

    def _loss_of(self, logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        # With autocast logits have 16 bits, and on a CPU autocast does not cast them for the loss.
        logits_BTV = logits_BTV.to(self.lm_head.weight.dtype)
        return self.loss(logits_BTV.flatten(0, 1), targets_BT.flatten())
