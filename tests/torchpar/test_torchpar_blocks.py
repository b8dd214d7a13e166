"""One block of a ring, by each kernel. The oracle is PyTorch's attention to all keys at once, in float64."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.ranks import normal
from torchpar.manual import blocks, ring


class Operators(TorchDispatchMode):
    """The names of all operators that run inside."""

    def __init__(self):
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


KERNELS = {
    "fused": (blocks.attend, blocks.attend_backward),
    "products": (blocks.attend_by_products, blocks.attend_by_products_backward),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_two_blocks_equal_all_keys(kernel, kv_heads):
    """The last half of the queries sees the first half of the keys, and a triangle of the second half."""
    attend, attend_backward = KERNELS[kernel]
    q, k, v = (normal(2, heads, 10, 8, seed=heads) for heads in (4, kv_heads, kv_heads))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dy = normal(2, 4, 5, 8, seed=7)
    right_y = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)[:, :, 5:]
    right = torch.autograd.grad(right_y, leaves, dy)
    y, lse = torch.zeros_like(dy), dy.new_full(dy.shape[:-1], -torch.inf)
    halves = [
        (k[:, :, half], v[:, :, half], is_last) for half, is_last in ((slice(5), False), (slice(5, 10), True))
    ]
    with torch.no_grad():
        for *k_v, is_last in halves:
            ring.merge(y, lse, *attend(q[:, :, 5:], *k_v, is_diagonal=is_last))
        found = [
            attend_backward(dy, q[:, :, 5:], *k_v, y, lse, is_diagonal=is_last) for *k_v, is_last in halves
        ]
    close = {"rtol": 1e-13, "atol": 1e-14}
    torch.testing.assert_close(y, right_y, **close)
    torch.testing.assert_close(found[0][0] + found[1][0], right[0][:, :, 5:], **close)
    for which in (1, 2):
        torch.testing.assert_close(torch.cat([half[which] for half in found], 2), right[which], **close)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "operator"),
    [
        (torch.bfloat16, 64, "_scaled_dot_product_flash_attention"),
        (torch.bfloat16, 4, "bmm"),
        (torch.float64, 64, "bmm"),
    ],
)
def test_kernel_on_gpu(dtype, head_dim, operator):
    """Shapes and operators on a GPU that only pretends to exist: FlashAttention or products."""
    takes = {"return_value": dtype == torch.bfloat16}
    with patch.object(blocks, "can_use_flash_attention", **takes), FakeTensorMode(), Operators() as seen:
        q, dy = (torch.empty(2, 4, 16, head_dim, device="cuda", dtype=dtype) for _ in range(2))
        k, v = (torch.empty(2, 2, 16, head_dim, device="cuda", dtype=dtype) for _ in range(2))
        y, lse = blocks.attend(q, k, v, is_diagonal=True)
        gradients = blocks.attend_backward(dy, q, k, v, y, lse, is_diagonal=True)
    assert [x.shape for x in (y, *gradients)] == [x.shape for x in (q, q, k, v)]
    assert lse.shape == q.shape[:-1]
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    multiply = {name for name in seen.names if "attention" in name or name == "bmm"}
    assert multiply == {operator, *([f"{operator}_backward"] if operator != "bmm" else [])}
