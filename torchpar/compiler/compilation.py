"""One program of forward and one of backward: torch.compile over what DTensor makes of the placements.

DTensor plans while the program is traced, and what is left of it are the operators on each rank's own parts
and the collectives between them. A backend may fuse the operators:

    none        nothing is traced: DTensor plans at every operator of every step
    aot_eager   traced, and run operator by operator
    merged      the same, with one collective in the place of a block's (`merging`)
    inductor    traced, fused, and compiled by a C++ compiler, or on a GPU by Triton

The whole forward is one graph: torch.compile is told to fail where it would break it (`fullgraph`).
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from torchpar.compiler.merging import merging_backend

Backend = Literal["none", "aot_eager", "merged", "inductor"]


@dataclass
class Compilation:
    """What was compiled.

    Attributes:
        backend: that has compiled.
        graphs: traced ones; each has a forward, and a backward if gradients are needed.
    """

    backend: Backend
    graphs: int = 0

    def words(self) -> str:
        """What ran; empty if nothing was compiled."""
        if not self.graphs:
            return ""
        return f"{self.backend}, {self.graphs} graph{'s' * (self.graphs != 1)}"


def resolve_backend(asked: str, device: torch.device) -> Backend:
    """The backend that `layout.compile` asks for.

    auto is inductor on a GPU. On a CPU it is none: a compilation takes as long as some fifty steps of a small
    model, which is what a CPU is for here.

    Raises:
        ValueError: inductor on a CPU without a C++ compiler.
    """
    if asked == "auto":
        return "inductor" if device.type == "cuda" else "none"
    if asked == "inductor" and device.type == "cpu" and not shutil.which("c++"):
        raise ValueError("layout.compile = inductor: there is no C++ compiler: give aot_eager")
    assert asked in ("none", "aot_eager", "merged", "inductor")
    return asked


def compile_forward(module: nn.Module, backend: Backend) -> Compilation:
    """Compile a module's forward, in place, when it is first called; and what autograd makes of it."""
    report = Compilation(backend)
    if backend != "none":
        import torch._dynamo  # a second, for those that compile

        compile_graph: Callable[..., Any] = (
            merging_backend if backend == "merged" else torch._dynamo.lookup_backend(backend)
        )

        def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
            report.graphs += 1
            return compile_graph(graph, inputs, **options)

        module.forward = torch.compile(module.forward, backend=count, fullgraph=True, dynamic=False)
    return report
