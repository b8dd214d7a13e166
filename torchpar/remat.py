"""Activation recomputation from outside the model: none, all but matrix products, or all, per block.

A block's `forward` is replaced on the instance, so that parameter names stay as they are.
"""

import functools

import torch
from torch import nn
from torch.utils.checkpoint import SAC_IGNORED_OPS, checkpoint, create_selective_checkpoint_contexts

NO_REMAT = ("none", "auto")
"""What `layout.remat` says of a model that recomputes nothing: auto is the fastest in eager PyTorch."""

_aten = torch.ops.aten
# The fused attention kernels count as matrix products: recomputing them is what `dots` is to avoid.
_DOTS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]
_profiler = torch.ops.profiler
# PyTorch 2.13 counts what a block runs, and lets backward run no more of it. FSDP2 has other marks for the
# profiler there, where a block's experts are a unit of their own.
SAC_IGNORED_OPS.update(
    (_profiler._record_function_enter_new.default, _profiler._record_function_exit._RecordFunction)
)


def apply_remat(blocks: nn.ModuleList, remat: str) -> None:
    """Make each block recompute its activations in backward, as `layout.remat` says."""
    if remat in NO_REMAT:
        return
    contexts = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _DOTS)}
    options = contexts if remat == "dots" else {}
    for block in blocks:
        # Dropout follows from keys that the block is given: there is no random state to restore.
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **options
        )
