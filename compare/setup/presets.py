"""Presets: layouts by their usual names, for any number of devices.

A preset sets the degrees, and the settings that it is named for: zero of zero1, gradient_sync of ddp_flat.
For other settings a flag wins over the experiment's file, and the file over the preset.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from compare.spec.axes import AXES, CP, DP_REPLICATE, DP_SHARD, EP, PP, TP
from compare.spec.experiment import Experiment, ExperimentError, Layout, Model, edited, revalidate
from compare.spec.names import did_you_mean

Fields = Mapping[str, object]
MICROBATCHES = "microbatches"
MANY = 10
"""Names that an error lists."""


class Preset(Struct, frozen=True):
    """A layout over any number of devices."""

    description: str
    axis: str = ""
    """The axis of all devices that the `fixed` degrees do not use."""
    named: Fields = {}
    """Its other degrees, and the settings that it is named for."""
    devices: int = 4
    """Default number of devices."""
    ranks_per_ep: int = 0
    """dp_shard / ep; 0 without expert parallelism."""

    @property
    def fixed(self) -> int:
        """Product of the fixed degrees. The number of devices is a larger multiple of it."""
        return math.prod(int(str(value)) for key, value in self.named.items() if key in AXES)


SP = {"sequence_parallel": True}
KEPT = {"zero": 3, "reshard_after_forward": False}
RING = {"context": "ring", "zigzag": True}
INTERLEAVED = {"schedule": "interleaved", "chunks": 2}
DDP, FSDP = {"dp_replicate": 2}, {"dp_shard": 2, "zero": 3}
PRESETS = {
    "single": Preset("one device", devices=1),
    "ddp": Preset("data parallel, gradients in buckets", DP_REPLICATE),
    "ddp_naive": Preset(
        "data parallel, one reduction per parameter", DP_REPLICATE, {"gradient_sync": "naive"}
    ),
    "ddp_flat": Preset("data parallel, one reduction for all", DP_REPLICATE, {"gradient_sync": "flat"}),
    "ddp_overlapped": Preset(
        "data parallel, reductions during backward", DP_REPLICATE, {"gradient_sync": "overlapped"}
    ),
    "zero1": Preset("ZeRO-1: optimizer state split", DP_SHARD, {"zero": 1}),
    "zero2": Preset("ZeRO-2: and gradients", DP_SHARD, {"zero": 2}),
    "fsdp": Preset("ZeRO-3, FULL_SHARD: and parameters", DP_SHARD, {"zero": 3}),
    "shard_grad_op": Preset("FSDP that keeps gathered parameters until backward", DP_SHARD, KEPT),
    "hsdp": Preset("fully sharded within replicas", DP_SHARD, {**DDP, "zero": 3}),
    "tp": Preset("tensor parallel", TP),
    "tp_sp": Preset("tensor and sequence parallel", TP, SP),
    "ddp_tp": Preset("data x tensor parallel", TP, DDP),
    "fsdp_tp": Preset("fully sharded x tensor parallel", TP, FSDP),
    "fsdp_tp_sp": Preset("fully sharded x tensor and sequence parallel", TP, {**FSDP, **SP}),
    "hsdp_tp": Preset("replicas x fully sharded x tensor parallel", TP, {**DDP, **FSDP}, devices=8),
    "cp": Preset("context parallel, keys and values gathered", CP),
    "cp_ring": Preset("context parallel, a ring, balanced", CP, RING),
    "cp_ulysses": Preset(
        "context parallel, heads for positions", CP, {"context": "ulysses", "zigzag": False}
    ),
    "fsdp_cp": Preset("fully sharded x context parallel", CP, FSDP),
    "cp_tp": Preset("context x tensor and sequence parallel", CP, {"tp": 2, **SP}),
    "ep": Preset("data x expert parallel", DP_SHARD, ranks_per_ep=1),
    "fsdp_ep": Preset("fully sharded x expert parallel", DP_SHARD, {"zero": 3}, ranks_per_ep=1),
    "fsdp_ep_half": Preset("fully sharded x expert parallel, pairs", DP_SHARD, {"zero": 3}, ranks_per_ep=2),
    "ep_tp": Preset("expert x tensor parallel", DP_SHARD, {"tp": 2}, ranks_per_ep=1),
    "pp": Preset("pipeline, 1F1B", PP),
    "pp_gpipe": Preset("pipeline, GPipe", PP, {"schedule": "gpipe", "chunks": 1}),
    "pp_interleaved": Preset("pipeline, interleaved 1F1B", PP, INTERLEAVED, devices=2),
    "pp_zero_bubble": Preset("pipeline, zero bubble (ZB-H1)", PP, {"schedule": "zero_bubble", "chunks": 1}),
    "ddp_pp": Preset("data x pipeline parallel", PP, DDP),
    "fsdp_pp": Preset("fully sharded x pipeline parallel", PP, FSDP),
    "tp_pp": Preset("tensor x pipeline parallel", PP, {"tp": 2}),
    "ddp_tp_pp": Preset("data x tensor x pipeline parallel", PP, {**DDP, "tp": 2}, devices=8),
    "fsdp_tp_pp": Preset("fully sharded x tensor x pipeline parallel", PP, {**FSDP, "tp": 2}, devices=8),
}

SECTIONS = ("model", "optimizer", "train", "precision", "layout")
"""Sections whose fields a size or a variant may change."""
CLASSIC = ("ddp", "zero1", "zero2", "fsdp", "tp")
"""Default presets of `shardpair sweep`."""

_AXIS_OF = {
    "schedule": PP,
    "chunks": PP,
    MICROBATCHES: PP,
    "zero": DP_SHARD,
    "reshard_after_forward": DP_SHARD,
    "sequence_parallel": TP,
    "context": CP,
    "zigzag": CP,
}
"""Settings that have an effect along one axis only."""
SPREAD = (*AXES, *_AXIS_OF, "gradient_sync")
"""The fields of a layout that presets set; others keep their values, such as remat and bucket_mb."""


def check_names(flag: str, what: str, names: Sequence[str], known: Iterable[str]) -> None:
    """Reject an unknown or repeated name. Raises ExperimentError, with the flag."""
    for name, count in Counter(names).items():
        if name not in known:
            raise ExperimentError(f"{flag} {name}: no such {what}{_instead(name, what, [*known])}")
        if count > 1:
            raise ExperimentError(f"{flag} {name}: give each {what} once")


def _instead(name: str, what: str, known: Sequence[str]) -> str:
    """The remedy for an unknown name."""
    if "," in name:
        return f"; separate {what}s by spaces"
    few = f" (there are {', '.join(known)})" if len(known) <= MANY else "; `shardpair list` names them all"
    return did_you_mean(name, known) or few


def several_presets(names: Sequence[str], model: Model, devices: int | None = None) -> dict[str, int]:
    """The presets of --presets with their devices. Raises ExperimentError.

    `all` is all presets of several devices that fit the model.
    """
    chosen = [name for name in PRESETS if _is_for(name, model)] if tuple(names) == ("all",) else names
    check_names("--presets", "preset", chosen, PRESETS)
    return {name: devices or PRESETS[name].devices for name in chosen}


def _is_for(name: str, model: Model) -> bool:
    """Whether a preset fits a model: ep needs experts, and a pipeline cannot have them."""
    preset = PRESETS[name]
    has_pipeline = preset.axis == PP
    return bool(preset.axis) and not (has_pipeline if model.n_experts else preset.ranks_per_ep)


def preset_layout(
    layout: Layout, preset: str, devices: int | None = None, flags: Collection[str] = ()
) -> Layout:
    """The layout of a preset, with settings of `layout`. Raises ExperimentError.

    A field in `flags` wins over the preset. Other settings that are not the default, such as those of the
    experiment's file, win over the preset's proposals and its defaults, but not over what it is named for.
    Settings without effect under the preset's degrees are left out.
    """
    check_names("--preset", "preset", [preset], PRESETS)
    own = _fields(preset, PRESETS[preset].devices if devices is None else devices)
    spread = {key: getattr(Layout(), key) for key in SPREAD} | dict(own)
    split = {axis for axis in AXES if spread[axis] != 1}
    in_effect = [key for key, axis in _AXIS_OF.items() if axis in split]
    in_effect += ["gradient_sync"] if split else []
    by_name = own.keys() - {MICROBATCHES}
    for key in in_effect:
        value = getattr(layout, key)
        if key in flags or (value != getattr(Layout(), key) and key not in by_name):
            spread[key] = value
    if spread["zero"] != 3 and "reshard_after_forward" not in flags:
        spread["reshard_after_forward"] = True
    return msgspec.structs.replace(layout, **spread)


def check_presets(layout: Layout, presets: Iterable[tuple[str, int | None]], flags: Collection[str]) -> None:
    """Reject a flag that contradicts a degree of the presets, or has no effect under any of them.

    Raises ExperimentError.
    """
    made: dict[str, Layout] = {}
    for name, devices in presets:
        with contextlib.suppress(ExperimentError):  # the caller skips presets for other numbers of devices
            made[name] = preset_layout(layout, name, devices, flags)
    for key in (key for key in SPREAD if key in flags and made):
        value = getattr(layout, key)
        differs = [getattr(of, key) != value for of in made.values()]
        if any(differs) if key in AXES else all(differs):
            raise ExperimentError(
                f"--layout.{key} {value} contradicts the preset {', '.join(made)}: leave one of them out"
            )


def spread(
    experiment: Experiment, preset: str, devices: int | None = None, flags: Collection[str] = ()
) -> Experiment:
    """The checked experiment under a preset. `single` is one device. Raises ExperimentError."""
    layout = preset_layout(experiment.layout, preset, devices, flags)
    return revalidate(msgspec.structs.replace(experiment, layout=layout))


def _fields(name: str, devices: int) -> Fields:
    """Fields of the layout that a preset sets. The number of microbatches is a proposal."""
    preset = PRESETS[name]
    fixed, axis = preset.fixed, preset.axis
    if devices < 1:
        raise ExperimentError(f"--devices {devices} must be at least 1")
    if fixed > 1 and (devices % fixed or devices == fixed):
        raise ExperimentError(
            f"--devices {devices}: preset {name} takes a multiple of {fixed} from {2 * fixed} on, such as "
            f"{2 * fixed}"
        )
    degree = {axis: devices // fixed} if axis else {}
    if preset.ranks_per_ep:
        degree[EP] = devices // fixed // preset.ranks_per_ep
    proposed = {MICROBATCHES: devices if fixed == 1 else 4} if axis == PP else {}
    return {**proposed, **degree, **preset.named}


def edits_of(text: str) -> dict[str, dict[str, object]]:
    """The values of `train.batch_size=8,layout.remat=full`, by section and field. Raises ExperimentError."""
    edits: dict[str, dict[str, object]] = {}
    for part in text.split(",") if text else ():
        key, equals, value = part.strip().partition("=")
        section, _, field = key.partition(".")
        fields = type(getattr(Experiment(), section)).__struct_fields__ if section in SECTIONS else ()
        if not equals or field not in fields:
            raise ExperimentError(
                f"{text}: give fields and values such as train.batch_size=8 or layout.remat=full, with a "
                f"comma between two (sections: {', '.join(SECTIONS)})"
            )
        edits.setdefault(section, {})[field] = _value(value)
    return edits


def setting_without(text: str, *prefixes: str) -> str:
    """The setting without its fields that begin with a prefix: '' if none is left."""
    return ",".join(part for part in text.split(",") if not part.strip().startswith(prefixes))


def check_settings(
    flag: str, texts: Iterable[str], experiment: Experiment, presets: Sequence[str] = ()
) -> None:
    """Reject a setting that trains the same as another one, or that sets a degree of the presets.

    --variants also train the experiment without a setting, --sizes do not. Raises ExperimentError.
    """
    trained = [("the default", experiment)] if flag == "--variants" else []
    for text in texts:
        edits = edits_of(text)
        if presets and (degrees := edits.get("layout", {}).keys() & {*AXES}):
            why = f"layout.{min(degrees)} contradicts --presets {presets[0]}"
            raise ExperimentError(f"{flag} {text}: {why}: leave one of them out")
        made = edited(experiment, edits)
        if same := next((name for name, other in trained if other == made), ""):
            why = "it is given twice" if same == text else f"it is the same training as {same}"
            raise ExperimentError(f"{flag} {text}: {why}: give each setting once")
        trained.append((text, made))


def _value(text: str) -> object:
    """A TOML value, or else the text itself: `full` needs no quotes."""
    try:
        read: Mapping[str, object] = msgspec.toml.decode(f"value = {text}")
    except msgspec.DecodeError:
        return text
    return read["value"] if read.keys() == {"value"} else text
