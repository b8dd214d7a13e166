"""Work of a compiled model, or of compiled blocks: operators of the graphs that torch.compile makes.

The dispatcher does not see the operators of a compiled program, so they are counted in the graph.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from compare.contract.work import ObservedWork, Part
from torchpar.comm.collectives import observers
from torchpar.measure.watch import HEAD
from torchpar.measure.work import FUNCTIONS

TRACED = {
    "linear": torch.ops.aten.mm.default,
    "matmul": torch.ops.aten.bmm.default,
    "scaled_dot_product_attention": torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    "gelu": torch.ops.aten.gelu.default,
    "relu": torch.ops.aten.relu.default,
}
"""By name in a traced graph, an operator that the policy of a checkpoint is asked about."""


class CompiledWork:
    """Counts what a backend of torch.compile compiles, with its `options`.

    `backend` is passed to torch.compile.
    """

    def __init__(self, backend: str, **options: Any):
        import torch._dynamo  # takes a second, so only a compiled run imports it

        self._compile = partial(torch._dynamo.lookup_backend(backend), **options)
        self._graphs = list[list[tuple[Part, int, bool]]]()
        self._runs = Counter[int]()  # by graph, in the step that is watched

    def backend(self, graph: fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
        """Compile one graph, and count its operators."""
        number, compiled = len(self._graphs), self._compile(graph, inputs, **options)
        self._graphs.append([*_operators(graph)])

        def run(*arguments: Any) -> Any:
            if observers:
                self._runs[number] += 1
            return compiled(*arguments)

        return run

    def work(self, seen: ObservedWork) -> ObservedWork:
        """`seen` by the dispatcher in a step, with the operators of the graphs that ran in it.

        Graphs of blocks have no logits: these are the dispatcher's. Without a watched step the first graph
        counts, the graph of training.
        """
        runs = self._runs or {0: 1}
        ran = [operator for number, times in runs.items() for operator in self._graphs[number] * times]
        forward, again = Counter(part for part, _, _ in ran), Counter(part for part, _, re in ran if re)
        backend = "aot_eager" if seen.forward.get("activations") else "inductor"
        count = len(self._graphs)
        compiled = f"{backend}, {count} graph{'s' * (count != 1)}"
        if "logits" in forward:
            positions = sorted({length for part, length, _ in ran if part == "logits"})
            return replace(
                seen, compiled=compiled, forward=dict(forward), again=dict(again), logits_positions=positions
            )
        sizes = {sum(part == "activations" for part, _, _ in self._graphs[number]) for number in runs}
        logits = [{"logits": of["logits"]} if "logits" in of else {} for of in (seen.forward, seen.again)]
        return replace(
            seen,
            compiled=f"{'block' if sizes == {1} else 'blocks'}, {compiled}",
            forward=dict(forward) | logits[0],
            again=dict(again) | logits[1],
        )


def _operators(
    graph: fx.GraphModule, is_again: Callable[[Any], bool] = lambda operator: False
) -> Iterator[tuple[Part, int, bool]]:
    """Yield the products and activations of a graph: the part, the second dim of the result (T of logits),
    and whether a checkpoint recomputes it in backward."""
    for node in graph.graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name == "tag_activation_checkpoint":
            body: Any = graph.get_submodule(node.args[0].target)
            contexts = body.meta.get("_checkpoint_context_fn")  # of a selective checkpoint
            policy = contexts()[0].policy_fn if contexts else lambda *_: CheckpointPolicy.MUST_RECOMPUTE
            yield from _operators(body, lambda op, policy=policy: "RECOMPUTE" in policy(None, op).name)
        elif name in TRACED:
            product: Part = "logits" if HEAD in str(node.meta.get("nn_module_stack")) else "products"
            part: Part = "activations" if name in FUNCTIONS else product
            yield part, node.meta["example_value"].shape[1], is_again(TRACED[name])
