"""What a step computes, as PyTorch's dispatcher sees it: dtypes of products, what runs again, which tasks."""

import functools
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from compare.contract.communication import GRADIENTS
from compare.contract.work import Again, ObservedWork, name_of
from compare.pipeline.schedules import Kind, Task
from torchpar.comm.collectives import Call, observers

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "linear", "addmm_", "baddbmm_"})
ATTENTION = "scaled_dot_product"
"""Common part of the fused kernels' names: two products, and what lies between them."""
HEAD = "lm_head"
"""The module that makes logits."""


class WorkMode(TorchDispatchMode):
    """Sees what runs while it is entered.

    Args:
        module: whose `lm_head` makes logits.
        has_tasks: whether it is run by a pipeline, whose tasks are noted, too.
    """

    def __init__(self, module: nn.Module, *, has_tasks: bool = False):
        super().__init__()
        self._products, self._again, self._positions = Counter[str](), set[Again](), set[int]()
        self._module, self._has_tasks, self._tasks = module, has_tasks, list[str]()
        self._stack = ExitStack()
        self._in_head, self._is_overlapped = 0, False

    def __enter__(self) -> "WorkMode":
        observers.append(self)
        self._stack.callback(observers.remove, self)
        for name, module in self._module.named_modules():
            if name.rpartition(".")[-1] == HEAD:
                before = module.register_forward_pre_hook(self._head_begins)
                after = module.register_forward_hook(self._head_ends, always_call=True)
                self._stack.callback(before.remove)
                self._stack.callback(after.remove)
        if self._has_tasks:
            self._stack.enter_context(noted_tasks(self._tasks))
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._stack.close()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled program runs as it is: what is left of its operators comes by."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # DTensor first: what it makes of the operator comes back here
        name = func.overloadpacket.__name__
        is_product = name in PRODUCTS or ATTENTION in name
        if is_product:
            self._products[_dtype_of(args)] += 1
        if _is_again() and not self._in_head:
            self._again |= {"products"} if is_product else {"activations"} if name == "gelu" else set()
        return func(*args, **(kwargs or {}))

    def begins(self, call: Call, full: torch.Tensor, members: Sequence[int], to: int | None) -> None:
        """One of torchpar's own collectives, `full` of any shape, begins."""
        self._is_overlapped |= call.purpose == GRADIENTS and _is_in_backward()

    def ends(self) -> None:
        """The call has been handed on."""

    def seen(self) -> ObservedWork:
        """Work of this rank's step. Call it after the end."""
        return ObservedWork(
            products=dict(self._products),
            again=sorted(self._again),
            logits_positions=sorted(self._positions),
            overlaps=self._is_overlapped,
            tasks=[self._tasks] if self._tasks else [],
        )

    def _head_begins(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._in_head += 1

    def _head_ends(self, module: nn.Module, inputs: Any, logits_BTV: torch.Tensor | None) -> None:
        self._in_head -= 1
        if logits_BTV is not None and not _is_again():
            self._positions.add(logits_BTV.shape[1])


def of_all_ranks(ranks: Sequence[ObservedWork], *, stages: Sequence[int]) -> ObservedWork:
    """Work of all ranks; tasks are those of the first rank of each stage.

    Args:
        ranks: in the order of the mesh.
        stages: of each its rank of the pipeline.
    """
    firsts = [ranks[stages.index(stage)] for stage in range(max(stages) + 1)]
    return ObservedWork(
        products=dict(sum((Counter(one.products) for one in ranks), Counter())),
        again=sorted({what for one in ranks for what in one.again}),
        logits_positions=sorted({positions for one in ranks for positions in one.logits_positions}),
        overlaps=any(one.overlaps for one in ranks),
        compiled=ranks[0].compiled,
        tasks=[tasks for one in firsts for tasks in one.tasks],
    )


@contextmanager
def noted_tasks(tasks: list[str]) -> Generator[None]:
    """Add every task of a pipeline's stages, of both engines, to `tasks` as it begins."""
    from torch.distributed.pipelining import PipelineStage  # a second of imports, for pipelines alone

    from torchpar.manual.stage import Stage

    def backward(stage: Any, microbatch: int, *_: Any, full_backward: bool = True, **options: Any) -> Kind:
        is_half = stage.splits_backward if isinstance(stage, Stage) else not full_backward
        return Kind.BACKWARD_INPUT if is_half else Kind.BACKWARD

    kinds: list[tuple[Any, str, Callable[..., Kind]]] = [
        (Stage, "forward", lambda *_, **__: Kind.FORWARD),
        (Stage, "backward", backward),
        (Stage, "backward_weight", lambda *_, **__: Kind.BACKWARD_WEIGHT),
        (PipelineStage, "forward_one_chunk", lambda *_, **__: Kind.FORWARD),
        (PipelineStage, "backward_one_chunk", backward),
        (PipelineStage, "backward_weight_one_chunk", lambda *_, **__: Kind.BACKWARD_WEIGHT),
    ]
    with ExitStack() as stack:
        for owner, method, kind_of in kinds:
            stack.enter_context(patch.object(owner, method, _noting(owner, method, kind_of, tasks)))
        yield


def _noting(owner: type, method: str, kind_of: Callable[..., Kind], tasks: list[str]) -> Callable[..., Any]:
    right = getattr(owner, method)

    @functools.wraps(right)
    def noting(stage: Any, microbatch: int, *arguments: Any, **options: Any) -> Any:
        number = getattr(stage, "stage_index", None)
        kind = kind_of(stage, microbatch, *arguments, **options)
        tasks.append(name_of(Task(kind, stage.number if number is None else number, microbatch)))
        return right(stage, microbatch, *arguments, **options)

    return noting


def _is_again() -> bool:
    """True in a forward that backward runs anew."""
    return _is_in_backward() and torch.is_grad_enabled()


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _dtype_of(operands: Any) -> str:
    """Of a product's operands, which have one; on a GPU float32 may be multiplied as TF32."""
    first = next(leaf for leaf in tree_leaves(operands) if isinstance(leaf, torch.Tensor))
    is_rounded = first.is_cuda and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if first.dtype == torch.float32 and is_rounded else str(first.dtype).removeprefix("torch.")
