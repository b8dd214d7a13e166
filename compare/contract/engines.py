"""The four engines, and which choices of a layout each one honours."""

from collections.abc import Callable, Mapping

from msgspec import Struct

from compare.contract.experiment import ExperimentError, Layout


def _nothing(layout: Layout) -> str:
    return ""


def _not_in_pytorch(layout: Layout) -> str:
    """What torch.distributed.pipelining (2.13) cannot combine with a schedule, found out by running it."""
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


def _not_in_lock_step(layout: Layout) -> str:
    """What jax-manual's pipeline, one program that all devices run tick by tick, does not do."""
    if layout.pp > 1 and layout.remat in ("none", "dots"):
        return (
            f"layout.remat = {layout.remat} with layout.pp = {layout.pp}: a device keeps the inputs of its "
            f"stages and computes the rest anew in backward; choose layout.remat = full or auto"
        )
    return ""


class Engine(Struct, frozen=True, kw_only=True):
    """One way of training an experiment."""

    name: str
    side: str
    """The package that runs it: `python -m SIDE RUN_DIR`."""
    gradient_sync: tuple[str, ...]
    """The gradient synchronisations it offers; one entry where the choice is not ours."""
    decides: str
    """Who decides where data moves, in a few words."""
    zero: tuple[int, ...] = ()
    """The ZeRO stages it can split over dp_shard."""
    tp: bool = False
    """Whether it has tensor parallelism, with and without sequence parallelism."""
    no_zero_with_tp: Mapping[int, str] = {}
    """ZeRO stages that it cannot combine with tp, and why."""
    gradient_sync_with_tp: str = ""
    """What reduces over dp_replicate where tp has split the parameters, if that is something else."""
    schedules: tuple[str, ...] = ()
    """The pipeline schedules it has."""
    no_other_schedule: str = ""
    """Why it has no other, and what to do."""
    shards_parameters_from: int = 3
    """The ZeRO stage from which parameters are split at rest."""
    ends_on_every_stage: bool = False
    """Whether each rank of a pipeline holds embeddings and last norm, or only the first and the last one."""
    no_pipeline_on_gpu: str = ""
    """Why its pipelines run on the CPU only; empty if they do not."""
    refuses: Callable[[Layout], str] = _nothing
    """Why it cannot express a layout that everything above allows; empty if it can."""

    @property
    def offers_choice(self) -> bool:
        """Whether the layout's gradient_sync is ours to choose in this engine."""
        return len(self.gradient_sync) > 1

    def gradient_sync_for(self, layout: Layout) -> str:
        """The synchronisation that will run: of ZeRO its stage, else the layout's choice where there is one.

        Over the replicas of hybrid sharding jax-manual runs the layout's choice too.

        Raises:
            ExperimentError: the engine cannot do what the layout asks of it.
        """
        self.require(layout)
        if layout.dp_shard > 1:
            return f"zero{layout.zero}"
        if layout.dp_replicate == 1:
            return "none"
        if layout.tp > 1 and self.gradient_sync_with_tp:
            return self.gradient_sync_with_tp
        if not self.offers_choice:
            return self.gradient_sync[0]
        return layout.gradient_sync

    def require(self, layout: Layout, *, platform: str = "cpu") -> None:
        """Refuse what this engine cannot express. Raises ExperimentError with the reason."""
        if layout.pp > 1 and platform == "gpu" and self.no_pipeline_on_gpu:
            raise ExperimentError(f"layout.pp = {layout.pp}: {self.no_pipeline_on_gpu}")
        if layout.zero and layout.zero not in self.zero:
            raise ExperimentError(f"layout.zero = {layout.zero}: {self.name} has {self.zero or 'no stage'}")
        if layout.tp > 1 and not self.tp:
            raise ExperimentError(f"layout.tp = {layout.tp}: {self.name} has no tensor parallelism")
        if layout.tp > 1 and layout.zero in self.no_zero_with_tp:
            why = self.no_zero_with_tp[layout.zero]
            raise ExperimentError(f"layout.zero = {layout.zero} with layout.tp = {layout.tp}: {why}")
        if layout.pp > 1 and layout.schedule not in self.schedules:
            have = ", ".join(self.schedules) or "no pipeline"
            why = self.no_other_schedule and f" ({self.no_other_schedule})"
            raise ExperimentError(f"layout.schedule = {layout.schedule}: {self.name} has {have}{why}")
        if why := self.refuses(layout):
            raise ExperimentError(f"{self.name}: {why}")
        if layout.dp_replicate > 1 and self.offers_choice and layout.gradient_sync not in self.gradient_sync:
            raise ExperimentError(
                f"layout.gradient_sync = {layout.gradient_sync}: {self.name} offers "
                f"{', '.join(self.gradient_sync)}, because under jit XLA decides when a collective starts: "
                f"choose one of these, or leave {self.name} out of --engines"
            )


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            name="jax-compiler",
            side="jaxpar",
            gradient_sync=("xla",),
            decides="XLA: jit with Mesh and NamedSharding",
            zero=(1, 2, 3),
            tp=True,
            schedules=("gpipe", "interleaved"),
            no_other_schedule="under jit autodiff orders the backward passes, after all forward ones: choose "
            "one of these",
            ends_on_every_stage=True,
        ),
        Engine(
            name="jax-manual",
            side="jaxpar",
            gradient_sync=("naive", "flat", "bucketed"),
            decides="we do: shard_map and lax collectives",
            zero=(1, 2, 3),
            tp=True,
            schedules=("gpipe", "1f1b", "interleaved"),
            no_other_schedule="devices in lock-step do a backward in one tick, not in halves: choose one of "
            "these",
            refuses=_not_in_lock_step,
            ends_on_every_stage=True,
        ),
        Engine(
            name="torch-manual",
            side="torchpar",
            gradient_sync=("naive", "flat", "overlapped", "bucketed"),
            decides="we do: torch.distributed collectives",
            zero=(1, 2, 3),
            tp=True,
            schedules=("gpipe", "1f1b", "interleaved", "zero_bubble"),
            no_pipeline_on_gpu=(
                "torch-manual tells messages between stages apart by their tags, which gloo has and NCCL has "
                "not: take torch-library, or platform cpu"
            ),
        ),
        Engine(
            name="torch-library",
            side="torchpar",
            gradient_sync=("ddp",),
            decides="PyTorch: DDP, ZeroRedundancyOptimizer, FSDP2, DTensor, pipelining",
            zero=(1, 2, 3),
            tp=True,
            schedules=("gpipe", "1f1b", "interleaved", "zero_bubble"),
            no_zero_with_tp={
                1: "torch-library's ZeRO-1 is ZeroRedundancyOptimizer beside DistributedDataParallel, which "
                "takes no DTensor: choose layout.zero = 2 or 3"
            },
            gradient_sync_with_tp="fsdp2",
            shards_parameters_from=2,  # fully_shard: gathered for the step, and never whole between two
            refuses=_not_in_pytorch,
        ),
    )
}
