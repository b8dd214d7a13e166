"""Settings, groups and messages that differ on NCCL. Its calls are replaced: nothing here needs a GPU."""

import datetime
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from compare.contract.timing import Stopwatch
from compare.setup.fitting import require_free_queues
from compare.spec.axes import PP, TP
from compare.spec.experiment import Experiment, ExperimentError, Layout, edited
from tests.support.ranks import CPU, RANKS, on_ranks
from tests.support.torch_runs import trained
from torchpar import launch
from torchpar.comm import process_groups
from torchpar.comm.gloo import is_consequence
from torchpar.comm.mesh import make_mesh
from torchpar.dtensors import make_device_mesh
from torchpar.launch import Rank
from torchpar.measure.memory import MemorySink


@contextmanager
def replaced(holder: object, **members: object) -> Generator[None]:
    with ExitStack() as stack:
        for name, member in members.items():
            stack.enter_context(patch.object(holder, name, member))
        yield


def test_an_axis_is_one_split() -> None:
    """A new group for each line would be a split for each, in which all ranks take part."""
    splits = []

    def split_group(*, split_ranks: list[list[int]], timeout: datetime.timedelta) -> object:
        splits.append((split_ranks, timeout.total_seconds()))
        return SimpleNamespace(group_name=str(split_ranks))

    with replaced(
        process_groups.dist,
        get_backend=lambda: "nccl",
        split_group=split_group,
        new_subgroups_by_enumeration=None,
    ):
        timeout = process_groups.patience(Rank(rank=5, world_size=8, local_rank=5, timeout_s=1000.0))
        world = patch.object(process_groups, "world_group", lambda: SimpleNamespace(group_name="0"))
        with world:
            make_mesh(Layout(dp_replicate=2, pp=2, tp=2), rank=5, device=CPU, timeout=timeout)
    assert splits == [
        ([[0, 4], [1, 5], [2, 6], [3, 7]], 1030.0),
        ([[0, 2], [1, 3], [4, 6], [5, 7]], 1030.0),
        ([[0, 1], [2, 3], [4, 5], [6, 7]], 1030.0),
    ]


def test_nccl_has_its_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in process_groups.NCCL_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    begun = []
    with (
        replaced(process_groups.dist, init_process_group=lambda backend, **options: begun.append(backend)),
        patch.object(torch.cuda, "set_device"),
    ):
        rank = Rank(rank=0, world_size=2, local_rank=0, rendezvous=tmp_path / "rendezvous")
        process_groups.join_ranks(rank, "gpu")
    assert begun == ["nccl"]
    assert process_groups.os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"
    assert process_groups.os.environ["TORCH_FR_BUFFER_SIZE"] == "7"  # the user's


@on_ranks
def test_group_of_one_rank_has_no_communicator(rank: int) -> None:
    """A communicator of NCCL for one rank takes 512 MiB of the GPU."""
    mesh = make_mesh(Layout(tp=RANKS), rank=rank, device=CPU)
    assert dist.get_backend(make_device_mesh(mesh, [PP, TP])[PP].get_group()) == "fake"
    with patch.object(dist, "new_group", side_effect=AssertionError("not needed")):
        make_device_mesh(mesh, [TP])


CAUSES = (
    dist.DistBackendError("ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on device 1000"),
    dist.DistBackendError("ncclUnhandledCudaError: Call to CUDA function failed. Last error: out of memory"),
    RuntimeError("a timeout of the user's own"),
)
CONSEQUENCES = (
    dist.DistBackendError("ncclRemoteError: remote process exited or there was a network error"),
    dist.DistBackendError("NCCL communicator was aborted on rank 1."),
    dist.DistStoreError("wait timeout after 600000ms, keys: /0"),
    dist.DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed."),
    RuntimeError("Connection closed by peer [127.0.0.1]:29500"),
)


def test_cause_is_no_consequence() -> None:
    assert not any(map(is_consequence, CAUSES))
    assert all(map(is_consequence, CONSEQUENCES))


def test_collectives_begun_are_of_nccl() -> None:
    def call(group: str, number: int, state: str, *, name: str = "nccl:all_reduce", is_p2p: bool = False):
        return {
            "process_group": [group, "undefined"],
            "collective_seq_id": number,
            "state": state,
            "profiling_name": name,
            "is_p2p": is_p2p,
        }

    entries = [
        call("0", 1, "completed"),
        call("0", 2, "started"),
        call("0", 3, "scheduled"),
        call("1", 1, "scheduled"),
        call("0", 9, "started", is_p2p=True),
        call("2", 1, "completed", name="gloo:all_reduce"),
    ]
    with patch.object(launch, "flight_record", lambda: {"entries": entries}):
        assert launch.collectives_begun() == {"0": 2, "1": 0}


def test_flight_recorder_is_read() -> None:
    assert "version" in launch.flight_record()
    assert launch.collectives_begun() == {}


def test_peak_of_the_allocator_is_of_the_step() -> None:
    """Evaluations and gathers for the record come after the step, and have higher peaks."""
    cuda = SimpleNamespace(peak=1000, free=500)
    with replaced(
        torch.cuda,
        reset_peak_memory_stats=lambda: setattr(cuda, "peak", 100),
        max_memory_allocated=lambda: cuda.peak,
        mem_get_info=lambda: (cuda.free, 10_000),
        memory_reserved=lambda: 8_000,
    ):
        sink = MemorySink({}, device="cuda")
        sink.watch = SimpleNamespace(in_backward=False, is_updating=False, module="", calls=[])
        with sink.step():
            cuda.peak = 200
        cuda.peak, cuda.free = 9_000, 0
        memory = sink.result()
    assert (memory.allocator_peak, memory.outside_allocator) == (200, 1_500)


def test_host_waits_only_for_recorded_gradients(tiny: Experiment, tmp_path: Path) -> None:
    """The clock waits for the device at both ends of a step, and around what is recorded."""
    reads, longer = [], edited(tiny, {"train": {"max_iters": 5}})
    usual = Stopwatch.__enter__
    with patch.object(Stopwatch, "__enter__", lambda clock: reads.append(None) or usual(clock)):
        record = trained(tmp_path / "run", longer, ladder=True)
    watched = sum(step.instrumented for step in record.steps)
    assert len(reads) == 5 + 2 + watched  # gradients of two steps are recorded
    assert watched == 1


def test_products_in_16_bits_add_up_in_float32(tiny: Experiment, tmp_path: Path) -> None:
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = True
    trained(tmp_path / "run", tiny)
    assert not products.allow_bf16_reduced_precision_reduction
    assert not products.allow_fp16_reduced_precision_reduction


def test_pipeline_needs_several_queues() -> None:
    for layout, environment in ((Layout(tp=2), {"CUDA_LAUNCH_BLOCKING": "1"}), (Layout(pp=2), {})):
        require_free_queues("torch-manual", layout, environment)
    with pytest.raises(
        ExperimentError, match=r"CUDA_LAUNCH_BLOCKING = 1 with layout.pp = 2: .* unset CUDA_LAUNCH"
    ):
        require_free_queues("torch-manual", Layout(pp=2), {"CUDA_LAUNCH_BLOCKING": "1"})
    require_free_queues("jax-manual", Layout(pp=2), {"CUDA_LAUNCH_BLOCKING": "1"})
