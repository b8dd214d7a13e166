"""Which module is running: in forward by hooks, in backward by the numbers that autograd gives its nodes.

PyTorch's ModuleTracker hangs its hooks on tensors, which then live longer: with recomputation, half as much
memory again was seen of a step that it watched. This one holds no tensor.
"""

import bisect
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class RunningModules:
    """Follows the modules that run while it is entered.

    A node of the graph has the number that was up when its operator ran in forward; so backward finds the
    module that ran then. The numbers are a thread's own: what is computed anew on a GPU, in a thread of
    backward's, may be told of another module.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._stack: list[str] = []
        self._numbers: list[int] = []
        self._running: list[str] = []
        """The module from each of the numbers on."""
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "RunningModules":
        self._handles = [
            register_module_forward_pre_hook(self._begins),
            register_module_forward_hook(self._ends, always_call=True),
        ]
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def are_in_backward(self) -> bool:
        """True within autograd's backward, where a forward may be run again."""
        return torch._C._current_graph_task_id() != -1

    @property
    def run_again(self) -> bool:
        """True within a forward that backward runs again."""
        return self.are_in_backward and bool(self._stack)

    @property
    def innermost(self) -> str:
        """Its path from the module that was called first; '' outside of all."""
        if self._stack or not self.are_in_backward:
            return self._stack[-1] if self._stack else ""
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        place = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._running[place] if place >= 0 else ""

    def _begins(self, module: nn.Module, inputs: Any) -> None:
        if id(module) not in self._names:
            root = type(module).__name__
            for name, child in module.named_modules():
                self._names[id(child)] = f"{root}.{name}" if name else root
        self._stack.append(self._names[id(module)])
        self._note()

    def _ends(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._stack.pop()
        self._note()

    def _note(self) -> None:
        """From the next operator on another module runs."""
        number = _get_sequence_nr()
        if self._numbers and number < self._numbers[-1]:
            return  # of another thread
        self._numbers.append(number)
        self._running.append(self._stack[-1] if self._stack else "")
