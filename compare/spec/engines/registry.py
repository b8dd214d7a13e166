"""The two sides, their engines and peers.

A peer trains the same experiment with its own loop, as its users would write it, and writes the same record.
It runs only if named.
"""

from msgspec.structs import replace

from compare.spec.axes import SHARDED_FROM
from compare.spec.engines.engine import Engine, Layouts, Side
from compare.spec.experiment import Layout

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
CONTEXTS = ("allgather", "ring", "ulysses")


def _one_device(layout: Layout) -> str:
    if layout.devices > 1:
        return f"it trains on one device, and the layout has {layout.devices}: give --preset single"
    return ""


def _one_device_without_remat(layout: Layout) -> str:
    if layout.remat in ("dots", "full"):
        return f"it recomputes nothing in backward (layout.remat = {layout.remat}): choose none or auto"
    return _one_device(layout)


TORCH_PEERS = (
    Engine(
        name="nanogpt-loop",
        folder="peers.nanogpt_loop",
        gradient_sync=("none",),
        decides="one device: a plain loop in nanoGPT's style, on PyTorch's own threads",
        layouts=Layouts(compiles=("aot_eager", "inductor"), rejects=_one_device_without_remat),
        is_peer=True,
    ),
)
JAX_PEERS = (
    Engine(
        name="plain-jit",
        folder="peers.plain_jit",
        gradient_sync=("none",),
        decides="one device: jax.jit of value_and_grad and optax, on a mesh of one device",
        layouts=Layouts(rejects=_one_device),
        is_peer=True,
    ),
)

BY_AUTODIFF = "autodiff runs all backward passes after all forward passes"
NO_RING = (
    "a ring is an order in time (which block is multiplied while the next one is sent), and shardings "
    "describe places only"
)


def _ring_in_ticks(layout: Layout) -> str:
    if layout.cp > 1 and layout.pp > 1 and layout.context == "ring":
        return (
            f"layout.context = ring with layout.pp = {layout.pp}: some stages are idle in a tick, and XLA's "
            "permute waits for all devices of the mesh, or pairs messages of different ticks: use allgather "
            "or ulysses"
        )
    return ""


