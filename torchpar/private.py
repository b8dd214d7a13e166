"""Names of PyTorch that are not public, as of torch 2.13. An upgrade of PyTorch checks this file.

The documentation of PyTorch describes the wrapper subclasses, `TorchDispatchMode` and `tree_leaves`.
`measure.timeline` imports `_PipelineSchedule` itself, since the import takes a second.
"""

import datetime
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.testing._internal.distributed.fake_pg  # registers a backend
from torch._C import _distributed_c10d
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.distributed._functional_collectives import all_to_all_single_autograd as all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store, _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass_type as is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils.checkpoint import SAC_IGNORED_OPS


def in_backward() -> bool:
    """True while autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def next_node_number() -> int:
    """The number of the next node that autograd records in this thread. Numbers only grow."""
    return _get_sequence_nr()


def running_node_number() -> int | None:
    """The number of the node whose backward runs in this thread; None outside of a backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def storage_id(storage: torch.UntypedStorage) -> int:
    """A number that all Python objects of one storage share."""
    return storage._cdata


def process_group_of(name: Any) -> ProcessGroup:
    """The process group with a name, as functional collectives refer to it."""
    return _resolve_process_group(name)


def default_store() -> Any:
    """The store of the default process group."""
    return _get_default_store()


def checked(backend: Any, helper: Any) -> Any:
    """A backend that compares the collective and the shapes of all ranks before each call.

    `helper` is a gloo backend of the same ranks.
    """
    return _distributed_c10d._ProcessGroupWrapper(backend, helper)


def flatten_mesh(devices: DeviceMesh, names: Sequence[str], name: str) -> None:
    """Add one dimension `name` to a mesh, over several of its dimensions."""
    devices[tuple(names)]._flatten(name)


def flight_record() -> dict[str, Any]:
    """The record of this process's collectives by PyTorch's flight recorder; {} without a recorder."""
    of_nccl = getattr(_distributed_c10d, "_dump_nccl_trace_json", None)
    dump = of_nccl or getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    return json.loads(dump()) if dump else {}


def gloo_options(*, devices: list[Any], timeout: datetime.timedelta, workers: int) -> Any:
    """Options of a gloo group, which `init_process_group` does not accept."""
    options = ProcessGroupGloo._Options()  # ty: ignore[missing-attribute]
    options._devices, options._timeout, options._threads = devices, timeout, workers
    return options


def ignore_profiler_marks_in_remat() -> None:
    """Let a recomputed block run other marks of the profiler than its forward did.

    Selective checkpoint counts the operators of a block. FSDP2 marks a unit inside of a block only once.
    """
    marks = torch.ops.profiler
    SAC_IGNORED_OPS.update(
        (marks._record_function_enter_new.default, marks._record_function_exit._RecordFunction)
    )
