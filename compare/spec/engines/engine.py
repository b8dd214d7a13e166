"""Declarations: an engine, with all that it refuses and why, and the side that runs it.

Every flag, table, count and refusal of the harness comes from these: see `registry`.
"""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Literal

from msgspec import Struct

from compare.host.facts import MissingPackageError
from compare.spec.experiment import Experiment, ExperimentError, Layout

DTYPES = ("float64", "float32", "bfloat16")
LOSS_SCALED = (*DTYPES, "float16")
PROJECT = "shardpair"


def _nothing(layout: Layout) -> str:
    return ""


class Keeps(Struct, frozen=True, kw_only=True):
    """Tensors that an engine's step keeps, as far as its peak's closed form depends on the engine."""

    residuals: Literal["autograd", "scan"]
    """Keeper of activations: PyTorch's autograd, by operator, or a JAX scan, stacked over layers."""
    logits: int = 0
    """Number of tensors as large as the logits when their gradient is made."""
    logits_with_tp: int = 0
    """That number for logits split by vocabulary."""
    logits_with_pp: int = 0
    """That number on the last stage of a pipeline."""
    buckets: bool = False
    """Whether buckets of whole gradients stay from step to step."""
    gathers_ahead: bool = False
    """Whether ZeRO-3 prefetches the last block before the loss's backward is done."""


