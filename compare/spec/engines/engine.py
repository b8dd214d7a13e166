"""Declarations: an engine, with all that it refuses and why, and the side that runs it.

Every flag, table, count and refusal of the harness comes from these: see `registry`.
"""

from collections.abc import Callable, Mapping
from typing import Literal

from msgspec import Struct, field

from compare.spec.axes import SHARDED_FROM
from compare.spec.experiment import Experiment, ExperimentError, Layout

DTYPES = ("float64", "float32", "bfloat16", "float16")


class Layouts(Struct, frozen=True, kw_only=True):
    """What an engine can express of a layout."""

    zero: tuple[int, ...] = ()
    """The ZeRO stages it can split over dp_shard."""
    tp: bool = False
    """Whether it has tensor parallelism, with and without sequence parallelism."""
    no_zero_with_tp: Mapping[int, str] = {}
    """ZeRO stages that it cannot combine with tp, and why."""
    gradient_sync_with_tp: str = ""
    """Reduction over dp_replicate where tp splits the parameters, if it is another one."""
    contexts: tuple[str, ...] = ()
    """The ways of context parallelism it has."""
    no_other_context: str = ""
    """Reason for no other one, and what to do."""
    ep: Literal[True] | str = "it has no expert parallelism"
    """True if it has expert parallelism, or the reason against it."""
    schedules: tuple[str, ...] = ()
    """The pipeline schedules it has."""
    no_other_schedule: str = ""
    """Reason for no other schedule, and what to do."""
    offload: Literal[True] | str = ""
    """True if it can keep moments in the host's memory, or the reason against it."""
    refuses: Callable[[Layout], str] = lambda layout: ""
    """Reason why it cannot express a layout that everything above allows; empty if it can."""


class Holds(Struct, frozen=True, kw_only=True):
    """What a device holds, as far as the closed forms of its memory depend on the engine."""

    sharded_from: Mapping[str, int] = field(default_factory=SHARDED_FROM.copy)
    """The ZeRO stage from which each kind of state is split, at rest or when the optimizer begins."""
    cuts: Literal["flat", "rows", "dims"] = "flat"
    """What dp_shard cuts into parts rounded up: flat memory, rows of each parameter as nanoGPT has it, or of
    each the dim that it divides, or else the largest."""
    ends_on_every_stage: bool = False
    """Whether each rank of a pipeline holds embeddings and last norm, or only the first and the last one."""
    residuals: Literal["autograd", "scan"] = "autograd"
    """Keeper of activations: PyTorch's autograd, by operator, or a JAX scan, stacked over layers."""


class Sends(Struct, frozen=True, kw_only=True):
    """Words in which engines differ in what ZeRO sends (`compare.theory.communication`)."""

    scatters_each_pass: bool = False
    """Whether ZeRO-2 and 3 scatter the gradients of each accumulated pass, and not their sum."""
    gathers_ends: Literal["step", "pass", "use"] = "use"
    """How often ZeRO-3 gathers embeddings and last norm: once a step, a pass, or forward and backward."""
    pads_rows: bool = False
    """Whether experts' tokens are exchanged in equal parts, each with room for all of a device's tokens."""
    gathers_each_pass_from: int = 4
    """The ZeRO stage from which each pass gathers parameters anew, even without reshard_after_forward."""


