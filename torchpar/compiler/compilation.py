"""One program of forward and one of backward: torch.compile over what DTensor makes of the placements.

    none        nothing is traced: DTensor plans at every operator of every step
    aot_eager   traced, and run operator by operator
    inductor    traced, fused, and compiled by a C++ compiler, or on a GPU by Triton

DTensor plans while the program is traced: operators on each rank's own parts are left, and the collectives
between them. The whole forward is one graph: torch.compile fails where it would break it (`fullgraph`).
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from compare.contract.work import Part
from compare.spec.experiment import Layout
from torchpar.comm.collectives import observers
from torchpar.measure.watch import HEAD
from torchpar.measure.work import ACTIVATIONS

TRACED = {
    "linear": torch.ops.aten.mm.default,
    "matmul": torch.ops.aten.bmm.default,
    "scaled_dot_product_attention": torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    "gelu": torch.ops.aten.gelu.default,
    "relu": torch.ops.aten.relu.default,
}
"""By name in a traced graph, what a record counts: one of the operators that a checkpoint knows it by."""


def resolve_backend(layout: Layout, device: torch.device, *, sizes_are_data: bool = False) -> str:
    """The backend that `layout.compile` asks for. Raises ValueError: there is no C++ compiler for inductor.

    auto is inductor on a GPU, if it can be, and none on a CPU, where it takes as long as fifty small steps.
    """
    if (asked := layout.compile) == "auto":
        can_trace = layout.remat != "full" and not sizes_are_data
        return "inductor" if device.type == "cuda" and can_trace else "none"
    if asked == "inductor" and device.type == "cpu" and not shutil.which("c++"):
        raise ValueError("layout.compile = inductor: there is no C++ compiler: give aot_eager")
    return asked


def compile_forward(module: nn.Module, backend: str) -> Callable[..., dict[str, Any]]:
    """Compile a module's forward, in place, when it is first called; and what autograd makes of it.

    The result gives fields of `ObservedWork` from the graph of training, told whether operators are fused.
    """
    import torch._dynamo  # a second, for those that compile

    graphs, compile_graph, runs = [], torch._dynamo.lookup_backend(backend), Counter[int]()

    def noted(graph: fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
        number, compiled = len(graphs), compile_graph(graph, inputs, **options)
        graphs.append([*_operators(graph)])

        def run(*arguments: Any) -> Any:
            runs[number] += bool(observers)  # in the step that is watched
            return compiled(*arguments)

        return run

    def work(*, is_fused: bool) -> dict[str, Any]:
        made, of_training = "inductor" if is_fused else "aot_eager", graphs[0] * (runs[0] or 1)
        return {
            "compiled": f"{made}, {len(graphs)} graph{'s' * (len(graphs) != 1)}",
            "forward": dict(Counter(part for part, _, _ in of_training)),  # others are of evaluations
            "again": dict(Counter(part for part, _, is_again in of_training if is_again)),
            "logits_positions": sorted({length for part, length, _ in of_training if part == "logits"}),
        }

    module.forward = torch.compile(module.forward, backend=noted, fullgraph=True, dynamic=False)
    return work


def _operators(
    graph: fx.GraphModule, is_again: Callable[[Any], bool] = lambda operator: False
) -> Iterator[tuple[Part, int, bool]]:
    """Products and activations of a graph: the part, the result's second dim (T of logits_BTV), and whether a
    checkpoint around it has backward run it again."""
    for node in graph.graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name == "tag_activation_checkpoint":
            body: Any = graph.get_submodule(node.args[0].target)
            contexts = body.meta.get("_checkpoint_context_fn")  # of a selective one
            policy = contexts()[0].policy_fn if contexts else lambda *_: CheckpointPolicy.MUST_RECOMPUTE
            yield from _operators(body, lambda op, policy=policy: "RECOMPUTE" in policy(None, op).name)
        elif name in TRACED:
            of_product: Part = "logits" if HEAD in str(node.meta["nn_module_stack"]) else "products"
            part: Part = "activations" if name in ACTIVATIONS else of_product
            yield part, node.meta["example_value"].shape[1], is_again(TRACED[name])
