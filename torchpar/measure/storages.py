"""Lifetimes of all storages of a step, by class: what PyTorch's dispatcher and its storages tell.

    parameters, optimizer   handed over before the step
    gradients               what the optimizer is given, handed over in the middle; and what a pass left
    gathered parameters     storages that are resized: with them FSDP, ours and PyTorch's, frees parameters
    activations             made by a forward, and still there when the next backward begins
    logits                  what `lm_head` returns and, as large, what `loss` makes of it, and its backward
    communication buffers   what a collective reads or writes
    temporaries             all else

A storage has one class all its life: the first of PRECEDENCE that ever held for it. One that an operator
reads, that none has made and that outlives the step was there before it, as DDP's buckets are.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

from compare.contract.memory_profile import (
    Class,
    DeviceMemory,
    Lifetime,
    Phase,
    changes_of,
    curve_of,
    peak_of,
    peak_position,
    usage,
)
from torchpar.comm.collectives import Call, observers
from torchpar.measure.modules import RunningModules

Tag = Class | Literal["messages"]
PRECEDENCE: tuple[Tag, ...] = (
    "parameters",
    "optimizer",
    "gradients",
    "gathered parameters",
    "messages",
    "logits",
    "activations",
    "communication buffers",
)
RESIZE = "resize_"
HEAD, LOSS = "lm_head", "loss"
"""The model's modules whose results are logits."""


class _Life:
    """A storage from its first sight on: its size now, since when, and the sizes it had before."""

    def __init__(self, size: int, since: int):
        self.size, self.since = size, since
        self.tags: set[Tag] = set()
        self.is_alive, self.is_unmade = True, False
        self.reference: weakref.ref | None = None
        self._before: list[tuple[int, int, int]] = []

    def resize(self, size: int, position: int) -> None:
        self._before.append((self.size, self.since, position))
        self.size, self.since = size, position

    def end(self, position: int, *, of_step: bool = False) -> None:
        """Close the lifetime: freed, or end of step."""
        self.is_alive = of_step
        self.resize(0, position)
        if of_step and self.is_unmade:
            size, _, until = self._before[0]
            self._before[0] = (size, 0, until)

    def lifetimes(self) -> Iterable[Lifetime]:
        first: Tag = next((tag for tag in PRECEDENCE if tag in self.tags), "temporaries")
        kind: Class = "communication buffers" if first == "messages" else first
        return [Lifetime(kind, *span) for span in self._before if span[0] and span[1] < span[2]]


