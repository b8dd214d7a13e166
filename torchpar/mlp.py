"""The second half of a block: nanoGPT's MLP, or experts that a router chooses for each token.

B batch, T position, C embedding, M inner features, L layers, E experts, k experts of a token, S rows: k for
each token, N rows of one expert.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from compare.numerics.dropout import DropoutSite
from compare.numerics.parameters import MLP_RATIO
from compare.spec.experiment import Model
from torchpar.dropout import Dropout

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu_squared": lambda x: F.relu(x).square(),
}
ExpertsFunction = Callable[..., torch.Tensor]
"""Rows (S, C), sorted by expert, and the number of rows of each expert (E,), to outputs (S, C). Whoever has
the numbers as Python integers, too, passes them as third argument: the function would wait for the device."""


class MLP(nn.Module):
    """Two linear layers around an activation, four times as wide inside."""

    def __init__(self, config: Model, layer: int):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, MLP_RATIO * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(MLP_RATIO * config.n_embd, config.n_embd, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = Dropout(config.dropout, DropoutSite.MLP_OUT, layer)

    def forward(self, x_BTC: torch.Tensor, keys_B2: torch.Tensor | None = None) -> torch.Tensor:
        x_BTC = self.c_proj(self.activation(self.c_fc(x_BTC)))
        return self.dropout(x_BTC, keys_B2)


class BareParameter(nn.Module):
    """A weight that another module multiplies by. Engines shard it with hooks on this module."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self) -> torch.Tensor:
        return self.weight


