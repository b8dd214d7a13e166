"""nccl_like: a process group on CPU tensors that is as strict as NCCL. It finds mistakes that gloo forgives.

    a wait          outputs hold NaN until `wait()`; until then no tensor of a call may change or be freed
    one order       a group runs its calls one at a time, in the program's order; all ranks have one order
    a send          ends with its receive; sends and receives that belong together must be batched
    equal shards    all ranks give as many elements
    the host        a group rejects tensors that `Tensor.cpu()` made, or that came inside of an object
    the end         a rank that exits without `destroy_process_group` breaks the work of the other ranks

Each violation is an error that names the call. NCCL would return wrong numbers, hang or crash.

    import torchpar.comm.nccl_like
    dist.init_process_group("nccl_like", rank=rank, world_size=2, store=dist.FileStore(path, 2))

gloo moves the data, from copies that a call takes at its start. `wait()` writes the outputs. CUDA streams are
not modelled, and neither are SMs that two groups share.
"""

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from compare.system.facts import has_ended
from torchpar.comm.gloo import make_backend
from torchpar.private import storage_id

BACKEND = "nccl_like"
LATE_S = 0.001
"""A future, on which DDP waits, is complete so much later than its data arrives."""
Tensors = Sequence[torch.Tensor]
PythonGroup: Any = dist.ProcessGroup
"""Its methods take what `torch.distributed` and C++ give: other types than PyTorch declares."""


class OnHost:
    """Tensors that a GPU run has in the memory of the host, while this is entered.

    They are made by `Tensor.cpu()`, or come inside of an object. The place is a
    property of the storage: views of such a tensor are on the host, results of operators are not.
    """

    def __init__(self) -> None:
        self._storages: dict[int, weakref.ref] = {}
        self._patches = ExitStack()

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return storage_id(tensor.untyped_storage()) in self._storages

    def enter(self) -> None:
        """Begin to note such tensors."""
        load = torch.storage._load_from_bytes

        def copy_to_host(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
            copy = tensor.clone()
            self._note(copy.untyped_storage())
            return copy

        @wraps(load)  # pickle finds it by its name
        def unpickle(data: bytes) -> Any:
            storage = load(data)
            self._note(storage._untyped_storage)
            return storage

        for holder, name, replaced in (
            (torch.Tensor, "cpu", copy_to_host),
            (torch.storage, "_load_from_bytes", unpickle),
            (dist, "batch_isend_irecv", _batch_isend_irecv),
        ):
            self._patches.enter_context(patch.object(holder, name, replaced))

    def leave(self) -> None:
        """Stop, and forget all tensors."""
        self._patches.close()
        self._storages.clear()

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage_id(storage)
        self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None))


on_host = OnHost()


