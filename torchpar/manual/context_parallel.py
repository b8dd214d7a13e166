"""Context parallelism by hand: each rank has some of the positions, and its queries see the keys of all.

    context      what moves forward                   backward
    allgather    K, V gathered                        dK, dV reduce-scattered
    ring         K, V to the next rank, n - 1 times   K, V once more; dK, dV with them, n times: home
    ulysses      q, k, v from positions to heads,     the gradients likewise, the other way
                 and y back

All else in a GPT treats each position by itself. Weights are whole on every rank, and their gradients are
means over cp as over replicas.

A rank's positions are one run of neighbours, or in zigzag two. Of two runs, of queries and of keys, the
causal mask leaves all if the keys come before, a triangle if they are the same, and else nothing: then
nothing is computed. So in zigzag every rank has as much to do.

B batch, T all positions, t this rank's, S those of keys, H heads, K heads of keys and values, G = H / K,
D head_dim, n ranks.
Sources: Ring Attention (arXiv 2310.01889), Llama 3 (2407.21783, section 3.3.2), Ulysses (2309.14509).
"""

from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from compare.numerics.context import order_of_positions
from compare.spec.experiment import Layout
from torchpar.comm.collectives import Axis
from torchpar.manual.megatron import enter_region
from torchpar.model import GPT
from torchpar.positions import own_positions


def split_sequence(model: GPT, axis: Axis, layout: Layout) -> None:
    """Put the layout's attention core into a GPT, from outside, and this rank's positions."""
    model.positions = partial(own_positions, layout=layout, rank=axis.rank)
    for block in model.blocks:
        core = block.get_submodule("attn.core")
        block.set_submodule("attn.core", CORES[layout.context](core, axis, layout))


def runs_of(length: int, layout: Layout) -> np.ndarray:
    """The first position of each rank's runs, (n, 1), or in zigzag (n, 2)."""
    runs = order_of_positions(length, layout).reshape(layout.cp, 2 if layout.zigzag else 1, -1)
    return runs[..., 0]


class GatheredAttention(nn.Module):
    """K and V of all positions on every rank; a run of queries sees those up to its end."""

    def __init__(self, core: nn.Module, axis: Axis, layout: Layout):
        super().__init__()
        self.axis, self.layout = axis, layout

    def forward(self, q_BtHD: torch.Tensor, k_BtKD: torch.Tensor, v_BtKD: torch.Tensor) -> torch.Tensor:
        kv_2BTKD = enter_region(torch.stack([k_BtKD, v_BtKD]), self.axis, 2)
        if self.layout.zigzag:
            order_T = torch.tensor(order_of_positions(kv_2BTKD.shape[2], self.layout), device=q_BtHD.device)
            kv_2BTKD = kv_2BTKD.index_select(2, order_T.argsort())
        q_BHtD, k_BKTD, v_BKTD = (x.transpose(1, 2) for x in (q_BtHD, *kv_2BTKD.unbind()))
        starts = runs_of(k_BKTD.shape[2], self.layout)[self.axis.rank].tolist()
        done = []
        for start, run_BHRD in zip(starts, q_BHtD.chunk(len(starts), dim=2), strict=True):
            end = start + run_BHRD.shape[2]
            seen_RS = torch.ones(end - start, end, dtype=torch.bool, device=q_BHtD.device).tril(start)
            keys, values = k_BKTD[:, :, :end], v_BKTD[:, :, :end]
            y_BHRD = F.scaled_dot_product_attention(
                run_BHRD, keys, values, attn_mask=seen_RS, enable_gqa=k_BtKD.shape[2] < q_BtHD.shape[2]
            )
            done.append(y_BHRD)
        return torch.cat(done, dim=2).transpose(1, 2)


CORES = {"allgather": GatheredAttention}
