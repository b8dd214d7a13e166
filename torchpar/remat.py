"""Activation recomputation, per block: of nothing, of all but matrix products, or of everything.

`forward` of a block is replaced on the instance, so the names of parameters do not change.
"""

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torchpar.private import ignore_profiler_marks_in_remat

NO_REMAT = ("none", "auto")
"""Values of `layout.remat` without recomputation: in eager PyTorch it is the fastest, hence auto."""

_aten = torch.ops.aten
# Fused attention counts as a matrix product: `dots` avoids recomputing it.
_DOTS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._efficient_attention_forward.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]


def apply_remat(blocks: nn.ModuleList, remat: str) -> None:
    """Make each block recompute its activations in backward, according to `layout.remat`."""
    if remat in NO_REMAT:
        return
    ignore_profiler_marks_in_remat()
    contexts = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _DOTS)}
    options = contexts if remat == "dots" else {}
    for block in blocks:
        # Dropout depends on keys, which are inputs of the block, and not on a random state.
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **options
        )