class Call(dist.Work):
    """A call under way. `run` makes the results, one for each of `outputs`, from copies of the inputs."""

    def __init__(self, group: "NcclLike", name: str, inputs: Tensors, outputs: Tensors, run: Callable):
        super().__init__()
        self.group, self.name, self.outputs, self._run = group, name, outputs, run
        self.tensors = [*inputs, *outputs]
        for tensor in self.tensors:
            if tensor in on_host:
                raise RuntimeError(f"{name}: No backend type associated with device type cpu")
            if not tensor.is_contiguous():
                raise ValueError(f"{name}: Tensors must be contiguous")
        with torch.no_grad():
            self._copies = [tensor.detach().clone() for tensor in inputs]
            for tensor in outputs:
                _spoil(tensor.detach())
            self._before = [tensor.detach().clone() for tensor in self.tensors]
        self._arrived, self._error, self._is_finished = threading.Event(), None, False
        self._futures: list[torch.futures.Future] = []
        group.calls.put(self)

    def carry_out(self) -> None:
        """Move the data. The group's thread calls this."""
        try:
            with torch.no_grad():
                self._results = self._run(*self._copies)
        except Exception as error:
            self._error = error
        self._arrived.set()
        for future in self._futures:
            self._complete(future)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the data, check all tensors, and write the outputs. Raises RuntimeError: a violation."""
        self._arrived.wait()
        if self._error:
            raise self._error
        if not self._is_finished:
            self._is_finished = True
            self.group.check_peers(self.name)
            for tensor, before in zip(self.tensors, self._before, strict=True):
                what = f"{self.name} of a tensor {tuple(tensor.shape)}, which"
                if tensor.untyped_storage().nbytes() < before.nbytes:
                    raise RuntimeError(f"{what} was freed before wait()")
                if not _same_bits(tensor.detach(), before):
                    raise RuntimeError(f"{what} was written to before wait()")
            with torch.no_grad():
                for output, result in zip(self.outputs, self._results, strict=True):
                    output.detach().copy_(result.view_as(output))
        return True

    def is_completed(self) -> bool:
        """True once the data has arrived."""
        return self._arrived.is_set()

    def get_future(self) -> torch.futures.Future:
        """A future of the outputs, as DDP uses it."""
        future = torch.futures.Future()
        self._futures.append(future)
        if self._arrived.is_set():
            self._complete(future)
        return future

    def _complete(self, future: torch.futures.Future) -> None:
        if not future.done():
            time.sleep(LATE_S)
            try:
                self.wait()
                future.set_result(list(self.outputs))
            except Exception as error:
                future.set_exception(error)


class NcclLike(PythonGroup):
    """One communicator. The methods are called by `torch.distributed`, under the names of 2.11 and 2.13."""

    count = 0
    """Groups of this process that exist."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self.calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self.batch: list[tuple[Tensors, Tensors, Callable]] | None = None
        self._store, self._rank, self._size = store, rank, size
        self._gloo: Any = make_backend(store, rank, size, timeout)
        store.set(f"process/{rank}", str(os.getpid()))
        self.peers = {r: int(store.get(f"process/{r}")) for r in range(size) if r != rank}
        if not NcclLike.count:
            on_host.enter()
        NcclLike.count += 1
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        torch.set_num_threads(1)
        while True:
            self.calls.get().carry_out()

    def check_peers(self, name: str) -> None:
        """Raises DistBackendError: a rank exited, and did not destroy the group before."""
        for rank, process in self.peers.items():
            if has_ended(process) and not self._store.check([f"left/{rank}"]):
                raise dist.DistBackendError(
                    f"{name}: remote process exited: rank {rank} did not call destroy_process_group"
                )

    def shutdown(self) -> None:
        """Finish all calls, and wait until all ranks have."""
        self.barrier().wait()
        self._store.set(f"left/{self._rank}", "")
        NcclLike.count -= 1
        if not NcclLike.count:
            on_host.leave()

    def abort(self) -> None:
        """Nothing: the process ends."""

    def _start(
        self, name: str, inputs: Tensors, outputs: Tensors, run: Callable, *, is_even: bool = True
    ) -> Call:
        """Start a collective. If it `is_even`, all ranks give as many elements."""
        sizes = [tensor.numel() for tensor in inputs] if is_even else ["rows"]
        header = f"{name} of {', '.join(map(str, sizes))}"[:64].ljust(64)

        def checked(*copies: torch.Tensor) -> Sequence[torch.Tensor]:
            mine = torch.tensor(list(header.encode()), dtype=torch.uint8)
            headers = [bytes(row.tolist()).decode() for row in self._gather(mine)]
            for rank, theirs in enumerate(headers):
                if theirs != header:
                    said = f"rank {self._rank} calls {header.strip()}, rank {rank} calls {theirs.strip()}"
                    raise RuntimeError(f"the order of the calls differs: {said}")
            return run(*copies)

        return Call(self, name, inputs, outputs, checked)

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(tensor) for _ in range(self._size)]
        self._gloo.allgather([rows], [tensor]).wait()
        return rows

    def _sum(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        is_mean = op == dist.ReduceOp.AVG
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if is_mean else op
        self._gloo.allreduce([tensor], options).wait()
        return tensor.div_(self._size) if is_mean else tensor

    # Collectives. In coalesced ones each tensor is a call.

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Call:
        return self.allreduce_coalesced(tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Call:
        op = opts.reduceOp if opts else dist.ReduceOp.SUM
        return self._start("all_reduce", tensors, tensors, lambda *xs: [self._sum(x, op) for x in xs])

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Call:
        def run(x: torch.Tensor) -> Tensors:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = opts.rootRank if opts else 0, 0
            self._gloo.broadcast([x], options).wait()
            return [x]

        return self._start("broadcast", tensors, tensors, run)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Call:
        return self._start("all_gather", inputs, outputs[0], self._gather)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Call:
        self._check_equal(inputs, outputs)
        return self._start(
            "all_gather", inputs, outputs, lambda *xs: [torch.stack(self._gather(x)) for x in xs]
        )

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Call:
        return self.all_gather_single_coalesced([output], [x], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Call:
        self._check_equal(outputs, inputs)
        op = opts.reduceOp if opts else dist.ReduceOp.SUM

        def run(*xs: torch.Tensor) -> Tensors:
            return [self._sum(x, op).view(self._size, -1)[self._rank] for x in xs]

        return self._start("reduce_scatter", inputs, outputs, run)

    def reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Call:
        return self.reduce_scatter_single_coalesced([output], [x], opts)

    def all_to_all_single(
        self, output: torch.Tensor, x: torch.Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> Call:
        def run(x: torch.Tensor) -> Tensors:
            arrived = torch.empty_like(output)
            self._gloo.alltoall_base(arrived, x, received, sent, dist.AllToAllOptions()).wait()
            return [arrived]

        return self._start("all_to_all", [x], [output], run, is_even=not received)

    def barrier(self, opts: Any = None) -> Call:
        return self._start("barrier", [], [], lambda: [self._sum(torch.zeros(1))][:0])

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Messages

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> Call | None:
        return self._message("send", tensors, [], lambda x: self._gloo.send([x], rank, tag))

    def recv(self, tensors: Tensors, rank: int, tag: int = 0) -> Call | None:
        return self._message("receive", [], tensors, lambda x: self._gloo.recv([x], rank, tag))

    def _message(self, name: str, sent: Tensors, received: Tensors, start: Callable) -> Call | None:
        if self.batch is not None:
            self.batch.append((sent, received, start))
            return None
        return self.messages(name, [(sent, received, start)])

    def messages(self, name: str, ends: Iterable[tuple[Tensors, Tensors, Callable]]) -> Call:
        """Start several sends and receives together."""
        ends = list(ends)
        sent = [tensor for tensors, _, _ in ends for tensor in tensors]
        received = [tensor for _, tensors, _ in ends for tensor in tensors]

        def run(*copies: torch.Tensor) -> Tensors:
            left, arrived = list(copies), list[torch.Tensor]()
            works = []
            for tensors, received, start in ends:
                if tensors:
                    works.append(start(left.pop(0)))
                else:
                    arrived.append(torch.empty_like(received[0]))
                    works.append(start(arrived[-1]))
            for work in works:
                work.wait()
            return arrived

        return Call(self, name, sent, received, run)

    def _check_equal(self, small: Tensors, large: Tensors) -> None:
        for part, whole in zip(small, large, strict=True):
            if part.numel() * self._size != whole.numel():
                raise ValueError(
                    f"{whole.numel()} elements must be {self._size} times the {part.numel()} of a rank"
                )

    # Properties of a group

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def getBackendName(self) -> str:
        return BACKEND

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, text: str) -> None:
        self._description = text

    def getGroupDesc(self) -> str:
        return self._description


_batch = dist.batch_isend_irecv


def _batch_isend_irecv(operations: list[dist.P2POp]) -> list[dist.Work]:
    """PyTorch's, which batches only for groups written in C++."""
    group = operations[0].group or dist.group.WORLD
    if not isinstance(group, NcclLike):
        return _batch(operations)
    group.batch = ends = []
    try:
        _batch(operations)
    finally:
        group.batch = None
    return [group.messages("batch_isend_irecv", ends)]


def _spoil(tensor: torch.Tensor) -> None:
    """Fill a tensor with NaN, or with the smallest integer."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


dist.Backend.register_backend(BACKEND, NcclLike, devices=["cpu"])
