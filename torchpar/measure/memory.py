"""Memory of a step by class: the lifetimes of all storages that its operators read or write.

    parameters, optimizer   given before the step
    gradients               given before the update, and left by a pass of an accumulation
    gathered parameters     storages that are resized: FSDP, torchpar's and PyTorch's, frees parameters so
    activations             made by a forward, and alive when the next backward begins
    logits                  the output of `lm_head`; tensors of that size in `loss`, and in its backward
    communication buffers   tensors that a collective reads or writes
    temporaries             everything else

A storage has one class all its life: the first of PRECEDENCE that ever applied to it. A storage that is read
but never made, and alive at the end, existed before the step. DDP's buckets do.
"""

import weakref
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import nn

from compare.contract.memory_profile import Class, DeviceMemory, Phase, device_memory
from torchpar.measure.ledger import NAMESPACES
from torchpar.measure.watch import HEAD, LOSS, Sink, modules_named
from torchpar.private import is_traceable_wrapper_subclass, storage_id, tree_leaves
from torchpar.sharding import local

CPU_METHOD = "bytes of all tensors alive at once (weights, gradients, optimizer, buckets, activations)"
GPU_METHOD = "torch.cuda.max_memory_allocated"
PROFILE_METHOD = (
    "every storage that an operator reads or writes, from its making to its end, position by operator; "
    "kernels' scratch memory is not seen"
)
INSIDE_A_PROGRAM = "; inside a program of inductor only products and messages are seen"
"""Added to `CPU_METHOD` and `PROFILE_METHOD` if blocks or the model are compiled."""
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


class _Life:
    """A storage since it was first read or made: its sizes in order, each with first and last position."""

    def __init__(self, size: int, since: int, *, is_made: bool):
        self.sizes, self.is_made, self.is_alive = [(size, since, since)], is_made, True
        self.tags = set[Tag]()
        self.reference: weakref.ref | None = None

    def resize(self, size: int, position: int) -> None:
        before, since, _ = self.sizes[-1]
        self.sizes[-1:] = [(before, since, position), (size, position, position)]

    def end(self, position: int, *, of_step: bool = False) -> None:
        self.is_alive = of_step
        self.resize(0, position)
        if of_step and not self.is_made:
            size, _, until = self.sizes[0]
            self.sizes[0] = (size, 0, until)

    def lifetimes(self) -> Iterable[tuple[Class, int, int, int]]:
        first: Tag = next((tag for tag in PRECEDENCE if tag in self.tags), "temporaries")
        role: Class = "communication buffers" if first == "messages" else first
        return [(role, *span) for span in self.sizes if span[0] and span[1] < span[2]]


