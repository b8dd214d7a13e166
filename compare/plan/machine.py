"""A machine to plan for: chips, their memory, and the links inside and across hosts; a TOML file each.

    h100x64              64 of a chip that ships with the package: compare/machines/h100.toml
    mine.tomlx16         16 of a chip of your own
    mine.toml            a file that says itself how many: `devices`

`like` takes all that a file does not say from a chip that ships. Reading is strict: there is no guess.
"""

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from compare.spec.experiment import ExperimentError, beginning, one_line, tables_in
from compare.system.disk import why_not_readable

CHIPS = {path.stem: path for path in sorted((Path(__file__).parent.parent / "machines").glob("*.toml"))}
Rate = Annotated[float, Meta(gt=0, le=1e30)]
Flops = Annotated[float, Meta(ge=1e9, le=1e30)]
Bandwidth = Annotated[float, Meta(ge=1e6, le=1e30)]
"""A figure in TFLOP/s or GB/s is below these, and refused."""
Share = Annotated[float, Meta(gt=0, le=1)]
Devices = Annotated[int, Meta(ge=1, le=1_000_000)]


class LinkSpeed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What joins the devices of a host or a pod, or those of different ones."""

    bytes_per_s: Bandwidth
    """Of one device, one way."""
    share: Share = 1.0
    """Of the bandwidth that collectives of large tensors reach."""


class Machine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """So many devices of one kind."""

    name: str = ""
    devices: Devices = 1
    platform: Literal["cpu", "gpu", "tpu"]
    devices_inside: Devices
    """Devices that `inside` joins: the GPUs of a host, the chips of a pod."""
    torus: Annotated[int, Meta(ge=0, le=6)] = 0
    """Dims of the torus whose links `inside` counts; 0 for a switch, which joins any two."""
    memory_bytes: Rate
    """Of a device."""
    memory_bytes_per_s: Bandwidth
    peak: Annotated[dict[str, Flops], Meta(min_length=1)]
    """Dense FLOP/s of a device by dtype of the products: what MFU is of."""
    sustained: dict[str, Flops] = {}
    """FLOP/s of a large product, where somebody measured it; at most the peak."""
    attention: Share = 0.6
    """Of the peak, that a fused attention reaches; by default the middle of FlashAttention-2's 50 to 73 % on
    an A100 (arXiv 2307.08691)."""
    products: list[tuple[Rate, Share]] = []
    """Share of `sustained` that a product of so many FLOPs or more reaches; by default `compute.PRODUCTS`."""
    slowdown: Rate = 1.0
    """How many times as long compute takes as these rates say: `plan --measured` finds it from one step."""
    inside: LinkSpeed
    across: LinkSpeed

    @property
    def hosts(self) -> int:
        """Hosts, or pods."""
        return math.ceil(self.devices / self.devices_inside)

    def peak_of(self, dtype: str) -> float:
        """FLOP/s of a device. Raises ExperimentError: nobody says."""
        if dtype not in self.peak:
            known = f"no peak is known for {dtype} (there is {', '.join(self.peak)})"
            raise ExperimentError(f"--machine {self.name}: {known}: set precision.dtype")
        return self.peak[dtype]

    def link_of(self, degree: int, stride: int) -> float:
        """Bytes/s that one device sends along an axis of the mesh.

        A ring over several hosts enters and leaves each by the network cards of all its devices in there;
        in a torus an axis has one dim. `degree` devices are along the axis; neighbours are `stride` apart.
        """
        inside, across = self.inside, self.across
        if degree * stride <= self.devices_inside:
            return inside.bytes_per_s * inside.share / max(self.torus, 1)
        beside = max(self.devices_inside // stride, 1)  # of one ring, in one host
        return min(across.bytes_per_s * across.share * beside, inside.bytes_per_s * inside.share)


def read_machine(text: str) -> Machine:
    """The machine that a word names: NAMExN, NAME-N, FILE.tomlxN, or a file that has `devices`.

    Raises ExperimentError for all that is no machine.
    """
    found = re.fullmatch(r"(?P<name>.+?)(?:[x-](?P<count>\d{1,18}))?", text)
    if not found:
        raise ExperimentError("--machine is empty: give a chip and its number, such as h100x64")
    fields = _fields(found["name"])
    if found["count"]:
        fields["devices"] = int(found["count"])
    if "devices" not in fields:
        raise ExperimentError(f"--machine {text}: how many devices? Write {found['name']}x64")
    try:
        machine = msgspec.convert({**fields, "name": text}, Machine)
    except msgspec.ValidationError as error:
        raise ExperimentError(f"--machine {text}: {one_line(error)}") from None
    for dtype, rate in machine.sustained.items():
        if rate > machine.peak.get(dtype, 0.0):
            raise ExperimentError(f"--machine {text}: sustained.{dtype} = {rate:g} is above the peak")
    if machine.hosts > 1 and machine.devices % machine.devices_inside:  # axes would not fit it
        raise ExperimentError(
            f"--machine {machine.name}: {machine.devices} devices do not fill hosts of "
            f"{machine.devices_inside}: give fewer than that, or a multiple of it"
        )
    return machine


def _fields(name: str) -> dict[str, Any]:
    """Fields of a chip or a file, and of the chip that it is like. Raises ExperimentError."""
    path = CHIPS.get(name.lower(), Path(name))
    if wrong := why_not_readable(path):
        chips = f"no such chip (there are {', '.join(CHIPS)})" if path.suffix != ".toml" else wrong
        raise ExperimentError(f"--machine {name}: {chips}: give a chip or a TOML file")
    fields = tables_in(beginning(path), origin=f"--machine {name}")
    like = fields.pop("like", None)
    if like is None:
        return fields
    if str(like) not in CHIPS:
        raise ExperimentError(f"--machine {name}: like must be the name of a chip: {', '.join(CHIPS)}")
    return {**_fields(like), **fields}
