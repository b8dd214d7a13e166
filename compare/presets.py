"""Layouts by the names people know them by: each is a few fields of `Layout`, given the devices."""

from collections.abc import Callable

import msgspec

from compare.contract.experiment import ExperimentError, Layout

PRESETS: dict[str, Callable[[int], dict]] = {
    "single": lambda devices: {"dp_replicate": 1},
    "ddp": lambda devices: {"dp_replicate": devices, "gradient_sync": "bucketed"},
    "ddp_naive": lambda devices: {"dp_replicate": devices, "gradient_sync": "naive"},
    "ddp_flat": lambda devices: {"dp_replicate": devices, "gradient_sync": "flat"},
    "ddp_overlapped": lambda devices: {"dp_replicate": devices, "gradient_sync": "overlapped"},
}


def apply_preset(layout: Layout, *, preset: str, devices: int, default: Layout) -> Layout:
    """`layout` with the preset's fields set.

    Args:
        layout: the layout so far, the user's own overrides included.
        preset: a name in PRESETS.
        devices: how many devices the preset spreads over.
        default: the layout before the user's overrides, to see what the user chose himself.

    Raises:
        ExperimentError: no such preset, or the user set a field to something else than the preset does.
    """
    if preset not in PRESETS:
        raise ExperimentError(f"--preset {preset}: no such preset (there are {', '.join(PRESETS)})")
    fields = PRESETS[preset](devices)
    for key, value in fields.items():
        chosen = getattr(layout, key)
        if chosen != getattr(default, key) and chosen != value:
            raise ExperimentError(
                f"--layout.{key} {chosen} contradicts --preset {preset} --devices {devices}, which sets it "
                f"to {value}: give one of them"
            )
    return msgspec.structs.replace(layout, **fields)
