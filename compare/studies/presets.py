"""Layouts by the names people know them by: each is a few fields of `Layout`, given the devices.

A preset gives the degrees, and the settings that it is named for: zero of zero1, gradient_sync of ddp_flat.
What a user says of a setting wins: a flag always, the experiment's file where the name leaves it open.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec import Struct

from compare.spec.axes import AXES, DP_REPLICATE, DP_SHARD, PP, TP
from compare.spec.experiment import Experiment, ExperimentError, Layout, edited, revalidate

Fields = dict[str, object]
MICROBATCHES = "microbatches"


class Preset(Struct, frozen=True):
    """A way of spreading a run over N devices."""

    description: str
    fields: Callable[[int], Fields]
    """The layout's fields for N devices: those of its name, and microbatches, which it only proposes."""
    devices: int = 4
    """How many devices the parity matrix takes: 8 where a layout has three dimensions."""
    fixed: int = 1
    """Devices along the axes whose degrees are fixed: N is a multiple of them, and more."""


class Said(Struct, frozen=True, kw_only=True):
    """The fields of a layout that a user gave, whatever their values."""

    flags: frozenset[str] = frozenset()
    file: frozenset[str] = frozenset()
    """In the experiment's file."""


NOTHING_SAID = Said()


def _all_along(description: str, axis: str, *, devices: int = 4, **settings: object) -> Preset:
    """All devices along one axis; a pipeline has as many microbatches in a pass."""
    proposed = (MICROBATCHES,) if axis == PP else ()
    return Preset(description, lambda n: {**dict.fromkeys((axis, *proposed), n), **settings}, devices)


