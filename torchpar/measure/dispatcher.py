"""Every collective of this process, whichever thread calls it; and how many went past PyTorch's dispatcher.

A dispatch mode is a thread's own: it misses what futures' callbacks and other threads send. The kernels here
stand at BackendSelect, through which an operator of c10d passes on its way to its backend, whoever calls it:
DDP from C++, a functional collective, a compiled graph, or torch.distributed. What a program asks of a
backend itself, no kernel sees. But a backend numbers what it does: some then come up outside of every kernel.
"""

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

_AFTER = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_GROUP = "__torch__.torch.classes.c10d.ProcessGroup"


class Watcher(Protocol):
    """An observer of every operator of c10d with a process group."""

    def sees(self, name: str, arguments: tuple, group: dist.ProcessGroup) -> None:
        """An operator ran, on this thread; must not raise."""
        ...


class Numbers:
    """Of each group how many operations went past the kernels.

    Those of several threads may overlap: what came up while any was in a kernel counts as seen.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._within, self._inside, self._begun = Counter[str](), Counter[str](), dict[str, int]()

    @contextmanager
    def within(self, group: dist.ProcessGroup) -> Generator[None]:
        """Around an operation that a kernel sees."""
        name = str(group.group_name)
        with self._lock:
            if not self._inside[name]:
                self._begun[name] = _number(group)
            self._inside[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside[name] -= 1
                if not self._inside[name]:
                    self._within[name] += _number(group) - self._begun[name]

    def past(self) -> dict[str, int]:
        """Of all groups that there are, by their names; -1 for one whose backend does not number.

        But for PyTorch's fake groups, which number nothing: what goes past the kernels there nobody knows.
        Since the group was made, and only the difference of two calls counts, with `watched` in between.
        """
        with self._lock:
            real = (group for group, (backend, _) in _world.pg_map.items() if backend != "fake")
            return {str(group.group_name): self._past(group) for group in real}

    def _past(self, group: dist.ProcessGroup) -> int:
        name = str(group.group_name)
        number = self._begun[name] if self._inside[name] else _number(group)
        return -1 if number < 0 else number - self._within[name]


def _number(group: dist.ProcessGroup) -> int:
    """Of the group's last operation; -1 if its backend has none."""
    try:
        return cast(Any, group)._get_sequence_number_for_group()
    except RuntimeError:
        return -1


numbers = Numbers()
_watchers: list[Watcher] = []
_kernels: list[torch.library.Library] = []
_off: list[torch.library.Library] = []


@contextmanager
def watched(watcher: Watcher) -> Generator[None]:
    """Tell `watcher` of every operator inside."""
    if not _watchers:
        _switch_on()
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
        if not _watchers:
            _switch_off()


def _switch_on() -> None:
    dist.ProcessGroup._start_coalescing = _begin_coalescing
    if _off:
        _off.pop()._destroy()
    if _kernels:
        return
    library = torch.library.Library("c10d", "IMPL", "BackendSelect")
    for name in _operators():
        library.impl(name, _kernel(name), with_keyset=True)
    _kernels.append(library)


def _switch_off() -> None:
    """Cover the kernels by none. They are not freed: another thread may just be on its way into one."""
    dist.ProcessGroup._start_coalescing = _start_coalescing
    library = torch.library.Library("c10d", "IMPL", "BackendSelect")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is overridden
        for name in _operators():
            library.impl(name, torch.library.fallthrough_kernel, allow_override=True)
    _off.append(library)


_start_coalescing = vars(dist.ProcessGroup)["_start_coalescing"]


def _begin_coalescing(self: dist.ProcessGroup, device: torch.device) -> None:
    """NCCL takes a number for a batch before its first operation: it is of no operation past the kernels."""
    with numbers.within(self):
        _start_coalescing.__get__(self)(device)


def _operators() -> list[str]:
    schemas = (schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("c10d::"))
    return [
        schema.name.removeprefix("c10d::")
        for schema in schemas
        if any(str(argument.type) == _GROUP for argument in schema.arguments)
    ]


def _kernel(name: str) -> Callable[..., object]:
    operator = getattr(torch.ops.c10d, name).default
    place = next(i for i, argument in enumerate(operator._schema.arguments) if str(argument.type) == _GROUP)

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> object:
        group = dist.ProcessGroup.unbox(args[place])
        watching = tuple(_watchers)
        with numbers.within(group):
            result = operator.redispatch(keys & _AFTER, *args, **kwargs)
        for watcher in watching:
            watcher.sees(name, args, group)
        return result

    return kernel
