"""Structs that declare an engine, its limits with their reasons, and a side.

The declarations are in `registry`. Flags, tables and errors of the harness come from them.
"""

from collections.abc import Callable, Mapping
from typing import Literal

from msgspec import Struct, field

from compare.spec.attention import why_not_in_jax
from compare.spec.axes import SHARDED_FROM
from compare.spec.experiment import Experiment, ExperimentError, Layout

PEER_DTYPES = ("float64", "float32", "bfloat16")
"""Values of `precision.dtype` that peers can train in."""


class Layouts(Struct, frozen=True, kw_only=True):
    """Values of a layout's fields that an engine can run. It can run all degrees that `rejects` allows."""

    schedules: tuple[str, ...] = ()
    """Pipeline schedules."""
    contexts: tuple[str, ...] = ()
    """Ways of context parallelism."""
    offload: bool = False
    """Whether the host's memory can hold the moments."""
    compiles: tuple[str, ...] = ()
    """Values of `layout.compile` that compile something."""
    reasons: Mapping[str, str] = {}
    """Field -> the reason why other values are impossible, and what to do."""
    rejects: Callable[[Layout], str] = lambda layout: ""
    """The reason why a layout of possible values is impossible; '' if it is possible."""


class Engine(Struct, frozen=True, kw_only=True):
    """One way of training an experiment."""

    name: str
    side: str = ""
    """The package that runs it, with `python -m SIDE RUN_DIR`. The registry sets it."""
    decides: str
    """Who decides where data moves, in a few words."""
    checks: str = ""
    """The tool that finds a missing collective before the numbers do; a sentence of the lessons."""
    gradient_sync: tuple[str, ...]
    """Gradient synchronisations of `layout.gradient_sync` that it can run; one if the framework chooses."""
    folder: str = ""
    """Folder of its strategies in the side's package, or the module of a peer."""
    sends_by: Literal["", "xla", "types", "pytorch", "dtensor"] = ""
    """Sender of collectives that we do not write: XLA alone, XLA from types, PyTorch, DTensor."""
    layouts: Layouts = Layouts()
    is_peer: bool = False
    """A peer has no checkpoints, evaluations, dropout, experts, timeline and observed work."""
    is_jax: bool = False
    """One program runs on all devices, with a scan over layers. All stages have the ends of the model."""
    counts_own_calls: bool = False
    """Whether its ledger counts its own calls, instead of observing a framework's."""
    sharded_from: Mapping[str, int] = field(default_factory=SHARDED_FROM.copy)
    """Kind of state -> the ZeRO stage from which it is split, at rest or when the optimizer begins."""
    cuts: Literal["flat", "rows", "dims"] = "flat"
    """The unit that dp_shard splits and rounds up: flat memory; rows of each parameter as nanoGPT stores it;
    or a dim of each parameter that dp_shard divides, else its largest."""
    gathers_ends: Literal["step", "pass", "use"] = "use"
    """How often ZeRO-3 gathers the embeddings and the last norm: once a step, once a pass, or forward and
    backward."""
    pads_rows: bool = False
    """Whether experts exchange tokens in equal buffers, each with room for all tokens of a device."""

    @property
    def offers_choice(self) -> bool:
        """Whether `layout.gradient_sync` chooses the synchronisation in this engine."""
        return len(self.gradient_sync) > 1

    @property
    def sent_by_xla(self) -> bool:
        """Whether XLA inserts its collectives, and its pipeline's backward is the derivative of forward."""
        return self.sends_by in ("xla", "types")

    def gradient_sync_for(self, layout: Layout) -> str:
        """The synchronisation that runs: by ZeRO stage, by the layout or by the engine."""
        if layout.zero:
            return f"zero{layout.zero}"
        if layout.data_parallel * layout.cp == 1:
            return "none"
        if layout.tp > 1 and self.sends_by == "pytorch":
            return "fsdp2"  # DDP takes no DTensor
        return layout.gradient_sync if self.offers_choice else self.gradient_sync[0]

    def remat_for(self, layout: Layout) -> str:
        """`layout.remat` with auto resolved: dots under a scan over layers, else none."""
        if layout.remat != "auto":
            return layout.remat
        return "dots" if self.is_jax else "none"

    def why_not(self, layout: Layout) -> str:
        """The reason why this engine cannot run a layout; '' if it can."""
        able = self.layouts
        if why := able.rejects(layout):
            return why
        for in_effect, key, values in (
            (layout.pp > 1, "schedule", able.schedules),
            (layout.cp > 1, "context", able.contexts),
            (layout.offload != "none", "offload", ("optimizer",) if able.offload else ()),
        ):
            if in_effect and (value := getattr(layout, key)) not in values:
                possible = f"possible: {', '.join(values)}" if values else ""
                return f"layout.{key} = {value}: {'; '.join(filter(None, (able.reasons.get(key), possible)))}"
        if layout.replicas > 1 and self.offers_choice and layout.gradient_sync not in self.gradient_sync:
            return (
                f"layout.gradient_sync = {layout.gradient_sync}: under jit XLA decides when a collective "
                f"starts; possible: {', '.join(self.gradient_sync)}"
            )
        return ""

    def why_not_train(self, experiment: Experiment) -> str:
        """The reason why this engine cannot train an experiment; '' if it can."""
        if why := self.why_not(experiment.layout) or self.why_not_core(experiment):
            return why
        if experiment.gathers_in_16_bits and self.sends_by == "pytorch":
            one_dtype = "precision.gather = products gives a unit of FSDP2 one dtype, and"
            if experiment.layout.compile == "block":
                return (
                    f"{one_dtype} norms need float32, so they would be a unit inside of a compiled block, "
                    "whose hooks do not run (layout.compile = block): leave one of them out"
                )
            if experiment.model.n_experts:
                experts = f"model.n_experts = {experiment.model.n_experts}"
                return f"{one_dtype} a router needs float32 ({experts}): set precision.gather = storage"
        if not self.is_peer:
            return ""
        if (dtype := experiment.precision.dtype) not in PEER_DTYPES:
            return f"precision.dtype = {dtype}; possible: {', '.join(PEER_DTYPES)}"
        for name, value in (
            ("train.eval_interval", experiment.train.eval_interval),
            ("model.dropout", experiment.model.dropout),
            ("model.n_experts", experiment.model.n_experts),
            ("checkpoint.every", experiment.checkpoint.every),
        ):
            if value:
                return (
                    f"{name} = {value}: a peer has none: set it to 0, or leave {self.name} out of --engines"
                )
        return ""

    def why_not_core(self, experiment: Experiment) -> str:
        """The reason why this engine cannot compute attention by `model.attention`; '' if it can."""
        core, layout = experiment.model.attention, experiment.layout
        if self.is_jax:
            return why_not_in_jax(core, experiment, by_types=self.sends_by == "types")
        if core in ("dense", "fused") and layout.cp > 1 and layout.context == "ring":
            return (
                f"model.attention = {core} with layout.context = ring: PyTorch's core is of whole sequences, "
                "and a ring computes blocks: set model.attention = blockwise or auto"
            )
        return ""

    def require_experiment(self, experiment: Experiment) -> None:
        """Reject an experiment that this engine cannot train. Raises ExperimentError with the reason."""
        if why := self.why_not_train(experiment):
            raise ExperimentError(f"{self.name}: {why}")


class Side(Struct, frozen=True, kw_only=True):
    """A package that runs engines: `python -m NAME RUN_DIR` reads a request and writes a record."""

    name: str
    engines: tuple[Engine, ...]
    """The engines of the comparison, which commands run by default."""
    python_flag: str
    """The flag for the Python in which it is installed, such as jax_python."""
    packages: tuple[str, ...] = ()
    """Packages that its engines need in addition to the harness."""
    peers: tuple[Engine, ...] = ()
    """Engines of other projects, which run only if named."""
    one_process_a_device: bool = False
    """Whether a process drives one device, or all devices of its host."""
    environment: Mapping[str, str] = {}
    """Variables for its Python, unless the user has set them."""
    environment_on_cpu: Mapping[str, str] = {}
    """Variables for its Python on platform cpu."""
    converts: tuple[str, ...] = ()
    """Formats of checkpoints that `python -m NAME --convert` reads and writes: nanogpt, orbax."""
