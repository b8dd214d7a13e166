"""Tokens on their way to experts that are elsewhere: who gets which rows, and in which order they come."""

from collections.abc import Callable

import torch
from torch import nn

from torchpar.mlp import Rows

AllToAll = Callable[[torch.Tensor, list[int], list[int]], torch.Tensor]
"""(rows (S, ..), how many to each rank, how many from each) -> rows (N, ..), by rank."""


class ExchangeRows(nn.Module):
    """Rows of tokens go to the ranks of their experts, and what these make of them comes back.

    S rows of this rank, k for each of its tokens; N rows that came; C embedding; R ranks, F experts of one.
    """

    def __init__(self, all_to_all: AllToAll, ranks: int):
        super().__init__()
        self.all_to_all, self.ranks = all_to_all, ranks

    def forward(self, compute: Rows, rows_SC: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """`compute` this rank's rows (S, C), counts_E[e] of them for expert e of all: (S, C)."""
        sent_RF, one_each = counts_E.view(self.ranks, -1), [1] * self.ranks
        came_RF = self.all_to_all(sent_RF, one_each, one_each)
        sent, came = sent_RF.sum(1).tolist(), came_RF.sum(1).tolist()
        rows_NC = self.all_to_all(rows_SC, sent, came)
        # They came by rank, and of each by expert.
        expert_F = torch.arange(came_RF.shape[1], device=came_RF.device)
        by_expert_N = expert_F.repeat(self.ranks).repeat_interleave(came_RF.flatten()).argsort(stable=True)
        y_NC = compute(rows_NC[by_expert_N], came_RF.sum(0))
        return self.all_to_all(y_NC[by_expert_N.argsort()], came, sent)