class Choice(nn.Module):
    """The choice of the k experts with the largest router logits; of equal logits the first."""

    def __init__(self, config: Model):
        super().__init__()
        self.experts_per_token = config.experts_per_token

    def forward(
        self, x_BTC: torch.Tensor, router_EC: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weights of the chosen experts (B, T, k), a softmax over their logits; their numbers in ascending
        order, int64 (B, T, k); and each expert's mean probability (E,), from a softmax over all experts."""
        with torch.autocast(x_BTC.device.type, enabled=False):  # in 16 bits many logits would be equal
            logits_BTE = F.linear(x_BTC.to(router_EC.dtype), router_EC)
        ranked_BTE = logits_BTE.sort(stable=True, descending=True).indices  # topk does not order equal logits
        chosen_BTk = ranked_BTE[..., : self.experts_per_token].sort().values
        weights_BTk = logits_BTE.gather(-1, chosen_BTk).softmax(-1)
        return weights_BTk, chosen_BTk, logits_BTE.softmax(-1).mean((0, 1))


class LocalExperts(nn.Module):
    """Computes rows on this device. Expert parallelism replaces it at `mlp.core.exchange`."""

    def forward(
        self, compute: ExpertsFunction, rows_SC: torch.Tensor, counts_E: torch.Tensor
    ) -> torch.Tensor:
        """Outputs (S, C) of rows (S, C) that are sorted by expert, counts_E[e] of them for expert e."""
        return compute(rows_SC, counts_E)


class ExpertsCore(nn.Module):
    """Sorts tokens by expert, computes them, and adds up the outputs of each token. No token is dropped."""

    def __init__(self, config: Model):
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.n_experts, self.exchange = config.n_experts, LocalExperts()

    def forward(
        self,
        x_BTC: torch.Tensor,
        weights_BTk: torch.Tensor,
        chosen_BTk: torch.Tensor,
        up: nn.Module,
        down: nn.Module,
    ) -> torch.Tensor:
        """Tokens (B, T, C) to (B, T, C), with the output of `Choice` and the modules of the weights."""
        expert_S = chosen_BTk.flatten()
        order_S = expert_S.argsort(stable=True)
        rows_SC, device = x_BTC.flatten(0, 1)[order_S // chosen_BTk.shape[-1]], x_BTC.device.type
        if torch.is_autocast_enabled(device):  # rows are sent in the dtype of the products
            rows_SC = rows_SC.to(torch.get_autocast_dtype(device))
        counts_E = counts_of(expert_S, self.n_experts)
        y_SC = self.exchange(partial(self.compute, up(), down()), rows_SC, counts_E)
        y_BTkC = y_SC[order_S.argsort()].unflatten(0, chosen_BTk.shape)
        # With autocast in the dtype of the products, as the output of an MLP.
        return (y_BTkC * weights_BTk.unsqueeze(-1)).sum(-2).to(y_SC.dtype)

    def compute(
        self,
        up_ECM: torch.Tensor,
        down_EMC: torch.Tensor,
        rows_SC: torch.Tensor,
        counts_E: torch.Tensor,
        counts: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Run the experts in order. Their numbers of rows differ, so each is a product of its own.

        A GPU groups them into one kernel, which reads the numbers on the device.
        """
        if can_group(rows_SC, up_ECM):
            ends_E = counts_E.cumsum(0, dtype=torch.int32)
            inner_SM = self.activation(F.grouped_mm(rows_SC, up_ECM.to(rows_SC.dtype), offs=ends_E))
            return F.grouped_mm(inner_SM, down_EMC.to(rows_SC.dtype), offs=ends_E)
        counts = counts_E.tolist() if counts is None else counts
        inner = [rows_NC @ up_CM for rows_NC, up_CM in zip(rows_SC.split(counts), up_ECM, strict=True)]
        inner_SM = self.activation(torch.cat(inner))
        outer = [rows_NM @ down_MC for rows_NM, down_MC in zip(inner_SM.split(counts), down_EMC, strict=True)]
        return torch.cat(outer)


def can_group(rows_SC: torch.Tensor, weight_ECM: torch.Tensor) -> bool:
    """True if `grouped_mm` has a kernel for these rows: on a GPU from Ampere on, in bfloat16, for sizes that
    eight divides."""
    if not rows_SC.is_cuda or rows_SC.dtype != torch.bfloat16 or any(n % 8 for n in weight_ECM.shape[1:]):
        return False
    return torch.cuda.get_device_capability(rows_SC.device) >= (8, 0)


def counts_of(expert_S: torch.Tensor, experts: int) -> torch.Tensor:
    """How often each expert occurs among the numbers of experts (S,): int64 (E,). A GPU's host waits for the
    result of `bincount`, but not for this."""
    return expert_S.new_zeros(experts).scatter_add_(0, expert_S, torch.ones_like(expert_S))


class Experts(nn.Module):
    """MLPs of which a router chooses k for each token."""

    def __init__(self, config: Model, layer: int):
        super().__init__()
        inner = MLP_RATIO * config.n_embd
        self.router = BareParameter(config.n_experts, config.n_embd)
        self.c_fc = BareParameter(config.n_experts, config.n_embd, inner)
        self.c_proj = BareParameter(config.n_experts, inner, config.n_embd)
        self.choice, self.core = Choice(config), ExpertsCore(config)
        self.dropout = Dropout(config.dropout, DropoutSite.MLP_OUT, layer)

    def forward(
        self, x_BTC: torch.Tensor, keys_B2: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The output (B, T, C), and the arguments of `Balance`: probabilities (E,) and choices (B, T, k)."""
        weights_BTk, chosen_BTk, probability_E = self.choice(x_BTC, self.router())
        y_BTC = self.core(x_BTC, weights_BTk, chosen_BTk, self.c_fc, self.c_proj)
        return self.dropout(y_BTC, keys_B2), probability_E, chosen_BTk


class Balance(nn.Module):
    """The load-balance loss: alpha E sum_e f_e P_e, added up over the layers, of the batch of a pass.

    f_e is the share of expert e in the choices of all devices, and P_e its mean probability on this device.
    The mean of the devices' losses then has the mean of their P_e.

    Attributes:
        total_counts: adds up counts (L, E) over the devices.
        chosen_LBTk: the choices of the last pass on this device.
        tokens_LE: how often each expert was chosen in the last pass, on all devices.

    Source: Switch Transformer (arXiv 2101.03961, section 2.2), with k choices.
    """

    def __init__(self, config: Model):
        super().__init__()
        self.scale = config.balance * config.n_experts
        self.total_counts: Callable[[torch.Tensor], torch.Tensor] = lambda counts_LE: counts_LE

    def forward(self, probability_LE: torch.Tensor, chosen_LBTk: torch.Tensor) -> torch.Tensor:
        experts = probability_LE.shape[-1]
        self.chosen_LBTk = chosen_LBTk
        counts_LE = torch.stack([counts_of(chosen.flatten(), experts) for chosen in chosen_LBTk])
        self.tokens_LE = self.total_counts(counts_LE)
        shares_LE = self.tokens_LE / self.tokens_LE.sum(-1, keepdim=True, dtype=probability_LE.dtype)
        return self.scale * (shares_LE * probability_LE).sum()