class Engine(Struct, frozen=True, kw_only=True):
    """One way of training an experiment."""

    name: str
    side: str
    """The package that runs it: `python -m SIDE RUN_DIR`."""
    gradient_sync: tuple[str, ...]
    """The gradient synchronisations it offers; one entry where the choice is not ours."""
    decides: str
    """Who decides where data moves, in a few words."""
    checks: str = ""
    """Who says that a collective is forgotten, before the numbers do; a sentence of the lessons."""
    folder: str = ""
    """Folder of its four strategies in the side's package, or the module of a peer."""
    needs: str = ""
    """Package that it needs beyond its side's. An extra of this project has the same name."""
    dtypes: tuple[str, ...] = DTYPES
    """The `precision.dtype` that it can train in."""
    no_other_dtype: str = ""
    """Reason for no other dtype."""
    no_loss_chunks: str = ""
    """Reason against `train.loss_chunks` above 1; empty if it has them."""
    is_reference: bool = False
    """Whether its run on one device is the reference of all others; true for exactly one engine."""
    zero: tuple[int, ...] = ()
    """The ZeRO stages it can split over dp_shard."""
    tp: bool = False
    """Whether it has tensor parallelism, with and without sequence parallelism."""
    no_zero_with_tp: Mapping[int, str] = {}
    """ZeRO stages that it cannot combine with tp, and why."""
    gradient_sync_with_tp: str = ""
    """Reduction over dp_replicate where tp splits the parameters, if it is another one."""
    schedules: tuple[str, ...] = ()
    """The pipeline schedules it has."""
    no_other_schedule: str = ""
    """Reason for no other schedule, and what to do."""
    shards_parameters_from: int = 3
    """The ZeRO stage from which parameters are split at rest."""
    shards_gradients_from: int = 0
    """The ZeRO stage from which gradients are split when the optimizer begins; 0 for ZeRO's own."""
    ends_on_every_stage: bool = False
    """Whether each rank of a pipeline holds embeddings and last norm, or only the first and the last one."""
    no_gpu: str = ""
    """Reason why it runs on the CPU only; empty if GPUs work."""
    offloads: bool = False
    """Whether it can keep moments in the host's memory."""
    no_offload: str = ""
    """Reason against offloading."""
    checkpoints: bool = False
    """Whether it saves its full state, and begins with one that another engine saved."""
    evaluates: bool = False
    """Whether it can evaluate weights on held-out data."""
    drops: bool = False
    """Whether it has dropout (`compare.numerics.dropout`)."""
    profiles: bool = False
    """Whether it leaves the timeline of a step (`Request.profile`)."""
    falls_silent: bool = False
    """Whether it runs without communicating, too (`Request.silent`)."""
    no_twin: str = ""
    """Reason for no silent twin."""
    tells_work: bool = False
    """Whether its record says what a step computed (`compare.contract.work`): then it is held to that."""
    counts_own_calls: bool = False
    """Whether its ledger counts its own calls, instead of observing somebody else's."""
    sends_by: Literal["", "xla", "types", "pytorch", "dtensor"] = ""
    """Sender of collectives not written by hand: XLA as it likes, or as types say; PyTorch; DTensor."""
    keeps: Keeps | None = None
    """None if unknown: then its peak has no closed form."""
    impossible_faults: Mapping[str, str] = {}
    """Mistakes (`shardpair faults`) that it cannot make, and why."""
    refuses: Callable[[Layout], str] = _nothing
    """Reason why it cannot express a layout that everything above allows; empty if it can."""

    @property
    def offers_choice(self) -> bool:
        """True if the layout's gradient_sync is ours to choose in this engine."""
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

    def remat_for(self, layout: Layout) -> str:
        """What `layout.remat` comes to: auto is dots under a scan over layers, and none without."""
        if layout.remat != "auto":
            return layout.remat
        return "dots" if self.keeps and self.keeps.residuals == "scan" else "none"

    def require_experiment(self, experiment: Experiment, *, platform: str = "cpu") -> None:
        """Refuse an experiment that this engine cannot train. Raises ExperimentError with the reason."""
        self.require(experiment.layout, platform=platform)
        if (dtype := experiment.precision.dtype) not in self.dtypes:
            have, why = ", ".join(self.dtypes), self.no_other_dtype and f" ({self.no_other_dtype})"
            raise ExperimentError(f"precision.dtype = {dtype}: {self.name} has {have}{why}")
        if (chunks := experiment.train.loss_chunks) > 1 and self.no_loss_chunks:
            raise ExperimentError(f"train.loss_chunks = {chunks}: {self.name}: {self.no_loss_chunks}")
        if (interval := experiment.train.eval_interval) and not self.evaluates:
            raise ExperimentError(
                f"train.eval_interval = {interval}: {self.name} evaluates nothing: set it to 0, or leave "
                f"{self.name} out of --engines"
            )
        if (dropout := experiment.model.dropout) and not self.drops:
            raise ExperimentError(
                f"model.dropout = {dropout}: {self.name} drops nothing: set it to 0, or leave "
                f"{self.name} out of --engines"
            )
        if (every := experiment.checkpoint.every) and not self.checkpoints:
            raise ExperimentError(
                f"checkpoint.every = {every}: {self.name} saves no checkpoints: set it to 0, or leave "
                f"{self.name} out of --engines"
            )

    def require_watchable(self, *, profile: bool, silent: bool) -> None:
        """Refuse a timeline or a silent run that this engine does not have. Raises ExperimentError."""
        if profile and not self.profiles:
            raise ExperimentError(f"profile: {self.name} leaves no timeline: leave it out of --engines")
        if silent and not self.falls_silent:
            why = self.no_twin or f"{self.name} always communicates"
            raise ExperimentError(f"silent: {self.name} has no silent twin: {why}")

    @property
    def sent_by_xla(self) -> bool:
        """True if XLA inserts its collectives, and its pipeline is a derivative of forward."""
        return self.sends_by in ("xla", "types")

    @property
    def pip_line(self) -> str:
        """Command that installs what it needs; empty if it needs nothing."""
        return f"pip install '{PROJECT}[{self.needs}]'" if self.needs else ""

    @property
    def not_installed(self) -> str:
        """Words for the package that is missing, with what to do."""
        return f"{self.needs} is not installed: {self.pip_line}"

    def require_installed(self) -> None:
        """Refuse to start where the package that it needs is missing from this Python.

        Raises:
            MissingPackageError: with the line that installs it.
        """
        if self.needs and not importlib.util.find_spec(self.needs):
            raise MissingPackageError(f"{self.name}: {self.not_installed}")

    def require(self, layout: Layout, *, platform: str = "cpu") -> None:
        """Refuse what this engine cannot express. Raises ExperimentError with the reason."""
        if platform == "gpu" and self.no_gpu:
            raise ExperimentError(f"--platform gpu: {self.name} runs on the CPU only: {self.no_gpu}")
        if layout.zero and layout.zero not in self.zero:
            raise ExperimentError(f"layout.zero = {layout.zero}: {self.name} has {self.zero or 'no stage'}")
        if layout.offload != "none" and not self.offloads:
            why = self.no_offload or f"{self.name} keeps all of its state on the device"
            raise ExperimentError(f"layout.offload = {layout.offload}: {why}")
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


class Side(Struct, frozen=True, kw_only=True):
    """A package that runs engines: `python -m NAME RUN_DIR`, which reads a request and leaves a record."""

    name: str
    engines: tuple[Engine, ...]
    """The engines that it is about: a command runs them unless told otherwise."""
    python_flag: str
    """The flag that names the Python in which it is installed, such as jax_python."""
    packages: tuple[str, ...] = ()
    """What it imports beyond the contract's packages: without it none of its engines runs."""
    peers: tuple[Engine, ...] = ()
    """What others use for the same: they run when they are named."""
    one_process_a_device: bool = False
    """Whether a process drives one device. If not it drives all of its host."""
    environment: Mapping[str, str] = {}
    """Variables that its Python is started with, unless the user has set them."""
    environment_on_cpu: Mapping[str, str] = {}
    """Variables that its Python is always started with on platform cpu."""
    before_first_step: str = "at the first step"
    """What a run does between opening its record and its first step, for the progress."""
    converts: tuple[str, ...] = ()
    """Formats of checkpoints that `python -m NAME --convert` reads and writes: nanogpt, orbax."""
