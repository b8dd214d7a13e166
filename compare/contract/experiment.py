"""One experiment, as frozen data: what is trained, on what, how, and under which layout.

Field names are nanoGPT's where nanoGPT has the field, torchtitan's for the degrees of the layout.
The file format is TOML, one table per section. Reading is strict: an unknown key or a wrong type is
an error that names the key, and `check` refuses what cannot work before any process starts.
"""

import math
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]

MAX_CPU_DEVICES = 64  # virtual devices share the cores; past this a run only measures the scheduler


class ExperimentError(ValueError):
    """The experiment cannot work. The message is one line that names the key or file and what to do."""


class _Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Model(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """nanoGPT's GPT: pre-LayerNorm blocks, learned positions, the head tied to the token embedding."""

    n_layer: Positive = 4
    """Number of transformer blocks (L)."""
    n_head: Positive = 4
    """Attention heads per block (H); divides n_embd."""
    n_embd: Positive = 128
    """Width of the residual stream (C)."""
    block_size: Positive = 128
    """Context length in tokens (T)."""
    vocab_size: Positive = 256
    """Number of token ids (V): 256 for text read as bytes, 50304 for nanoGPT's padded GPT-2 vocabulary."""
    bias: bool = False
    """Biases in the linear layers and LayerNorms, as GPT-2 has them."""
    dropout: Fraction = 0.0
    """Must be 0: dropout streams cannot match across frameworks or layouts."""
    activation: Literal["gelu", "gelu_tanh"] = "gelu"
    """gelu is the exact (erf) form, nanoGPT's; gelu_tanh is the approximation that JAX defaults to."""
    norm_eps: Annotated[float, Meta(gt=0)] = 1e-5
    """Epsilon of every LayerNorm (flax defaults to 1e-6, PyTorch and nanoGPT to 1e-5)."""


class Data(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the tokens come from."""

    source: str = "stdlib"
    """stdlib (bytes of Python's standard library), synthetic, a folder with nanoGPT's train.bin,
    one .bin file of uint16 tokens, or any other file, read as bytes."""


class Optimizer(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW or SGD, weight decay on matrices only, clipping by global norm, warm-up and cosine decay."""

    name: Literal["adamw", "sgd"] = "adamw"
    """Which optimizer: adamw, or sgd with momentum."""
    learning_rate: NonNegative = 1e-3
    """Peak learning rate."""
    decay_lr: bool = True
    """Warm up, then decay along a cosine to min_lr; false keeps learning_rate throughout."""
    warmup_iters: Count = 10
    """Steps of linear warm-up: step i uses learning_rate * (i + 1) / (warmup_iters + 1)."""
    lr_decay_iters: Positive = 200
    """Step at which the cosine reaches min_lr."""
    min_lr: NonNegative = 1e-4
    """Learning rate after lr_decay_iters."""
    weight_decay: NonNegative = 0.1
    """AdamW: a weight shrinks by learning_rate * weight_decay a step. SGD: added to the gradient (L2)."""
    decay: Literal["matrices", "all"] = "matrices"
    """What decays: matrices (nanoGPT: two or more dimensions), or all parameters."""
    beta1: Fraction = 0.9
    """AdamW's first-moment decay."""
    beta2: Fraction = 0.95
    """AdamW's second-moment decay."""
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    """AdamW's epsilon, added after the bias-corrected square root."""
    momentum: Fraction = 0.0
    """SGD's momentum."""
    grad_clip: NonNegative = 1.0
    """Clip gradients to this global norm; 0 turns clipping off."""


class Train(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long, and how much per step."""

    max_iters: Positive = 100
    """Optimizer steps."""
    batch_size: Positive = 16
    """Sequences in one forward-backward pass, over all data-parallel devices together."""
    gradient_accumulation_steps: Positive = 1
    """Forward-backward passes added up before each optimizer step; gradients are reduced once."""
    seed: Count = 1337
    """Seeds the initial weights and the order of the data."""


class Precision(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the numbers are."""

    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    """Compute dtype. Weights, gradients and moments are float64 for float64, else float32; bfloat16
    is mixed precision as in nanoGPT: matrix products in bfloat16, norms, residual and loss in float32."""
    tf32: bool = False
    """Allow TF32 matrix products on NVIDIA GPUs (JAX would by default, PyTorch would not)."""


class Layout(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the run is spread over devices: a point in a space of degrees, whose product is the devices."""

    dp_replicate: Positive = 1
    """Data parallelism: groups of devices that hold a replica of the model and a share of each batch."""
    dp_shard: Positive = 1
    """Data parallelism whose devices share out one replica's state: see zero."""
    zero: Literal[0, 1, 2, 3] = 0
    """What dp_shard splits (ZeRO stages): 1 optimizer state, 2 also gradients, 3 also parameters (FSDP)."""
    reshard_after_forward: bool = True
    """zero 3: free gathered parameters after forward and gather them again in backward (FULL_SHARD); false
    keeps them in between (SHARD_GRAD_OP)."""
    tp: Positive = 1
    """Tensor parallelism: attention heads, MLP and vocabulary are split (Megatron)."""
    sequence_parallel: bool = False
    """Between tensor-parallel regions, split activations along the sequence too."""
    pp: Positive = 1
    """Pipeline parallelism: ranks that hold a share of the blocks each."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """In which order the pipeline's ranks work on the microbatches (`shardpair schedule` draws them)."""
    chunks: Positive = 1
    """Stages on each rank of the pipeline; 2 or more for interleaved."""
    microbatches: Positive = 1
    """Microbatches that a pipeline cuts each pass into; those of all accumulated passes share a schedule."""
    gradient_sync: Literal["naive", "flat", "overlapped", "bucketed"] = "bucketed"
    """How the manual engines reduce gradients over dp_replicate: naive (per parameter, after backward), flat
    (one tensor, after backward), overlapped (per parameter, during backward), bucketed (during backward).
    The compiler and the library choose for themselves."""
    bucket_mb: Annotated[float, Meta(gt=0)] = 25.0
    """Size of a gradient bucket in MB (1e6 bytes) for bucketed, and for DDP."""
    remat: Literal["auto", "none", "dots", "full"] = "auto"
    """Recompute activations in backward: none, all but matrix products (dots), or everything (full).
    auto is what is fastest in each framework: dots under XLA's scan, none in eager PyTorch."""

    @property
    def axes(self) -> dict[str, int]:
        """The mesh: degree by axis name, outermost first. tp talks most, so it is innermost."""
        return {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "tp": self.tp,
        }

    @property
    def devices(self) -> int:
        """Devices in use: the product of all degrees."""
        return math.prod(self.axes.values())

    @property
    def data_parallel(self) -> int:
        """Shares that a batch is cut into, dp_replicate outermost."""
        return self.dp_replicate * self.dp_shard


class Experiment(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training run, described completely: two engines given this must compute the same thing."""

    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    precision: Precision = Precision()
    layout: Layout = Layout()


def named_experiments() -> dict[str, Path]:
    """The experiments that ship with the package, by name."""
    folder = Path(__file__).parent.parent / "experiments"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load(name_or_path: str) -> Experiment:
    """Read an experiment: the name of one that ships with the package, or a TOML file.

    Raises:
        ExperimentError: no such name or file, not TOML, an unknown key, a wrong type, a bad value.
    """
    known = named_experiments()
    path = known.get(name_or_path, Path(name_or_path))
    if not path.is_file():
        raise ExperimentError(f"{name_or_path}: no such file or named experiment (named: {', '.join(known)})")
    return parse(path.read_bytes(), origin=str(name_or_path))


def parse(text: str | bytes, *, origin: str = "experiment") -> Experiment:
    """Read an experiment from TOML text (bytes: UTF-8).

    Raises:
        ExperimentError: whose message begins with `origin`.
    """
    try:
        return check(msgspec.toml.decode(text, type=Experiment))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError is a DecodeError
        raise ExperimentError(f"{origin}: {_one_line(error)}") from None
    except ExperimentError as error:
        raise ExperimentError(f"{origin}: {error}") from None


def revalidate(experiment: Experiment) -> Experiment:
    """Apply the bounds on types again and `check`: for a spec that was built or edited in Python."""
    try:
        return check(msgspec.convert(msgspec.to_builtins(experiment), Experiment))
    except msgspec.ValidationError as error:
        raise ExperimentError(_one_line(error)) from None


def check(experiment: Experiment) -> Experiment:
    """Return the experiment if it can work. Raises ExperimentError with both numbers if it cannot."""
    model, train, layout = experiment.model, experiment.train, experiment.layout
    if model.n_embd % model.n_head:
        raise ExperimentError(
            f"model.n_head = {model.n_head} does not divide model.n_embd = {model.n_embd}: change one of them"
        )
    if model.dropout:
        raise ExperimentError(
            f"model.dropout = {model.dropout} must be 0: random streams cannot match across frameworks"
        )
    _check_layout(model, train, layout)
    _check_pipeline(model, train, layout)
    optimizer = experiment.optimizer
    if optimizer.decay_lr and optimizer.lr_decay_iters < optimizer.warmup_iters:
        raise ExperimentError(
            f"optimizer.lr_decay_iters = {optimizer.lr_decay_iters} is less than optimizer.warmup_iters = "
            f"{optimizer.warmup_iters}: the cosine would end before it starts"
        )
    return experiment


def _check_layout(model: Model, train: Train, layout: Layout) -> None:
    shares = {key: getattr(layout, key) for key in ("dp_replicate", "dp_shard")}
    if train.batch_size % layout.data_parallel:
        degrees = " x ".join(f"layout.{key} = {degree}" for key, degree in shares.items() if degree > 1)
        raise ExperimentError(
            f"train.batch_size = {train.batch_size} is not divisible by {degrees}: change one of them"
        )
    if layout.zero and layout.dp_shard == 1:
        raise ExperimentError(
            f"layout.zero = {layout.zero} with layout.dp_shard = 1: there is nothing to split; set "
            f"layout.dp_shard to 2 or more, or layout.zero to 0"
        )
    if layout.dp_shard > 1 and not layout.zero:
        raise ExperimentError(
            f"layout.dp_shard = {layout.dp_shard} with layout.zero = 0: say what is split: layout.zero = 1 "
            f"(optimizer state), 2 (and gradients) or 3 (and parameters)"
        )
    if not layout.reshard_after_forward and layout.zero != 3:
        raise ExperimentError(
            f"layout.reshard_after_forward = false with layout.zero = {layout.zero}: only zero = 3 gathers "
            f"parameters; set layout.zero to 3"
        )
    if model.n_head % layout.tp:
        raise ExperimentError(
            f"layout.tp = {layout.tp} does not divide model.n_head = {model.n_head}: change one of them"
        )
    if layout.sequence_parallel and layout.tp == 1:
        raise ExperimentError(
            "layout.sequence_parallel = true with layout.tp = 1: it splits what tp leaves; raise layout.tp"
        )
    if layout.sequence_parallel and model.block_size % layout.tp:
        raise ExperimentError(
            f"layout.sequence_parallel = true: layout.tp = {layout.tp} does not divide model.block_size = "
            f"{model.block_size}: change one of them"
        )


def _check_pipeline(model: Model, train: Train, layout: Layout) -> None:
    if layout.pp == 1:
        for key in ("chunks", "microbatches"):
            if getattr(layout, key) > 1:
                raise ExperimentError(
                    f"layout.{key} = {getattr(layout, key)} with layout.pp = 1: there is no pipeline; raise "
                    f"layout.pp, or accumulate with train.gradient_accumulation_steps"
                )
        return
    if (layout.chunks > 1) != (layout.schedule == "interleaved"):
        raise ExperimentError(
            f"layout.schedule = {layout.schedule} with layout.chunks = {layout.chunks}: interleaved has 2 or "
            f"more chunks, every other schedule 1"
        )
    stages = layout.pp * layout.chunks
    if model.n_layer % stages:
        raise ExperimentError(
            f"layout.pp = {layout.pp} x layout.chunks = {layout.chunks} stages do not divide model.n_layer = "
            f"{model.n_layer}: change one of them"
        )
    share = train.batch_size // layout.data_parallel
    if share % layout.microbatches:
        raise ExperimentError(
            f"layout.microbatches = {layout.microbatches} does not divide the {share} sequences of a "
            f"data-parallel share: change it or train.batch_size"
        )
    in_schedule = layout.microbatches * train.gradient_accumulation_steps
    if layout.schedule != "gpipe" and in_schedule < layout.pp:
        raise ExperimentError(
            f"layout.schedule = {layout.schedule} has {in_schedule} microbatches for layout.pp = {layout.pp} "
            f"stages: raise layout.microbatches, or use gpipe"
        )
    if layout.schedule == "interleaved" and in_schedule % layout.pp:
        raise ExperimentError(
            f"layout.schedule = interleaved has {in_schedule} microbatches, which layout.pp = {layout.pp} "
            f"does not divide: change layout.microbatches"
        )


def to_toml(experiment: Experiment) -> str:
    """The resolved spec as TOML text, every field spelled out."""
    return msgspec.toml.encode(experiment).decode()


def _one_line(error: Exception) -> str:
    """msgspec's message with its `$.model.n_layer` path as we write keys: `model.n_layer`."""
    return " ".join(str(error).split()).replace("`$.", "`").replace("- at `$`", "at the top level")
