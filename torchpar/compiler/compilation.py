"""One program of forward and one of backward: torch.compile over what DTensor makes of the placements.

    none        nothing is traced: DTensor plans at every operator of every step
    aot_eager   traced, and run operator by operator
    inductor    traced, fused, and compiled by a C++ compiler, or on a GPU by Triton

DTensor plans while the program is traced: operators on each rank's own parts are left, and the collectives
between them. The whole forward is one graph: torch.compile fails where it would break it (`fullgraph`).
"""

import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from compare.spec.experiment import Layout


def resolve_backend(layout: Layout, device: torch.device) -> str:
    """The backend that `layout.compile` asks for. Raises ValueError: there is no C++ compiler for inductor.

    auto is inductor on a GPU, none on a CPU: a compilation takes as long as fifty steps of a small model. Nor
    is compiled what `compare.spec.engines` would refuse.
    """
    asked = layout.compile
    if asked == "auto":
        return "inductor" if device.type == "cuda" and layout.remat != "full" else "none"
    if asked == "inductor" and device.type == "cpu" and not shutil.which("c++"):
        raise ValueError("layout.compile = inductor: there is no C++ compiler: give aot_eager")
    return asked


def compile_forward(module: nn.Module, backend: str) -> Callable[[], str]:
    """Compile a module's forward, in place, when it is first called; and what autograd makes of it.

    The result says what has been compiled: "aot_eager, 1 graph"; nothing before the first call.
    """
    import torch._dynamo  # a second, for those that compile

    graphs = 0
    compile_graph: Callable[..., Any] = torch._dynamo.lookup_backend(backend)

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return compile_graph(graph, inputs, **options)

    module.forward = torch.compile(module.forward, backend=count, fullgraph=True, dynamic=False)
    return lambda: f"{backend}, {graphs} graph{'s' * (graphs != 1)}" if graphs else ""
