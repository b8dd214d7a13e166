"""The two sides and their engines, declared: every flag, table, count and refusal comes from here.

A peer trains the same experiment with a loop of its own, as its users would write it, and leaves the same
record. It runs when it is named, and refuses by name what it cannot express.
"""

from msgspec.structs import replace

from compare.spec.axes import SHARDED_FROM
from compare.spec.engines.engine import DTYPES, Engine, Holds, Layouts, Sends, Side
from compare.spec.experiment import Layout


def _one_device(layout: Layout) -> str:
    if layout.devices > 1:
        return f"it trains on one device, and the layout has {layout.devices}: give --preset single"
    return ""


def _nothing_recomputed(layout: Layout) -> str:
    if layout.remat in ("dots", "full"):
        return f"it recomputes nothing in backward (layout.remat = {layout.remat}): choose none or auto"
    return ""


TORCH_PEERS = (
    Engine(
        name="nanogpt-loop",
        folder="peers.nanogpt_loop",
        gradient_sync=("none",),
        decides="one device: a plain loop in nanoGPT's style, on PyTorch's own threads",
        layouts=Layouts(refuses=lambda layout: _one_device(layout) or _nothing_recomputed(layout)),
        is_peer=True,
        dtypes=DTYPES[:3],
    ),
)
JAX_PEERS = (
    Engine(
        name="plain-jit",
        folder="peers.plain_jit",
        gradient_sync=("none",),
        decides="one device: jax.jit of value_and_grad and optax, without mesh or sharding",
        layouts=Layouts(refuses=_one_device),
        is_peer=True,
        dtypes=DTYPES[:3],
    ),
)


BY_AUTODIFF = "autodiff orders the backward passes, after all forward ones: choose one of these"


NO_RING = (
    "a ring is an order in time, which block is multiplied while the next is on its way, and the place of an "
    "array says nothing of it: choose one of these"
)


def _ring_in_ticks(layout: Layout) -> str:
    if layout.cp > 1 and layout.pp > 1 and layout.context == "ring":
        return (
            f"layout.context = ring with layout.pp = {layout.pp}: at a tick some stages are idle, and XLA's "
            "permute waits for all devices of the mesh, or pairs what belongs to different ticks: use "
            "allgather or ulysses"
        )
    return ""


JAX_LAYOUTS = Layouts(zero=(1, 2, 3), tp=True, ep=True, offload=True, schedules=("gpipe", "interleaved"))
JAX_ENGINES = (
    Engine(
        name="jax-compiler",
        folder="compiler",
        decides="XLA: jit with Mesh and NamedSharding",
        checks="nobody: XLA makes each sum that the places of the arrays need, and says nothing",
        gradient_sync=("xla",),
        sends_by="xla",
        layouts=replace(
            JAX_LAYOUTS,
            contexts=("allgather", "ulysses"),
            no_other_context=NO_RING,
            no_other_schedule=f"under jit {BY_AUTODIFF}",
        ),
    ),
    Engine(
        name="jax-explicit",
        folder="explicit",
        decides="types: where an array lives is part of it, and each cast says what moves",
        checks="its types: a contraction over a dim that is split is a ShardingTypeError when the step "
        "is traced, until it is said what becomes of the sum",
        gradient_sync=("once",),
        sends_by="types",
        layouts=replace(
            JAX_LAYOUTS,
            contexts=("allgather", "ulysses"),
            no_other_context=NO_RING,
            no_other_schedule=BY_AUTODIFF,
        ),
    ),
    Engine(
        name="jax-manual",
        folder="manual",
        decides="we do: shard_map and lax collectives",
        checks="JAX's check_vma, in part: it follows along which axes a value varies, and refuses a "
        "result that is declared equal on all devices and is not known to be",
        gradient_sync=("naive", "flat", "bucketed"),
        layouts=replace(
            JAX_LAYOUTS,
            contexts=("allgather", "ring", "ulysses"),
            refuses=_ring_in_ticks,
            schedules=("gpipe", "1f1b", "interleaved"),
            no_other_schedule="devices in lock-step do a backward in one tick, not in halves: choose one "
            "of these",
        ),
    ),
)