class Engine(Struct, frozen=True, kw_only=True):
    """One way of training an experiment."""

    name: str
    side: str = ""
    """The package that runs it, `python -m SIDE RUN_DIR`: the registry fills it in."""
    decides: str
    """Who decides where data moves, in a few words."""
    checks: str = ""
    """Who says that a collective is forgotten, before the numbers do; a sentence of the lessons."""
    gradient_sync: tuple[str, ...]
    """The gradient synchronisations it offers; one entry where the choice is not ours."""
    folder: str = ""
    """Folder of its strategies in the side's package, or the module of a peer."""
    sends_by: Literal["", "xla", "types", "pytorch", "dtensor"] = ""
    """Sender of collectives not written by hand: XLA as it likes, or as types say; PyTorch; DTensor."""
    layouts: Layouts = Layouts()
    dtypes: tuple[str, ...] = DTYPES
    """The `precision.dtype` that it can train in."""
    is_peer: bool = False
    """A peer saves no checkpoints, evaluates nothing, drops nothing, and leaves neither timeline nor work."""
    counts_own_calls: bool = False
    """Whether its ledger counts its own calls, instead of observing somebody else's."""
    holds: Holds = Holds()
    sends: Sends = Sends()

    @property
    def offers_choice(self) -> bool:
        """True if the layout's gradient_sync is ours to choose in this engine."""
        return len(self.gradient_sync) > 1

    def gradient_sync_for(self, layout: Layout) -> str:
        """The synchronisation that will run: of ZeRO its stage, else the layout's choice where there is one.

        Raises as `require`.
        """
        self.require(layout)
        if layout.zero:
            return f"zero{layout.zero}"
        if layout.data_parallel * layout.cp == 1:
            return "none"
        if layout.tp > 1 and self.layouts.gradient_sync_with_tp:
            return self.layouts.gradient_sync_with_tp
        return layout.gradient_sync if self.offers_choice else self.gradient_sync[0]

    def remat_for(self, layout: Layout) -> str:
        """What `layout.remat` comes to: auto is dots under a scan over layers, and none without."""
        if layout.remat != "auto":
            return layout.remat
        return "dots" if self.holds.residuals == "scan" else "none"

    def require_experiment(self, experiment: Experiment) -> None:
        """Refuse an experiment that this engine cannot train. Raises ExperimentError with the reason."""
        self.require(experiment.layout)
        if (dtype := experiment.precision.dtype) not in self.dtypes:
            raise ExperimentError(f"precision.dtype = {dtype}: {self.name} has {', '.join(self.dtypes)}")
        for name, value, lacks in (
            ("train.eval_interval", experiment.train.eval_interval, "evaluates nothing"),
            ("model.dropout", experiment.model.dropout, "drops nothing"),
            ("model.n_experts", experiment.model.n_experts, "has no experts"),
            ("checkpoint.every", experiment.checkpoint.every, "saves no checkpoints"),
        ):
            if value and self.is_peer:
                raise ExperimentError(
                    f"{name} = {value}: {self.name} {lacks}: set it to 0, or leave {self.name} out of "
                    "--engines"
                )

    @property
    def sent_by_xla(self) -> bool:
        """True if XLA inserts its collectives, and its pipeline is a derivative of forward."""
        return self.sends_by in ("xla", "types")

    def require(self, layout: Layout) -> None:
        """Refuse what this engine cannot express. Raises ExperimentError with the reason."""
        has = self.layouts
        if layout.zero and layout.zero not in has.zero:
            raise ExperimentError(f"layout.zero = {layout.zero}: {self.name} has {has.zero or 'no stage'}")
        if layout.offload != "none" and has.offload is not True:
            why = has.offload or f"{self.name} keeps all of its state on the device"
            raise ExperimentError(f"layout.offload = {layout.offload}: {why}")
        if layout.tp > 1 and not has.tp:
            raise ExperimentError(f"layout.tp = {layout.tp}: {self.name} has no tensor parallelism")
        if layout.tp > 1 and (why := has.no_zero_with_tp.get(layout.zero)):
            raise ExperimentError(f"layout.zero = {layout.zero} with layout.tp = {layout.tp}: {why}")
        if layout.ep > 1 and has.ep is not True:
            raise ExperimentError(f"layout.ep = {layout.ep}: {self.name}: {has.ep}")
        for is_used, key, ways, nothing, why in (
            (layout.cp > 1, "context", has.contexts, "no context parallelism", has.no_other_context),
            (layout.pp > 1, "schedule", has.schedules, "no pipeline", has.no_other_schedule),
        ):
            if is_used and (value := getattr(layout, key)) not in ways:
                have = ", ".join(ways) or nothing
                raise ExperimentError(
                    f"layout.{key} = {value}: {self.name} has {have}" + (why and f" ({why})")
                )
        if why := has.refuses(layout):
            raise ExperimentError(f"{self.name}: {why}")
        if layout.replicas > 1 and self.offers_choice and layout.gradient_sync not in self.gradient_sync:
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
    converts: tuple[str, ...] = ()
    """Formats of checkpoints that `python -m NAME --convert` reads and writes: nanogpt, orbax."""
