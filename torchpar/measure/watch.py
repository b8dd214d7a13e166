"""A watch over one step: it reports operators, modules, collectives and pipeline tasks to several sinks."""

import bisect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from compare.pipeline.schedules import Kind, Task
from torchpar.comm import one_operator
from torchpar.comm.collectives import Call, Works, observers
from torchpar.private import (
    TorchDispatchMode,
    in_backward,
    is_traceable_wrapper_subclass_type,
    next_node_number,
    running_node_number,
)

HEAD, LOSS = "lm_head", "loss"
"""Names of the model's modules that make logits, or take them."""
TASKS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.BACKWARD_WEIGHT: "backward_weight"}
"""Methods of a pipeline stage. PyTorch's names have the suffix `_one_chunk`."""


def modules_named(name: str, module: nn.Module | None) -> set[int]:
    """The ids of all submodules with this name."""
    named = module.named_modules() if module else ()
    return {id(part) for path, part in named if path.rpartition(".")[-1] == name}


class Sink:
    """A receiver of the events of a step. A subclass overrides the methods that it needs."""

    watch: "Watch"

    def step(self) -> AbstractContextManager:
        """Entered around the step."""
        return nullcontext()

    def operator(self, func: Any, operands: tuple, result: Any) -> None:
        """After an operator of PyTorch's dispatcher; `operands` are (args, kwargs)."""

    def call(self, call: Call, full: torch.Tensor, ranks: int) -> None:
        """Before one of torchpar's collectives; `full` is the gathered tensor, of any shape."""

    def wait(self, call: Call) -> None:
        """Before the step waits for a hop of a ring."""

    def enter(self, module: nn.Module) -> None:
        """Before a module's forward."""

    def leave(self, module: nn.Module, output: Any) -> None:
        """After a module's forward; `output` is None if it failed."""


class Watch(TorchDispatchMode):
    """Reports the step of this thread, and of the threads in which autograd continues it, to the sinks.

    In forward, hooks record which module runs. In backward, the number of autograd's node identifies the
    module: a node gets the next number when its operator runs. PyTorch's ModuleTracker registers hooks on
    tensors instead, which then live longer. With recomputation that took half as much memory again.

    On a GPU, a thread of backward has its own numbers. There a recomputed operator may be attributed to
    another module.

    Attributes:
        calls: torchpar's collectives that are running. Operators in the meantime are parts of them.
        is_updating: True from when the gradients are complete, while the optimizer runs.
    """

    def __init__(self, *sinks: Sink):
        super().__init__()
        self.calls: list[Call] = []
        self.is_updating = False
        self._sinks = sinks
        self._names: dict[int, str] = {}
        self._stack: list[str] = []
        self._numbers: list[int] = []
        self._running: list[str] = []  # the module that runs from each number on
        self._exits = ExitStack()
        for sink in sinks:
            sink.watch = self

    def __enter__(self):
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        observers.append(self._around_call)
        for undo in (before.remove, after.remove, lambda: observers.remove(self._around_call)):
            self._exits.callback(undo)
        self._exits.enter_context(around_calls(Works, "wait", self._around_wait))
        for sink in self._sinks:
            self._exits.enter_context(sink.step())
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._exits.close()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: a compiled program runs as it is, and reports its own operators."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # DTensor goes first, and calls this again with local tensors
        if func.namespace == one_operator.NAMESPACE:
            with self.inside():
                return one_operator.run(*args)
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for sink in self._sinks:
            sink.operator(func, (args, kwargs), result)
        return result

    @contextmanager
    def inside(self) -> Generator[None]:
        """Report also what an operator of a compiled program calls."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    @contextmanager
    def _around_call(self, call: Call, full: torch.Tensor, ranks: int) -> Generator[None]:
        self.calls.append(call)
        for sink in self._sinks:
            sink.call(call, full, ranks)
        try:
            yield
        finally:
            self.calls.pop()

    def _around_wait(self, works: Works) -> AbstractContextManager:
        if works.call:
            for sink in self._sinks:
                sink.wait(works.call)
        return nullcontext()

    @property
    def in_backward(self) -> bool:
        """True within autograd's backward, which may run a forward again."""
        return in_backward()

    @property
    def runs_forward(self) -> bool:
        """True within the forward of a module, also if backward runs it again."""
        return bool(self._stack)

    @property
    def module(self) -> str:
        """The path of the innermost running module, from the module that was called first; '' for none."""
        if self._stack or not self.in_backward:
            return self._stack[-1] if self._stack else ""
        number = running_node_number()
        if number is None:
            return ""
        place = bisect.bisect_right(self._numbers, number) - 1
        return self._running[place] if place >= 0 else ""

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if id(module) not in self._names:
            root = type(module).__name__
            for name, child in module.named_modules():
                self._names[id(child)] = f"{root}.{name}" if name else root
        self._stack.append(self._names[id(module)])
        self._note_module()
        for sink in self._sinks:
            sink.enter(module)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._stack.pop()
        self._note_module()
        for sink in self._sinks:
            sink.leave(module, output)

    def _note_module(self) -> None:
        """Record which module runs from the next operator on."""
        number = next_node_number()
        if self._numbers and number < self._numbers[-1]:
            return  # another thread, with other numbers
        self._numbers.append(number)
        self._running.append(self._stack[-1] if self._stack else "")


def around_calls(
    owner: type, method: str, around: Callable[..., AbstractContextManager]
) -> AbstractContextManager:
    """Enter `around(...)`, with the arguments of the call, around every call of a method."""
    original = getattr(owner, method)

    @wraps(original)
    def within(*arguments: Any, **options: Any) -> Any:
        with around(*arguments, **options):
            return original(*arguments, **options)

    return patch.object(owner, method, within)


@contextmanager
def around_tasks(around: Callable[[Task], AbstractContextManager]) -> Generator[None]:
    """Enter `around(task)` around every task of a pipeline's stages, torchpar's and PyTorch's."""
    from torch.distributed.pipelining import PipelineStage  # a second of imports, for pipelines alone

    from torchpar.manual.stage import Stage
    from torchpar.manual.zero_bubble import ZeroBubbleStage

    def enter_task(
        kind: Kind, stage: Any, microbatch: int, *_: Any, **options: Any
    ) -> AbstractContextManager:
        if isinstance(stage, Stage):
            number, is_half = stage.number, isinstance(stage, ZeroBubbleStage)
        else:
            number, is_half = stage.stage_index, not options.get("full_backward", True)
        is_half = is_half and kind is Kind.BACKWARD
        return around(Task(Kind.BACKWARD_INPUT if is_half else kind, number, microbatch))

    with ExitStack() as stack:
        for kind, method in TASKS.items():
            owner = ZeroBubbleStage if kind is Kind.BACKWARD_WEIGHT else Stage
            stack.enter_context(around_calls(owner, method, partial(enter_task, kind)))
            stack.enter_context(around_calls(PipelineStage, f"{method}_one_chunk", partial(enter_task, kind)))
        yield