JAX = Side(
    name="jaxpar",
    python_flag="jax_python",
    packages=("jax", "flax", "optax"),
    converts=("orbax",),
    # Huge pages: XLA allocates and frees its buffers every step, and page faults dominated (measured
    # 44,000 -> 360 a step, 1.25 times faster). glibc reads this at start, so it must be set here.
    environment={"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    environment_on_cpu={"JAX_PLATFORMS": "cpu"},
    peers=JAX_PEERS,
    engines=tuple(
        replace(
            engine,
            # Each scans over its layers, gathers and scatters by pass, and has gradients as values.
            holds=Holds(ends_on_every_stage=True, residuals="scan", cuts="dims"),
            sends=Sends(
                scatters_each_pass=True,
                gathers_ends="step",
                pads_rows=not engine.sends_by,
                gathers_each_pass_from=3,
            ),
        )
        for engine in JAX_ENGINES
    ),
)


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
CONTEXTS = ("allgather", "ring", "ulysses")
FSDP2 = "fsdp2"
"""What torch-library reduces gradients by under tensor parallelism: DDP knows no DTensor."""


def _not_in_pytorch(layout: Layout) -> str:
    """Limits of PyTorch's wrappers (2.13): DDP, FSDP2, and torch.distributed.pipelining beside a
    schedule, found out by running it."""
    if layout.ep > 1 and layout.zero < 2:
        return (
            f"layout.ep = {layout.ep} with layout.zero = {layout.zero}: DDP reduces all of a module over "
            "one group, and experts have another: choose layout.zero = 2 or 3"
        )
    if layout.ep > 1 and layout.tp > 1:
        return (
            f"layout.ep = {layout.ep} with layout.tp = {layout.tp}: fully_shard wants tensor parallelism's "
            "parts on the mesh of its own ranks, and experts have another than the rest: leave one out"
        )
    if layout.pp == 1 or layout.schedule != "zero_bubble":
        return ""
    if layout.data_parallel * layout.cp > 1:
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


def _not_placed(layout: Layout) -> str:
    """Limits of torch.compile (2.13), found out by running it, and of one mesh for all parameters."""
    if layout.ep > 1 and layout.ep < layout.dp_shard:
        return (
            f"layout.ep = {layout.ep} with layout.dp_shard = {layout.dp_shard}: ZeRO's parts are placed over "
            "both as one axis, and experts over ep alone, on another mesh: set them equal"
        )
    if layout.compile in ("aot_eager", "inductor") and layout.remat == "full":
        return (
            f"layout.compile = {layout.compile} with layout.remat = full: to compute a layer again backward "
            "needs the mesh, and torch.compile saves tensors alone; on one device it saves a random state, "
            "in an operator that nothing can watch: choose layout.remat = dots or layout.compile = none"
        )
    return ""


TORCH = Side(
    name="torchpar",
    python_flag="torch_python",
    one_process_a_device=True,
    packages=("torch",),
    converts=("nanogpt",),
    peers=TORCH_PEERS,
    engines=(
        Engine(
            name="torch-manual",
            folder="manual",
            decides="we do: torch.distributed collectives",
            checks="spmd_types, in the tests: it follows what is replicated, invariant, varying or partial "
            "through forward, on one process without ranks; a forgotten f or g is an error with its line",
            gradient_sync=("naive", "flat", "overlapped", "bucketed"),
            layouts=Layouts(
                zero=(1, 2, 3), tp=True, contexts=CONTEXTS, ep=True, offload=True, schedules=SCHEDULES
            ),
            counts_own_calls=True,
        ),
        Engine(
            name="torch-library",
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
                contexts=("allgather",),
                ep=True,
                no_other_context="PyTorch's ring, the experimental context_parallel, is for three of CUDA's "
                "kernels, none of them for float64; it exchanges no heads: set layout.context = allgather",
                schedules=SCHEDULES,
                offload="PyTorch moves moments to the host only along with parameters, gradients and update "
                "(FSDP2's CPUOffloadPolicy): leave torch-library out of --engines",
                refuses=_not_in_pytorch,
            ),
            # fully_shard: parameters are gathered for the step, and never whole between two.
            holds=Holds(sharded_from=SHARDED_FROM | {"parameters": 2}, cuts="rows"),
            # fully_shard's root, the ends, stays gathered from forward to backward.
            sends=Sends(gathers_ends="pass", gathers_each_pass_from=2),
        ),
        Engine(
            name="torch-compiler",
            folder="compiler",
            decides="DTensor: placements on a DeviceMesh",
            checks="nobody: DTensor makes each sum; an operator without a rule is an error where it runs",
            gradient_sync=("dtensor",),
            sends_by="dtensor",
            layouts=Layouts(
                zero=(1, 2, 3),
                tp=True,
                contexts=("allgather",),
                ep=True,
                no_other_context="DTensor has no placement for keys that pass by, and exchanges heads for "
                "positions by a gather on a CPU: set layout.context = allgather",
                no_other_schedule="DTensor has no shift along a dim that is split: to tell the next stage it "
                "gathers all of them, on a CPU even between two placements: set layout.pp = 1",
                offload="moments are DTensors, which live on the device of their mesh: leave torch-compiler "
                "out of --engines",
                refuses=_not_placed,
            ),
            # Gradients accumulate whole, and are scattered when the last pass is done.
            holds=Holds(sharded_from=SHARDED_FROM | {"gradients": 1}, cuts="rows"),
            sends=Sends(scatters_each_pass=True, gathers_ends="step"),
        ),
    ),
)

SIDES = {side.name: side for side in (JAX, TORCH)}
STUDIED: dict[str, Engine] = {
    engine.name: replace(engine, side=name) for name, side in SIDES.items() for engine in side.engines
}
"""The six engines: a command runs them by default, and tables and counts are of them."""
PEERS: dict[str, Engine] = {
    engine.name: replace(engine, side=name) for name, side in SIDES.items() for engine in side.peers
}
"""Others' ways to train the same, beside ours when they are named."""
ENGINES = STUDIED | PEERS
"""All that can be named."""
REFERENCE = "torch-manual"
"""On one device (the plain module, no collective) it is what all others are held against."""


def side_of(engine: str) -> Side:
    """The side that runs an engine."""
    return SIDES[ENGINES[engine].side]