class MemorySink(Sink):
    """Classifies the storages of a step.

    `present` are the tensors that exist before the step, by class. Tensors `elsewhere`, or on another device,
    do not count. The submodules `lm_head` and `loss` of `module` make logits.
    """

    def __init__(
        self,
        present: Mapping[Class, Iterable[torch.Tensor]],
        *,
        elsewhere: Iterable[torch.Tensor] = (),
        module: nn.Module | None = None,
        device: str = "cpu",
    ):
        self._device, self._module = device, module
        self._elsewhere = {storage_id(tensor.untyped_storage()): tensor for tensor in elsewhere}
        self._alive: dict[int, _Life] = {}
        self._lives: list[_Life] = []
        self._made_by_forward: list[_Life] = []
        self._operators: list[tuple[Any, str]] = []
        self._phases: list[Phase] = []
        self._heads, self._losses = modules_named(HEAD, module), modules_named(LOSS, module)
        self._in_loss, self._logits_bytes = False, 0
        self._of_allocator = dict[str, int]()
        for kind, tensors in present.items():
            self.tag(kind, tensors)

    @contextmanager
    def step(self) -> Generator[None]:
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            life = self._life_of(storage)
            result = resize(storage, size)
            if life:
                life.tags.add("gathered parameters")
                life.resize(storage.nbytes(), self._position)
            return result

        with patch.object(torch.UntypedStorage, "resize_", resize_):  # no operator reports it
            yield
        if self._device == "cuda":  # later steps, evaluations and gathers for the record have other peaks
            free, total = torch.cuda.mem_get_info()
            self._of_allocator = {
                "allocator_peak": torch.cuda.max_memory_allocated(),
                "outside_allocator": total - free - torch.cuda.memory_reserved(),
            }
        for life in self._alive.values():
            life.end(self._position, of_step=True)

    def operator(self, func: Any, operands: tuple, result: Any) -> None:
        self._note_phase()
        read = list(self._lives_of(operands, is_made=False))
        self._operators.append((func, self.watch.module))
        made = [life for life in self._lives_of(result) if life not in read]
        if (
            torch.is_grad_enabled() or self._phases[-1] == "forward"
        ):  # gradients are off inside an autograd.Function
            self._made_by_forward += made
        if self._in_loss:
            for life in made:
                if 2 * life.sizes[-1][0] > self._logits_bytes:
                    life.tags.add("logits")
        if func.namespace in NAMESPACES:
            name = func.overloadpacket.__name__
            is_part = any(call.kind != "permute" for call in self.watch.calls)
            is_message = name.startswith(("send", "recv")) and not is_part
            for life in (*read, *made):
                life.tags.add("messages" if is_message else "communication buffers")

    def tag(self, kind: Tag, tensors: Iterable[torch.Tensor]) -> None:
        """Give the storages of these tensors, of any shape, this class."""
        for life in self._lives_of(list(tensors), is_made=False):
            life.tags.add(kind)

    def enter(self, module: nn.Module) -> None:
        if id(module) in self._losses:
            self._in_loss = True

    def leave(self, module: nn.Module, output: Any) -> None:
        if id(module) in self._losses:
            self._in_loss = False
            if output is not None and output.requires_grad:
                output.register_hook(self._enter_loss)  # backward of the loss
        if id(module) in self._heads and output is not None:
            self.tag("logits", [output])
            self._logits_bytes = sum(tensor.untyped_storage().nbytes() for tensor in _plain(output))
            if output.requires_grad:
                output.register_hook(self._leave_loss)

    def result(self) -> DeviceMemory:
        """The memory of the step by class, after its end; on a GPU also what the allocator reported then."""
        lifetimes = (span for life in self._lives for span in life.lifetimes())
        return device_memory(lifetimes, self._phases, self._operators, **self._of_allocator)

    @property
    def _position(self) -> int:
        """The number of operators so far."""
        return len(self._operators)

    def _note_phase(self) -> None:
        is_backward = self.watch.in_backward
        if is_backward and not torch.is_grad_enabled():  # otherwise backward runs a forward again
            for life in self._made_by_forward:
                if life.is_alive:
                    life.tags.add("activations")
            self._made_by_forward.clear()
        before: Phase = self._phases[-1] if self._phases else "forward"
        if before == "backward" and not is_backward and self._module:  # the next pass adds to them
            self.tag("gradients", (p.grad for p in self._module.parameters() if p.grad is not None))
        by_mode: Phase = "forward" if torch.is_grad_enabled() else before
        self._phases.append("update" if self.watch.is_updating else "backward" if is_backward else by_mode)

    def _lives_of(self, tree: Any, *, is_made: bool = True) -> Iterable[_Life]:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                for tensor in _plain(leaf):
                    if life := self._life_of(tensor.untyped_storage(), is_made=is_made):
                        yield life

    def _life_of(self, storage: torch.UntypedStorage, *, is_made: bool = False) -> _Life | None:
        """The life of a storage; None if the storage does not count."""
        key = storage_id(storage)
        if storage.device.type != self._device or key in self._elsewhere:
            return None
        if key in self._alive:
            return self._alive[key]
        life = _Life(storage.nbytes(), self._position - is_made, is_made=is_made)

        def on_free(_: weakref.ref) -> None:
            del self._alive[key]
            life.end(self._position)

        life.reference = weakref.ref(storage, on_free)
        self._alive[key] = life
        self._lives.append(life)
        return life

    def _enter_loss(self, gradient: torch.Tensor) -> None:
        self._in_loss = True

    def _leave_loss(self, gradient_of_logits: torch.Tensor) -> None:
        self.tag("logits", [gradient_of_logits])
        self._in_loss = False


def resident_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of tensors of any shape, each storage once."""
    storages = (local(tensor).untyped_storage() for tensor in tensors)
    return sum({storage_id(storage): storage.nbytes() for storage in storages}.values())


def _plain(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """The plain tensors in this rank's memory: a DTensor's local shard."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inside = [getattr(tensor, name) for name in names]  # also a DTensor's mesh
    return [plain for part in inside if isinstance(part, torch.Tensor) for plain in _plain(part)]
