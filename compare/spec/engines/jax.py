"""The side jaxpar and its engines: jax-compiler, jax-explicit, jax-manual; its peers are in `peers`."""

from compare.spec.engines.engine import (
    ALL_ABILITIES,
    LOSS_SCALED,
    Engine,
    Holds,
    Layouts,
    Observed,
    Side,
)
from compare.spec.engines.peers import JAX_PEERS

OBSERVED = Observed(
    timeline=True,
    work=True,
    silent_twin="a collective is an operation of XLA's program: to leave it out makes another program",
)
SCANNED = Holds(ends_on_every_stage=True, residuals="scan", logits=2, logits_with_tp=2)
BY_AUTODIFF = "autodiff orders the backward passes, after all forward ones: choose one of these"
NOTHING_TO_CLEAR = {"kept_gradients": "gradients are values of a function: there is nothing to clear"}
SYNC_FAULTS = ("ignored_gradient_sync", "ignored_bucket_mb")
PLACEMENT_FAULTS = (
    "doubled_row_bias",
    "missing_norm_psum",
    "norm_counts_replicas_twice",
    "wrong_optimizer_shard",
    "stale_tied_copy",
    "same_dropout_on_every_rank",
)
SAID_BY_TYPE = "a type says what is whole and what is a part: JAX refuses the mistake when it traces the step"
INSERTED_BY_XLA = (
    "XLA splits every array and inserts every reduction: there is none that a person could get wrong"
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
    before_first_step="setting up and compiling",  # the record is opened before that
    peers=JAX_PEERS,
    engines=(
        Engine(
            name="jax-compiler",
            side="jaxpar",
            folder="compiler",
            decides="XLA: jit with Mesh and NamedSharding",
            checks="nobody: XLA makes each sum that the places of the arrays need, and says nothing",
            gradient_sync=("xla",),
            sends_by="xla",
            layouts=Layouts(
                zero=(1, 2, 3),
                tp=True,
                offload=True,
                schedules=("gpipe", "interleaved"),
                no_other_schedule=f"under jit {BY_AUTODIFF}",
            ),
            precisions=LOSS_SCALED,
            can=ALL_ABILITIES,
            observed=OBSERVED,
            holds=SCANNED,
            impossible_faults={
                **NOTHING_TO_CLEAR,
                "ignored_schedule": "it has one schedule, GPipe",
                **dict.fromkeys(SYNC_FAULTS, "XLA buckets gradients as it likes"),
                **dict.fromkeys(
                    ("dropped_all_reduce", "sum_for_mean", "dropped_tp_all_reduce", "overwritten_microbatch"),
                    INSERTED_BY_XLA,
                ),
                **dict.fromkeys(PLACEMENT_FAULTS, INSERTED_BY_XLA),
            },
        ),
        Engine(
            name="jax-explicit",
            side="jaxpar",
            folder="explicit",
            decides="types: where an array lives is part of it, and each cast says what moves",
            checks="its types: a contraction over a dim that is split is a ShardingTypeError when the step "
            "is traced, until it is said what becomes of the sum",
            gradient_sync=("once",),
            sends_by="types",
            layouts=Layouts(
                zero=(1, 2, 3),
                tp=True,
                offload=True,
                schedules=("gpipe", "interleaved"),
                no_other_schedule=BY_AUTODIFF,
            ),
            precisions=LOSS_SCALED,
            can=ALL_ABILITIES,
            observed=OBSERVED,
            holds=SCANNED,
            impossible_faults={
                **NOTHING_TO_CLEAR,
                "ignored_schedule": "it has one schedule, GPipe",
                "overwritten_microbatch": "autodiff adds up what microbatches of a pipeline have",
                **dict.fromkeys(SYNC_FAULTS, "gradients are summed once, by one cast"),
                **dict.fromkeys(PLACEMENT_FAULTS, SAID_BY_TYPE),
            },
        ),
        Engine(
            name="jax-manual",
            side="jaxpar",
            folder="manual",
            decides="we do: shard_map and lax collectives",
            checks="JAX's check_vma, in part: it follows along which axes a value varies, and refuses a "
            "result that is declared equal on all devices and is not known to be",
            gradient_sync=("naive", "flat", "bucketed"),
            layouts=Layouts(
                zero=(1, 2, 3),
                tp=True,
                offload=True,
                schedules=("gpipe", "1f1b", "interleaved"),
                no_other_schedule="devices in lock-step do a backward in one tick, not in halves: choose one "
                "of these",
            ),
            precisions=LOSS_SCALED,
            can=ALL_ABILITIES,
            observed=OBSERVED,
            holds=Holds(ends_on_every_stage=True, residuals="scan", logits=2, logits_with_tp=3),
            impossible_faults=NOTHING_TO_CLEAR,
        ),
    ),
)
