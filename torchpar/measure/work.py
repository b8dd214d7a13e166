"""Work of a step: dtypes of its products, what runs again for backward, and a pipeline's tasks."""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from compare.contract.communication import GRADIENTS
from compare.contract.work import Again, ObservedWork
from compare.pipeline.schedules import Task
from torchpar.comm.collectives import Call
from torchpar.measure.watch import HEAD, Sink, modules_named

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "linear", "addmm_", "baddbmm_"})
ATTENTION = "scaled_dot_product"
"""Common part of the fused kernels' names: two products, and what lies between them."""


class WorkSink(Sink):
    """Notes the work of a model whose `lm_head` makes logits; of a pipeline it is told the tasks, too."""

    def __init__(self, module: nn.Module):
        self._products, self._again, self._positions = Counter[str](), set[Again](), set[int]()
        self._tasks = list[str]()
        self._heads, self._in_head, self._is_overlapped = modules_named(HEAD, module), 0, False

    def operator(self, func: Any, operands: tuple, result: Any) -> None:
        name = func.overloadpacket.__name__
        is_product = name in PRODUCTS or ATTENTION in name
        if is_product:
            self._products[_dtype_of(operands)] += 1
        if self._is_again and not self._in_head:
            self._again |= {"products"} if is_product else {"activations"} if name == "gelu" else set()

    def call(self, call: Call, full: torch.Tensor, ranks: int) -> None:
        self._is_overlapped |= call.purpose == GRADIENTS and self.watch.in_backward

    def enter(self, module: nn.Module) -> None:
        self._in_head += id(module) in self._heads

    def leave(self, module: nn.Module, output: Any) -> None:
        if id(module) in self._heads:
            self._in_head -= 1
            if output is not None and not self._is_again:
                self._positions.add(output.shape[1])  # of logits_BTV

    def seen(self) -> ObservedWork:
        """Work of this rank's step, after its end."""
        return ObservedWork(
            products=dict(self._products),
            again=sorted(self._again),
            logits_positions=sorted(self._positions),
            overlaps=self._is_overlapped,
            tasks=[self._tasks] if self._tasks else [],
        )

    @property
    def _is_again(self) -> bool:
        """True in a forward that backward runs anew."""
        return self.watch.in_backward and torch.is_grad_enabled()

    def task(self, task: Task) -> AbstractContextManager:
        """A pipeline's task runs within."""
        self._tasks.append(str(task))
        return nullcontext()


def of_all_ranks(ranks: Sequence[ObservedWork], *, stages: Sequence[int]) -> ObservedWork:
    """Work of all ranks, in the order of the mesh; tasks are those of the first rank of each of `stages`."""
    firsts = [ranks[stages.index(stage)] for stage in range(max(stages) + 1)]
    return ObservedWork(
        products=dict(sum((Counter(rank.products) for rank in ranks), Counter())),
        again=sorted({again for rank in ranks for again in rank.again}),
        logits_positions=sorted({positions for rank in ranks for positions in rank.logits_positions}),
        overlaps=any(rank.overlaps for rank in ranks),
        compiled=ranks[0].compiled,
        tasks=[tasks for rank in firsts for tasks in rank.tasks],
    )


def _dtype_of(operands: Any) -> str:
    """Of a product's operands, which have one; on a GPU float32 may be multiplied as TF32."""
    first = next(leaf for leaf in tree_leaves(operands) if isinstance(leaf, torch.Tensor))
    is_rounded = first.is_cuda and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if first.dtype == torch.float32 and is_rounded else str(first.dtype).removeprefix("torch.")