def _rest_along(description: str, axis: str, **fields: object) -> Preset:
    """Some degrees fixed, and the rest of the devices along one axis; a pipeline has four microbatches."""
    fixed = math.prod(int(str(value)) for key, value in fields.items() if key in AXES)
    own = {**fields, MICROBATCHES: 4} if axis == PP else fields
    return Preset(description, lambda n: {**own, axis: n // fixed}, 2 * fixed, fixed)


PRESETS = {
    "single": Preset("one device", lambda devices: {}),
    "ddp": _all_along("data parallel, gradients in buckets", DP_REPLICATE),
    "ddp_naive": _all_along(
        "data parallel, one reduction per parameter", DP_REPLICATE, gradient_sync="naive"
    ),
    "ddp_flat": _all_along("data parallel, one reduction for all", DP_REPLICATE, gradient_sync="flat"),
    "ddp_overlapped": _all_along(
        "data parallel, reductions during backward", DP_REPLICATE, gradient_sync="overlapped"
    ),
    "zero1": _all_along("ZeRO-1: optimizer state split", DP_SHARD, zero=1),
    "zero2": _all_along("ZeRO-2: and gradients", DP_SHARD, zero=2),
    "fsdp": _all_along("ZeRO-3, FULL_SHARD: and parameters", DP_SHARD, zero=3),
    "shard_grad_op": _all_along(
        "FSDP that keeps gathered parameters until backward", DP_SHARD, zero=3, reshard_after_forward=False
    ),
    "hsdp": _rest_along("fully sharded within replicas", DP_SHARD, dp_replicate=2, zero=3),
    "tp": _all_along("tensor parallel", TP),
    "tp_sp": _all_along("tensor and sequence parallel", TP, sequence_parallel=True),
    "ddp_tp": _rest_along("data x tensor parallel", TP, dp_replicate=2),
    "fsdp_tp": _rest_along("fully sharded x tensor parallel", TP, dp_shard=2, zero=3),
    "fsdp_tp_sp": _rest_along(
        "fully sharded x tensor and sequence parallel", TP, dp_shard=2, zero=3, sequence_parallel=True
    ),
    "hsdp_tp": _rest_along(
        "replicas x fully sharded x tensor parallel", TP, dp_replicate=2, dp_shard=2, zero=3
    ),
    "pp": _all_along("pipeline, 1F1B", PP),
    "pp_gpipe": _all_along("pipeline, GPipe", PP, schedule="gpipe", chunks=1),
    "pp_interleaved": _all_along(
        "pipeline, interleaved 1F1B", PP, devices=2, schedule="interleaved", chunks=2
    ),
    "pp_zero_bubble": _all_along("pipeline, zero bubble (ZB-H1)", PP, schedule="zero_bubble", chunks=1),
    "ddp_pp": _rest_along("data x pipeline parallel", PP, dp_replicate=2),
    "fsdp_pp": _rest_along("fully sharded x pipeline parallel", PP, dp_shard=2, zero=3),
    "tp_pp": _rest_along("tensor x pipeline parallel", PP, tp=2),
    "ddp_tp_pp": _rest_along("data x tensor x pipeline parallel", PP, dp_replicate=2, tp=2),
    "fsdp_tp_pp": _rest_along("fully sharded x tensor x pipeline parallel", PP, dp_shard=2, zero=3, tp=2),
}

CLASSIC = ("ddp", "zero1", "zero2", "fsdp", "tp")
"""The strategies that are compared with each other most."""

_MEANT_FOR = {
    "schedule": PP,
    "chunks": PP,
    MICROBATCHES: PP,
    "zero": DP_SHARD,
    "reshard_after_forward": DP_SHARD,
    "sequence_parallel": TP,
}
"""Settings, and the axis without which each means nothing."""
SETTINGS = (*_MEANT_FOR, "gradient_sync")
SPREAD = (*AXES, *SETTINGS)
"""The fields of a layout that presets give; what they do not speak of stays, such as remat and bucket_mb."""


def settings_in(layout: Layout, written: Iterable[str] = SPREAD) -> frozenset[str]:
    """The settings that a file says: those that mean something under its degrees, or are not the default.

    Args:
        layout: of the file.
        written: the fields of the layout that it gives; all, as a file has that every field is written to.
    """
    return frozenset(
        key
        for key in written
        if getattr(layout, key) != getattr(Layout(), key) or getattr(layout, _MEANT_FOR.get(key, ""), 1) > 1
    )


def check_names(flag: str, what: str, names: Sequence[str], known: Iterable[str]) -> None:
    """Raise ExperimentError, naming the flag, for an unknown or repeated name."""
    for name, count in Counter(names).items():
        if name not in known:
            raise ExperimentError(f"{flag} {name}: no such {what} (there are {', '.join(known)})")
        if count > 1:
            raise ExperimentError(f"{flag} {name}: give each {what} once")


def preset_layout(layout: Layout, preset: str, devices: int, said: Said = NOTHING_SAID) -> Layout:
    """`layout` spread as the preset says, with the settings that were said and mean something there.

    Args:
        layout: the layout so far, with the user's flags in it.
        preset: a name in PRESETS.
        devices: how many devices it is spread over.
        said: the fields of `layout` that win over the preset's.

    Raises:
        ExperimentError: no such preset, or a number of devices that it cannot spread over.
    """
    own = _fields(preset, devices)
    spread = {key: getattr(Layout(), key) for key in SPREAD} | own
    meant = {key for key, axis in _MEANT_FOR.items() if spread[axis] != 1} | {"gradient_sync"}
    kept = (said.flags & meant) | (said.file & (meant - (own.keys() - {MICROBATCHES})))
    result = spread | {key: getattr(layout, key) for key in kept}
    if result["zero"] != 3 and "reshard_after_forward" not in said.flags | own.keys():
        result["reshard_after_forward"] = True  # the file says it of parameters that are not split here
    return msgspec.structs.replace(layout, **result)


def apply_preset(layout: Layout, preset: str, devices: int, said: Said) -> tuple[Layout, list[str]]:
    """`preset_layout` of the one preset that a user chose, and what gives way in the experiment's file.

    Returns:
        The layout, and a line for each setting of the file that the preset's name overrules.

    Raises:
        ExperimentError: as `preset_layout`; or a flag gives another degree, or means nothing there.
    """
    result = preset_layout(layout, preset, devices, said)
    own = _fields(preset, devices).keys() - {MICROBATCHES}
    notes = []
    for key in SPREAD:
        asked, given = getattr(layout, key), getattr(result, key)
        if asked == given:
            continue
        if key in said.flags:
            raise ExperimentError(_contradiction(result, preset, devices, key, asked))
        if key in said.file & own and key not in AXES:
            notes.append(
                f"layout.{key} = {asked} gives way to --preset {preset}, which is named for {given} "
                f"({layout_flag(key, asked)} would keep it)"
            )
    return result, notes


def check_presets(flag: str, layout: Layout, presets: Sequence[tuple[str, int]], said: Said) -> None:
    """Refuse what was said of several presets, if it has no effect, or makes two of them one.

    Args:
        flag: the one that names them.
        layout: as for `preset_layout`.
        presets: names and devices.
        said: as for `preset_layout`.

    Raises:
        ExperimentError: naming the flag to leave out, or the two presets.
    """
    found: dict[Layout, tuple[str, Layout]] = {}
    for name, devices in presets:
        try:
            pure = preset_layout(layout, name, devices)
        except ExperimentError:  # it cannot be spread over so many, and is left out
            continue
        other, its_own = found.setdefault(preset_layout(layout, name, devices, said), (name, pure))
        if its_own != pure:
            keys = [key for key in SPREAD if getattr(its_own, key) != getattr(pure, key)]
            values = ", ".join(f"layout.{key} = {getattr(layout, key)}" for key in keys)
            raise ExperimentError(f"{flag}: with {values}, {other} and {name} are the same: give one of them")
    for key in SPREAD if found else ():
        asked = getattr(layout, key)
        differs = [getattr(made, key) != asked for made in found]
        if key in said.flags and (any(differs) if key in AXES else all(differs)):
            axis = _MEANT_FOR.get(key)
            why = f"none of {flag} has layout.{axis} above 1" if axis else f"{flag} say how it is spread"
            raise ExperimentError(f"{layout_flag(key, asked)} has no effect: {why}; leave it out")


def spread(experiment: Experiment, preset: str, devices: int = 1, said: Said = NOTHING_SAID) -> Experiment:
    """The experiment under a preset, checked. `single` is one device, whatever its layout was."""
    layout = preset_layout(experiment.layout, preset, devices, said)
    return revalidate(msgspec.structs.replace(experiment, layout=layout))


def with_layout(experiment: Experiment, **fields: object) -> Experiment:
    """The experiment under a layout with other fields. Raises ExperimentError if that cannot work."""
    return revalidate(edited(experiment, {"layout": fields}))


def _fields(preset: str, devices: int) -> Fields:
    """The layout's fields that a preset gives. Raises ExperimentError as `preset_layout`."""
    check_names("--preset", "preset", [preset], PRESETS)
    if devices < 1:
        raise ExperimentError(f"--devices {devices} must be at least 1")
    fixed = PRESETS[preset].fixed
    if fixed > 1 and (devices % fixed or devices == fixed):
        raise ExperimentError(
            f"--devices {devices}: preset {preset} takes a multiple of {fixed} from {2 * fixed} on, such as "
            f"{2 * fixed}"
        )
    return PRESETS[preset].fields(devices)


def _contradiction(result: Layout, preset: str, devices: int, key: str, asked: object) -> str:
    """Why a flag cannot be had beside a preset, and the line to write."""
    if axis := _MEANT_FOR.get(key):
        return (
            f"{layout_flag(key, asked)} has no effect: --preset {preset} has layout.{axis} = 1; leave it out"
        )
    whole = msgspec.structs.replace(result, **{key: asked})
    flags = " ".join(
        layout_flag(name, value)
        for name, value in msgspec.structs.asdict(whole).items()
        if name in AXES or (name in SPREAD and value != getattr(Layout(), name))
    )
    return (
        f"{layout_flag(key, asked)} contradicts --preset {preset} --devices {devices}, which sets it to "
        f"{getattr(result, key)}: leave it out, or write in place of the preset: {flags}"
    )


def layout_flag(key: str, value: object) -> str:
    """A field of the layout as the command line has it."""
    if isinstance(value, bool):
        return f"--layout.{key}" if value else f"--layout.no_{key}"
    return f"--layout.{key} {value}"
