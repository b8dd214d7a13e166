"""One compiled program of forward and one of backward.

    none        no program: DTensor plans the communication at every operator of every step
    aot_eager   traced, and run operator by operator
    inductor    traced, fused, and compiled by a C++ compiler, or on a GPU by Triton

While torch.compile traces, DTensor plans. The program has the operators on each rank's shards, and the
collectives between them. The whole forward is one graph; where that is impossible, torch.compile raises.
"""

import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from compare.spec.experiment import Layout
from torchpar.measure.compiled import CompiledWork


def resolve_backend(layout: Layout, device: torch.device, *, sizes_are_data: bool = False) -> str:
    """The backend that `layout.compile` names. auto: inductor on a GPU if it can trace the model, else none.

    On a CPU compilation takes as long as fifty small steps. Raises ValueError: inductor has no C++ compiler.
    """
    if layout.compile == "auto":
        can_trace = layout.remat != "full" and not sizes_are_data
        return "inductor" if device.type == "cuda" and can_trace else "none"
    if layout.compile == "inductor" and device.type == "cpu" and not shutil.which("c++"):
        raise ValueError("layout.compile = inductor requires a C++ compiler: install one or set aot_eager")
    return layout.compile


def compile_forward(module: nn.Module, backend: str) -> Callable[..., dict[str, Any]]:
    """Compile a module's forward at its first call. Returns `CompiledWork.work`, for the record."""
    compiled = CompiledWork(backend)
    module.forward = torch.compile(module.forward, backend=compiled.backend, fullgraph=True, dynamic=False)
    return compiled.work
