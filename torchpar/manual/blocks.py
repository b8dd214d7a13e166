"""Attention to one block of keys, and its derivative: what a hop of a ring computes.

Softmax over blocks: each block has its output y and the logarithm lse of its sum of exponentials. Two blocks
are merged by their shares of the total. Autograd would save the weights of every block. So backward is
written by hand: it computes a block's weights again, from its scores and the lse over all blocks.

    device   dtypes                    computed by
    CPU      all                       PyTorch's fused kernel for CPUs
    CUDA     bfloat16, float16         FlashAttention
    CUDA     float32, float64          the products below: no fused kernel takes all three

A fused kernel keeps the scores in fast memory: it stores y and lse alone.

B batch, c positions of a block, H heads, K heads of keys and values, G query heads of each, D head_dim.
"""

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention

aten = torch.ops.aten
LANES = 8
"""FlashAttention takes a head_dim that is a multiple of this."""


def attend(
    q_BHcD: torch.Tensor, k_BKcD: torch.Tensor, v_BKcD: torch.Tensor, *, is_diagonal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to a block, y (B, H, c, D), and its lse (B, H, c), in float32 at least."""
    if not q_BHcD.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu(q_BHcD, k_BKcD, v_BKcD, 0.0, is_diagonal)
    if has_flash(q_BHcD, k_BKcD, v_BKcD):
        y_BHcD, lse_BHc, *_ = aten._scaled_dot_product_flash_attention(
            q_BHcD, k_BKcD, v_BKcD, 0.0, is_diagonal
        )
        return y_BHcD, lse_BHc
    return attend_by_products(q_BHcD, k_BKcD, v_BKcD, is_diagonal=is_diagonal)


def attend_backward(
    dy_BHcD: torch.Tensor,
    q_BHcD: torch.Tensor,
    k_BKcD: torch.Tensor,
    v_BKcD: torch.Tensor,
    y_BHcD: torch.Tensor,
    lse_BHc: torch.Tensor,
    *,
    is_diagonal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v through one block. y and lse are over all blocks.

    Since y is the sum of w v over all keys, y dy is the sum of w dw. The derivative of softmax needs no other
    number of other blocks.
    """
    inputs = dy_BHcD, q_BHcD, k_BKcD, v_BKcD, y_BHcD
    if not q_BHcD.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, lse_BHc, 0.0, is_diagonal)
    if has_flash(q_BHcD, k_BKcD, v_BKcD):
        lengths = q_BHcD.shape[2], k_BKcD.shape[2]
        state = torch.empty(2, dtype=torch.uint64, device=q_BHcD.device)  # of dropout, which is not used
        return aten._scaled_dot_product_flash_attention_backward(
            *inputs, lse_BHc.contiguous(), None, None, *lengths, 0.0, is_diagonal, state, state
        )
    return attend_by_products_backward(*inputs, lse_BHc, is_diagonal=is_diagonal)


def has_flash(q_BHcD: torch.Tensor, k_BKcD: torch.Tensor, v_BKcD: torch.Tensor) -> bool:
    """True if this GPU's FlashAttention takes a block of this dtype and size."""
    parameters = SDPAParams(q_BHcD, k_BKcD, v_BKcD, None, 0.0, False, True)
    return q_BHcD.shape[-1] % LANES == 0 and can_use_flash_attention(parameters)


# The products of a block -------------------------------------------------------------------------------


def scores(q_BKGcD: torch.Tensor, k_BKcD: torch.Tensor, *, is_diagonal: bool) -> torch.Tensor:
    """q k / sqrt(D), and -inf for later keys: (B, K, G, c, c), in float32 at least."""
    scores_BKGcc = torch.einsum("bkgtd,bksd->bkgts", q_BKGcD, k_BKcD)
    scores_BKGcc = scores_BKGcc.to(torch.promote_types(scores_BKGcc.dtype, torch.float32))
    scores_BKGcc = scores_BKGcc / q_BKGcD.shape[-1] ** 0.5
    if is_diagonal:
        later_cc = torch.ones(scores_BKGcc.shape[-2:], dtype=torch.bool, device=q_BKGcD.device).triu(1)
        scores_BKGcc.masked_fill_(later_cc, -torch.inf)
    return scores_BKGcc


def attend_by_products(
    q_BHcD: torch.Tensor, k_BKcD: torch.Tensor, v_BKcD: torch.Tensor, *, is_diagonal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `attend` without a fused kernel."""
    scores_BKGcc = scores(by_group(q_BHcD, k_BKcD), k_BKcD, is_diagonal=is_diagonal)
    lse_BKGc1 = scores_BKGcc.logsumexp(-1, keepdim=True)
    weights_BKGcc = scores_BKGcc.sub_(lse_BKGc1).exp_().to(v_BKcD.dtype)
    y_BKGcD = torch.einsum("bkgts,bksd->bkgtd", weights_BKGcc, v_BKcD)
    return y_BKGcD.flatten(1, 2), lse_BKGc1.squeeze(-1).flatten(1, 2)


def attend_by_products_backward(
    dy_BHcD: torch.Tensor,
    q_BHcD: torch.Tensor,
    k_BKcD: torch.Tensor,
    v_BKcD: torch.Tensor,
    y_BHcD: torch.Tensor,
    lse_BHc: torch.Tensor,
    *,
    is_diagonal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `attend_backward` without a fused kernel."""
    dot_BHc = (dy_BHcD.to(lse_BHc.dtype) * y_BHcD).sum(-1)
    q_BKGcD, dy_BKGcD = (by_group(x, k_BKcD) for x in (q_BHcD, dy_BHcD))
    lse_BKGc1, dot_BKGc1 = (by_group(x, k_BKcD).unsqueeze(-1) for x in (lse_BHc, dot_BHc))
    weights_BKGcc = scores(q_BKGcD, k_BKcD, is_diagonal=is_diagonal).sub_(lse_BKGc1).exp_()
    dweights_BKGcc = torch.einsum("bkgtd,bksd->bkgts", dy_BKGcD, v_BKcD).to(weights_BKGcc.dtype)
    dscores_BKGcc = dweights_BKGcc.sub_(dot_BKGc1).mul_(weights_BKGcc).div_(q_BHcD.shape[-1] ** 0.5)
    dscores_BKGcc = dscores_BKGcc.to(k_BKcD.dtype)
    return (
        torch.einsum("bkgts,bksd->bkgtd", dscores_BKGcc, k_BKcD).flatten(1, 2),
        torch.einsum("bkgts,bkgtd->bksd", dscores_BKGcc, q_BKGcD),
        torch.einsum("bkgts,bkgtd->bksd", weights_BKGcc.to(dy_BHcD.dtype), dy_BKGcD),
    )


def by_group(x_BHc: torch.Tensor, k_BKcD: torch.Tensor) -> torch.Tensor:
    """Split the heads, dim 1, into K groups: (B, H, c, ...) to (B, K, G, c, ...)."""
    return x_BHc.unflatten(1, (k_BKcD.shape[1], -1))