class StorageMode(TorchDispatchMode):
    """Follows every storage that an operator reads or writes, from its first sight to its end.

    A kernel's own scratch memory is not seen. PyTorch's MemTracker would do the same, but
    refuses modules that run twice in a step, as accumulation does.

    Args:
        held: tensors that are there already, by class.
        elsewhere: tensors that are not on the device, and do not count.
        module: whose `lm_head` and `loss` make logits; None if there are none.
        device: only what is there counts.
    """

    def __init__(
        self,
        held: Mapping[Class, Iterable[torch.Tensor]],
        *,
        elsewhere: Iterable[torch.Tensor] = (),
        module: nn.Module | None = None,
        device: str = "cpu",
    ):
        super().__init__()
        self._device, self._module = device, module
        self._elsewhere = {storage._cdata: storage for storage in map(_storage, elsewhere)}
        self._alive: dict[int, _Life] = {}
        self._lives: list[_Life] = []
        self._made_by_forward: list[_Life] = []
        self._operators: list[tuple[Any, str]] = []
        self._phases: list[Phase] = []
        self._modules = RunningModules()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._calls: list[Call] = []
        self._is_updating, self._in_loss, self._logits_bytes = False, 0, 0
        for kind, tensors in held.items():
            self.tag(kind, tensors)

    def __enter__(self):
        observers.append(self)
        self._modules.__enter__()
        self._watch_logits()
        self._resize = torch.UntypedStorage.resize_
        # Neither FSDP does that by an operator. By its name: the type checker knows it as a method.
        setattr(torch.UntypedStorage, RESIZE, self._watched_resize())
        return super().__enter__()

    def __exit__(self, exc_type, exc_val, exc_tb):
        super().__exit__(exc_type, exc_val, exc_tb)
        setattr(torch.UntypedStorage, RESIZE, self._resize)
        for hook in self._hooks:
            hook.remove()
        self._modules.__exit__(exc_type, exc_val, exc_tb)
        observers.remove(self)
        for life in self._alive.values():
            life.end(self._position, of_step=True)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled program runs as it is: what is left of its operators comes by."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # DTensor first: what it makes of the operator comes back here
        kwargs = kwargs or {}
        self._note_phase()
        operands = list(self._see_all((args, kwargs), is_made=False))
        result = func(*args, **kwargs)
        self._operators.append((func, self._running))
        made = [life for life in self._see_all(result) if life not in operands]
        self._tag_results(func, operands, made)
        return result

    def tag(self, kind: Tag, tensors: Iterable[torch.Tensor]) -> None:
        """Give the memory of these tensors, any shapes, this class."""
        for life in self._see_all(list(tensors), is_made=False):
            life.tags.add(kind)

    def updates(self) -> None:
        """From here on the optimizer is at work."""
        self._is_updating = True

    def begins(self, call: Call, full: torch.Tensor, members: Sequence[int], to: int | None) -> None:
        """One of torchpar's own collectives, `full` of any shape, begins: messages within belong to it."""
        self._calls.append(call)

    def ends(self) -> None:
        """The call has been handed on."""
        self._calls.pop()

    @property
    def peak(self) -> int:
        """The most bytes alive at once. After the end."""
        return self.memory().peak.total

    def memory(self, *, allocator_peak: int = 0) -> DeviceMemory:
        """The step by class. After the end."""
        in_use = usage((one for life in self._lives for one in life.lifetimes()), max(self._position, 1))
        marks = changes_of(self._phases)
        operator, module = self._operators[peak_position(in_use)] if self._operators else ("", "")
        peak = peak_of(in_use, marks, operation=str(operator), place=module)
        return DeviceMemory(peak=peak, curve=curve_of(in_use, marks), allocator_peak=allocator_peak)

    @property
    def _position(self) -> int:
        """Operators until now: what comes now is there from this position on."""
        return len(self._operators)

    @property
    def _running(self) -> str:
        """The innermost module that is running."""
        return self._modules.innermost

    def _note_phase(self) -> None:
        is_backward = torch._C._current_graph_task_id() != -1
        if is_backward and not torch.is_grad_enabled():  # else a forward is run again
            for life in self._made_by_forward:
                if life.is_alive:
                    life.tags.add("activations")
            self._made_by_forward.clear()
        before: Phase = self._phases[-1] if self._phases else "forward"
        if before == "backward" and not is_backward and self._module:  # the next pass adds to these
            self.tag("gradients", (p.grad for p in self._module.parameters() if p.grad is not None))
        by_mode: Phase = "forward" if torch.is_grad_enabled() else before
        self._phases.append("update" if self._is_updating else "backward" if is_backward else by_mode)

    def _tag_results(self, func: Any, operands: list[_Life], made: list[_Life]) -> None:
        if torch.is_grad_enabled() or self._phases[-1] == "forward":  # off inside of an autograd.Function
            self._made_by_forward += made
        if self._in_loss:
            for life in made:
                if 2 * life.size > self._logits_bytes:
                    life.tags.add("logits")
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.overloadpacket.__name__
            is_part = any(call.kind != "permute" for call in self._calls)
            is_message = name.startswith(("send", "recv")) and not is_part
            for life in (*operands, *made):
                life.tags.add("messages" if is_message else "communication buffers")

    def _see_all(self, tree: Any, *, is_made: bool = True) -> Iterable[_Life]:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                for tensor in _plain(leaf):
                    storage = tensor.untyped_storage()
                    if tensor.device.type == self._device and storage._cdata not in self._elsewhere:
                        yield self._alive.get(storage._cdata) or self._first_sight(storage, is_made=is_made)

    def _first_sight(self, storage: torch.UntypedStorage, *, is_made: bool) -> _Life:
        since = self._position - 1 if is_made else self._position
        key, life = storage._cdata, _Life(storage.nbytes(), since)
        life.is_unmade = not is_made

        def gone(_: weakref.ref) -> None:
            del self._alive[key]
            life.end(self._position)

        life.reference = weakref.ref(storage, gone)
        self._alive[key] = life
        self._lives.append(life)
        return life

    def _watched_resize(self) -> Callable[..., Any]:
        resize = self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            is_here = storage.device.type == self._device and storage._cdata not in self._elsewhere
            life = (
                self._alive.get(storage._cdata) or self._first_sight(storage, is_made=False)
                if is_here
                else None
            )
            result = resize(storage, size)
            if life:
                life.tags.add("gathered parameters")
                life.resize(storage.nbytes(), self._position)
            return result

        return resize_

    def _watch_logits(self) -> None:
        for name, module in self._module.named_modules() if self._module else ():
            last = name.rpartition(".")[-1]
            if last == HEAD:
                self._hooks.append(module.register_forward_hook(self._head_is_done))
            if last == LOSS:
                self._hooks.append(module.register_forward_pre_hook(self._loss_begins))
                self._hooks.append(module.register_forward_hook(self._loss_is_done))

    def _head_is_done(self, module: nn.Module, inputs: tuple, logits: torch.Tensor) -> None:
        self.tag("logits", [logits])
        self._logits_bytes = sum(tensor.untyped_storage().nbytes() for tensor in _plain(logits))

        def gradient_is_there(gradient: torch.Tensor) -> None:
            self.tag("logits", [gradient])
            self._in_loss = 0

        if logits.requires_grad:
            logits.register_hook(gradient_is_there)

    def _loss_begins(self, *_: Any) -> None:
        self._in_loss = 1

    def _loss_is_done(self, module: nn.Module, inputs: tuple, loss: torch.Tensor) -> None:
        self._in_loss = 0
        if loss.requires_grad:
            loss.register_hook(self._loss_begins)  # its backward


def _plain(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """The plain tensor in this rank's memory: a DTensor's local part."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inside = [getattr(tensor, name) for name in names]  # a DTensor's mesh, too
    return [part for one in inside if isinstance(one, torch.Tensor) for part in _plain(one)]


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
