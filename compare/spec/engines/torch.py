"""The side torchpar and its engines: torch-manual, torch-library and torch-compiler; peers are in `peers`."""

from compare.spec.axes import SHARDED_FROM
from compare.spec.engines.engine import (
    ALL_ABILITIES,
    LOSS_SCALED,
    Engine,
    Holds,
    Layouts,
    Observed,
    Side,
)
from compare.spec.engines.peers import TORCH_PEERS
from compare.spec.experiment import Layout

OBSERVED = Observed(timeline=True, work=True, silent_twin=True)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
FSDP2 = "fsdp2"
"""What torch-library reduces gradients by under tensor parallelism: DDP knows no DTensor."""


def _not_in_pytorch(layout: Layout) -> str:
    """Limits of torch.distributed.pipelining (2.13) beside a schedule, found out by running it."""
    if layout.pp == 1 or layout.schedule != "zero_bubble":
        return ""
    if layout.data_parallel > 1:
        return (
            "layout.schedule = zero_bubble has backward in two halves, which DDP reduces wrongly without a "
            "word, and FSDP2 not at all: choose another schedule"
        )
    if layout.tp > 1:
        return "layout.schedule = zero_bubble cannot halve the backward of a DTensor: choose another schedule"
    if layout.remat == "dots":
        return (
            "layout.schedule = zero_bubble goes through the graph twice, which selective recomputation does "
            "not allow: choose layout.remat = none or full"
        )
    return ""


def _not_compiled(layout: Layout) -> str:
    """Limits of torch.compile over DTensors (2.13), found out by running it."""
    if (
        layout.compile in ("aot_eager", "merged", "inductor")
        and layout.remat == "full"
        and layout.devices > 1
    ):
        return (
            f"layout.compile = {layout.compile} with layout.remat = full: backward needs the mesh to place "
            "what it computes again, and torch.compile saves nothing but tensors: choose layout.remat = dots "
            "or layout.compile = none"
        )
    return ""


TORCH = Side(
    name="torchpar",
    python_flag="torch_python",
    one_process_a_device=True,
    packages=("torch",),
    converts=("nanogpt",),
    environment_on_cpu={"DS_ACCELERATOR": "cpu"},  # of DeepSpeed, which would take a GPU that it finds
    peers=TORCH_PEERS,
    engines=(
        Engine(
            name="torch-manual",
            side="torchpar",
            folder="manual",
            decides="we do: torch.distributed collectives",
            checks="spmd_types, in the tests: it follows what is replicated, invariant, varying or partial "
            "through forward, on one process without ranks; a forgotten f or g is an error with its line",
            gradient_sync=("naive", "flat", "overlapped", "bucketed"),
            is_reference=True,  # on one device: the plain module, no container, no collective
            layouts=Layouts(zero=(1, 2, 3), tp=True, offload=True, schedules=SCHEDULES),
            precisions=LOSS_SCALED,
            can=ALL_ABILITIES,
            observed=Observed(timeline=True, work=True, silent_twin=True, counts_own_calls=True),
            # Logits, log_softmax's result, its gradient, the logits'; or logits, probabilities, gradient.
            holds=Holds(residuals="autograd", logits=4, logits_with_tp=3, logits_with_pp=3),
        ),
        Engine(
            name="torch-library",
            side="torchpar",
            folder="library",
            decides="PyTorch: DDP, ZeroRedundancyOptimizer, FSDP2, DTensor, pipelining",
            checks="nobody before it runs: what no wrapper is told of, such as a norm's gradient under "
            "sequence parallelism, shows in the ladder alone",
            gradient_sync=("ddp",),
            sends_by="pytorch",
            layouts=Layouts(
                zero=(1, 2, 3),
                tp=True,
                no_zero_with_tp={
                    1: "torch-library's ZeRO-1 is ZeroRedundancyOptimizer beside DistributedDataParallel, "
                    "which takes no DTensor: choose layout.zero = 2 or 3"
                },
                gradient_sync_with_tp=FSDP2,
                schedules=SCHEDULES,
                offload="PyTorch moves moments to the host only along with parameters, gradients and update "
                "(FSDP2's CPUOffloadPolicy): leave torch-library out of --engines",
                refuses=_not_in_pytorch,
            ),
            precisions=LOSS_SCALED,
            can=ALL_ABILITIES,
            observed=OBSERVED,
            holds=Holds(
                # fully_shard: gathered for the step, and never whole between two
                sharded_from=SHARDED_FROM | {"parameters": 2},
                # loss_parallel: logits, log_softmax's result, the gradient, probabilities and their sum.
                residuals="autograd",
                logits=4,
                logits_with_tp=5,
                logits_with_pp=4,
                buckets=True,
                gathers_ahead=True,
            ),
            impossible_faults={
                "doubled_row_bias": "PyTorch adds the bias, not we",
                "ignored_gradient_sync": "DDP has one way",
                "ignored_offload": "it offloads no moments",
            },
        ),
        Engine(
            name="torch-compiler",
            side="torchpar",
            folder="compiler",
            decides="DTensor: placements on a DeviceMesh",
            checks="nobody: DTensor makes each sum; an operator without a rule is an error where it runs",
            gradient_sync=("dtensor",),
            sends_by="dtensor",
            layouts=Layouts(
                zero=(1, 2, 3),
                tp=True,
                no_other_schedule="DTensor has no shift along a dim that is split: to tell the next stage it "
                "gathers all of them, on a CPU even between two placements: set layout.pp = 1",
                offload="moments are DTensors, which live on the device of their mesh: leave torch-compiler "
                "out of --engines",
                refuses=_not_compiled,
            ),
            precisions=LOSS_SCALED,
            can=ALL_ABILITIES,
            observed=OBSERVED,
            # Gradients accumulate whole, and are scattered when the last pass is done.
            holds=Holds(sharded_from=SHARDED_FROM | {"gradients": 1}),
            impossible_faults={
                "doubled_row_bias": "DTensor makes every sum that a product over split dims needs",
                **dict.fromkeys(
                    ("overwritten_microbatch", "stale_tied_copy", "ignored_schedule"), "it has no pipeline"
                ),
                **dict.fromkeys(
                    ("ignored_gradient_sync", "ignored_bucket_mb"), "each gradient is reduced by itself"
                ),
                "ignored_offload": "it offloads no moments",
            },
        ),
    ),
)