JAX_ENGINES = (
    Engine(
        name="jax-compiler",
        folder="compiler",
        decides="XLA: jit with Mesh and NamedSharding",
        checks="none: XLA inserts each sum that the shardings of the arrays need, without a message",
        gradient_sync=("xla",),
        sends_by="xla",
        layouts=Layouts(
            schedules=("gpipe", "interleaved"),
            contexts=("allgather", "ulysses"),
            offload=True,
            reasons={"context": NO_RING, "schedule": f"under jit {BY_AUTODIFF}"},
        ),
    ),
    Engine(
        name="jax-explicit",
        folder="explicit",
        decides="types: an array's sharding is part of its type, and each cast names a message",
        checks="its types: a contraction over a split dim is a ShardingTypeError when the step is traced, "
        "unless the code names the sharding of the result",
        gradient_sync=("once",),
        sends_by="types",
        layouts=Layouts(
            schedules=("gpipe", "interleaved"),
            contexts=("allgather", "ulysses"),
            offload=True,
            reasons={"context": NO_RING, "schedule": BY_AUTODIFF},
        ),
    ),
    Engine(
        name="jax-manual",
        folder="manual",
        decides="we do: shard_map and lax collectives",
        checks="JAX's check_vma, in part: it follows the axes along which a value varies, and rejects a "
        "result that is declared equal on all devices without proof",
        gradient_sync=("naive", "flat", "bucketed"),
        layouts=Layouts(
            schedules=("gpipe", "1f1b", "interleaved"),
            contexts=CONTEXTS,
            offload=True,
            reasons={"schedule": "devices in lock-step do a whole backward in one tick, not two halves"},
            rejects=_ring_in_ticks,
        ),
        pads_rows=True,
    ),
)
JAX = Side(
    name="jaxpar",
    python_flag="jax_python",
    packages=("jax", "flax", "optax"),
    converts=("orbax",),
    # Huge pages: XLA allocates and frees its buffers every step, and page faults dominated (measured
    # 44,000 -> 360 a step, 1.25 times faster). glibc reads this when the process starts.
    environment={"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    environment_on_cpu={"JAX_PLATFORMS": "cpu"},
    peers=JAX_PEERS,
    engines=tuple(replace(engine, is_jax=True, cuts="dims", gathers_ends="step") for engine in JAX_ENGINES),
)


def _rejected_by_blocks(layout: Layout) -> str:
    """The limits of a compiled block, whose backward is one program."""
    if layout.compile != "block":
        return ""
    if layout.pp > 1 and layout.schedule == "zero_bubble":
        return (
            "layout.compile = block with layout.schedule = zero_bubble: the backward of a compiled block is "
            "one program, which no schedule divides: choose another schedule or layout.compile = none"
        )
    if layout.cp > 1 and layout.context == "ring":
        return (
            "layout.compile = block with layout.context = ring: a compiled block waits for each message, so "
            "no hop would hide behind a product: choose allgather or ulysses, or layout.compile = none"
        )
    return ""


def _rejected_by_wrappers(layout: Layout) -> str:
    """The limits of PyTorch 2.13's DDP, ZeRO-1, FSDP2 and torch.distributed.pipelining together, as
    tested."""
    if layout.tp > 1 and layout.zero == 1:
        return (
            f"layout.zero = 1 with layout.tp = {layout.tp}: ZeRO-1 is ZeroRedundancyOptimizer with "
            "DistributedDataParallel, which takes no DTensor: choose layout.zero = 2 or 3"
        )
    if layout.ep > 1 and layout.zero < 2:
        return (
            f"layout.ep = {layout.ep} with layout.zero = {layout.zero}: DDP reduces a whole module over one "
            "group, and experts have another group: choose layout.zero = 2 or 3"
        )
    if layout.ep > 1 and layout.tp > 1:
        return (
            f"layout.ep = {layout.ep} with layout.tp = {layout.tp}: fully_shard needs tensor parallelism's "
            "shards on the mesh of its own ranks, and experts have another mesh: leave one out"
        )
    if layout.pp == 1 or layout.schedule != "zero_bubble":
        return ""
    if why := _rejected_by_blocks(layout):
        return why
    if layout.data_parallel * layout.cp > 1:
        return (
            "layout.schedule = zero_bubble splits backward in two, which DDP reduces wrongly without an "
            "error, and FSDP2 not at all: choose another schedule"
        )
    if layout.tp > 1:
        return "layout.schedule = zero_bubble cannot split the backward of a DTensor: choose another schedule"
    if layout.remat == "dots":
        return (
            "layout.schedule = zero_bubble traverses the graph twice, which selective recomputation forbids: "
            "choose layout.remat = none or full"
        )
    return ""


def _rejected_by_placements(layout: Layout) -> str:
    """The limits of PyTorch 2.13's torch.compile, as tested, and of one mesh for all parameters."""
    if layout.ep > 1 and layout.ep < layout.dp_shard:
        return (
            f"layout.ep = {layout.ep} with layout.dp_shard = {layout.dp_shard}: ZeRO's shards are placed "
            f"over both axes as one, and experts over ep alone, on another mesh: set them equal"
        )
    if layout.compile == "block":
        return "layout.compile = block: DTensor plans the whole step: choose aot_eager or inductor"
    if layout.compile in ("aot_eager", "inductor") and layout.remat == "full":
        return (
            f"layout.compile = {layout.compile} with layout.remat = full: torch.compile cannot recompute "
            f"whole layers here: choose layout.remat = dots or layout.compile = none"
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
            checks="spmd_types, in the tests: it follows replicated, invariant, varying and partial values "
            "through forward, in one process without ranks; a missing f or g is an error with its line",
            gradient_sync=("naive", "flat", "overlapped", "bucketed"),
            layouts=Layouts(
                schedules=SCHEDULES,
                contexts=CONTEXTS,
                offload=True,
                compiles=("block",),
                rejects=_rejected_by_blocks,
            ),
            counts_own_calls=True,
        ),
        Engine(
            name="torch-library",
            folder="library",
            decides="PyTorch: DDP, ZeroRedundancyOptimizer, FSDP2, DTensor, pipelining",
            checks="none before it runs: a sum that no wrapper makes, such as a norm's gradient "
            "under sequence parallelism, shows in the ladder only",
            gradient_sync=("ddp",),
            sends_by="pytorch",
            layouts=Layouts(
                schedules=SCHEDULES,
                contexts=("allgather",),
                compiles=("block",),
                reasons={
                    "context": "PyTorch's ring, the experimental context_parallel, needs one of three CUDA "
                    "kernels, none of them in float64, and PyTorch exchanges no heads",
                    "offload": "PyTorch moves moments to the host only together with parameters, gradients "
                    "and update (FSDP2's CPUOffloadPolicy): leave torch-library out of --engines",
                },
                rejects=_rejected_by_wrappers,
            ),
            # fully_shard gathers parameters for the step; between two steps they are always split. Its root,
            # the ends of the model, stays gathered from forward to backward.
            sharded_from=SHARDED_FROM | {"parameters": 2},
            cuts="rows",
            gathers_ends="pass",
        ),
        Engine(
            name="torch-compiler",
            folder="compiler",
            decides="DTensor: placements on a DeviceMesh",
            checks="none: DTensor makes each sum; an operator without a rule is an error when it runs",
            gradient_sync=("dtensor",),
            sends_by="dtensor",
            layouts=Layouts(
                contexts=("allgather",),
                compiles=("aot_eager", "inductor"),
                reasons={
                    "context": "DTensor has no placement for keys in transit, and on a CPU it exchanges "
                    "heads for positions with a gather",
                    "schedule": "DTensor has no shift along a split dim: to send to the next stage it "
                    "gathers all stages: set layout.pp = 1",
                    "offload": "moments are DTensors, which live on the device of their mesh: leave "
                    "torch-compiler out of --engines",
                },
                rejects=_rejected_by_placements,
            ),
            # Gradients accumulate whole, and are scattered after the last pass.
            sharded_from=SHARDED_FROM | {"gradients": 1},
            cuts="rows",
            gathers_ends="step",
        ),
    ),
)

SIDES = {side.name: side for side in (JAX, TORCH)}
STUDIED: dict[str, Engine] = {
    engine.name: replace(engine, side=name) for name, side in SIDES.items() for engine in side.engines
}
"""The six engines, which commands run by default."""
PEERS: dict[str, Engine] = {
    engine.name: replace(engine, side=name) for name, side in SIDES.items() for engine in side.peers
}
"""Engines of other projects, which run only if named."""
ENGINES = STUDIED | PEERS
REFERENCE = "torch-manual"
"""The engine of references: on one device it is the plain module, without collectives."""


def side_of(engine: str) -> Side:
    """The side that runs an engine."""
    return SIDES[ENGINES[engine].side]
