"""nanoGPT's GPT, with nanoGPT's own parameter names and shapes. It knows nothing of devices in the plural.

B batch, T position, C embedding, H heads, D head_dim = C / H, V vocabulary. Weights come from `weights.py`.
Source: karpathy/nanoGPT, model.py.
"""

import torch
from torch import nn
from torch.nn import functional as F

from compare.contract.experiment import Model
from compare.contract.parameters import MLP_RATIO, QKV


class LayerNorm(nn.Module):
    """Layer normalisation over C, with an optional bias."""

    def __init__(self, config: Model):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.n_embd))
        self.bias = nn.Parameter(torch.zeros(config.n_embd)) if config.bias else None
        self.eps = config.norm_eps

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x_BTC, self.weight.shape, self.weight, self.bias, self.eps)


class CausalAttention(nn.Module):
    """The attention core: softmax(q k / sqrt(D)) v over positions up to one's own, by PyTorch's fused kernel.

    It has no parameters. Any module that maps q, k, v of shape (B, T, H, D) to (B, T, H, D) may take its
    place: `swap(model, {"transformer.h.*.attn.core": lambda core: other})`.
    """

    def forward(self, q_BTHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor) -> torch.Tensor:
        q_BHTD, k_BHTD, v_BHTD = (t_BTHD.transpose(1, 2) for t_BTHD in (q_BTHD, k_BTHD, v_BTHD))
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        return y_BHTD.transpose(1, 2)


class CausalSelfAttention(nn.Module):
    """Multi-head attention, each position to itself and to those before it.

    Attributes:
        core: (q, k, v) -> y, all (B, T, H, D): see `CausalAttention`. Under tensor parallelism H is this
            rank's heads.
    """

    def __init__(self, config: Model):
        super().__init__()
        self.head_dim = config.n_embd // config.n_head
        self.c_attn = nn.Linear(config.n_embd, QKV * config.n_embd, bias=config.bias)
        self.core = CausalAttention()
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        qkv_BT3HD = self.c_attn(x_BTC).unflatten(-1, (QKV, -1, self.head_dim))
        y_BTHD = self.core(*qkv_BT3HD.unbind(2))
        return self.c_proj(y_BTHD.flatten(2))


class MLP(nn.Module):
    """Two linear layers around a GELU, four times as wide inside."""

    def __init__(self, config: Model):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, MLP_RATIO * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(MLP_RATIO * config.n_embd, config.n_embd, bias=config.bias)
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x_BTC), approximate=self.approximate))


class Block(nn.Module):
    """Attention, then the MLP, each reading a normalised stream and adding to it."""

    def __init__(self, config: Model):
        super().__init__()
        self.ln_1 = LayerNorm(config)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config)
        self.mlp = MLP(config)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        x_BTC = x_BTC + self.attn(self.ln_1(x_BTC))
        return x_BTC + self.mlp(self.ln_2(x_BTC))


class GPT(nn.Module):
    """The whole model.

    Args:
        config: the experiment's `model` section.
    """

    def __init__(self, config: Model):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": LayerNorm(config),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight  # tied
        self.loss = nn.CrossEntropyLoss()

    @property
    def blocks(self) -> nn.ModuleList:
        """The L transformer blocks."""
        blocks = self.transformer["h"]
        assert isinstance(blocks, nn.ModuleList)
        return blocks

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits, and the loss if there are targets.

        Args:
            idx: token ids (B, T), T at most block_size.
            targets: the ids to predict (B, T).

        Returns:
            Logits (B, T, V), or (B, 1, V) of the last position without targets, as nanoGPT does; and the
            mean cross-entropy in nats, or None.
        """
        position_T = torch.arange(idx.shape[1], device=idx.device)
        x_BTC = self.transformer["wte"](idx) + self.transformer["wpe"](position_T)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        x_BTC = self.transformer["ln_f"](x_BTC)
        if targets is None:
            return self.lm_head(x_BTC[:, [-1], :]), None
        logits_BTV = self.lm_head(x_BTC)
        # Under autocast the logits are bfloat16, and CPU autocast has no float32 rule for the loss.
        loss_logits_BTV = logits_BTV.to(self.lm_head.weight.dtype)
        return logits_BTV, self.loss(loss_logits_BTV.flatten(0, 1), targets.flatten())
