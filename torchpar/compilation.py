"""torch.compile: the whole forward as one program, or a program for each block.

    none        no program
    block       torch-manual, torch-library: each block by itself, with inductor
    aot_eager   torch-compiler, nanogpt-loop: the model, traced, and run operator by operator
    inductor    torch-compiler, nanogpt-loop: the model, traced, fused, and compiled by a C++ compiler, or on
                a GPU by Triton

A program has one graph of forward and one of backward. Where that is impossible, torch.compile raises. In
torch-compiler DTensor plans the communication while torch.compile traces.

The hooks of a block run outside of its program. So FSDP gathers a block before its program starts, and DDP
reduces the gradients of a block when its program of backward ends. The blocks are alike, so torch.compile
makes one program for all of them, or with dropout one for each.
"""

import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from compare.contract.work import ObservedWork
from compare.spec.experiment import Layout
from torchpar.measure.compiled import CompiledWork

Compiled = Callable[[ObservedWork], ObservedWork]
"""`CompiledWork.work`, for the record."""
BACKEND_OF_BLOCKS = "inductor"


def resolve_backend(layout: Layout, device: torch.device, *, sizes_are_data: bool = False) -> str:
    """The backend of the whole model. auto: inductor on a GPU if it can trace the model, else none.

    On a CPU compilation takes as long as fifty small steps. Raises ValueError: inductor has no C++ compiler.
    """
    if layout.compile == "auto":
        can_trace = layout.remat != "full" and not sizes_are_data
        return "inductor" if device.type == "cuda" and can_trace else "none"
    if layout.compile == "inductor":
        _require_compiler(layout, device)
    return layout.compile


def compile_forward(module: nn.Module, backend: str, layout: Layout) -> Compiled:
    """Compile a module's forward at its first call."""
    options = {"config_patches": buckets(layout)} if backend == "inductor" and layout.devices > 1 else {}
    compiled = CompiledWork(backend, **options)
    module.forward = torch.compile(module.forward, backend=compiled.backend, fullgraph=True, dynamic=False)
    return compiled.work


def buckets(layout: Layout) -> dict[str, Any]:
    """Settings of inductor's own bucketing: a message of up to `layout.bucket_mb` for several parameters.

    It merges independent messages of a graph that have the same kind, group and dtype. Of gathers it merges
    those of a graph's inputs, the shards of parameters.
    """
    merged = {"all_gathers": "only_fsdp", "reduce_scatters": "all", "all_reduces": "all"}
    sizes = dict.fromkeys(merged, partial(_bucket_mebibytes, layout.bucket_mb))
    settings: dict[str, Any] = {f"bucket_{kind}_fx": which for kind, which in merged.items()}
    return settings | {f"bucket_{kind}_fx_bucket_size_determinator": size for kind, size in sizes.items()}


def _bucket_mebibytes(megabytes: float, number: int) -> float:
    """The size of a graph's bucket, by its number, in inductor's unit."""
    return megabytes * 1e6 / 2**20


def compile_blocks(blocks: nn.ModuleList, layout: Layout, device: torch.device) -> Compiled | None:
    """Compile each block by itself at its first call. None: the layout compiles no blocks.

    Raises ValueError: inductor has no C++ compiler.
    """
    if layout.compile != "block":
        return None
    _require_compiler(layout, device)
    compiled = CompiledWork(BACKEND_OF_BLOCKS)
    config: Any = torch._dynamo.config
    config.optimize_ddp = False  # DDP would cut the program of a block where its buckets end
    config.recompile_limit = max(config.recompile_limit, 4 * len(blocks))  # training and evaluation
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=compiled.backend, fullgraph=True, dynamic=False)
    return compiled.work


def _require_compiler(layout: Layout, device: torch.device) -> None:
    if device.type == "cpu" and not shutil.which("c++"):
        raise ValueError(
            f"layout.compile = {layout.compile} requires a C++ compiler: install one or set "
            + ("none" if layout.compile == "block" else "aot_eager")
        )
