"""A training step compiled for chips that are not here: `python -m jaxpar --compile REQUEST`."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from compare.contract.ledger import Ledger
from compare.spec.experiment import Experiment

Compiler = Literal["cpu", "tpu", "cuda"]


class Chip(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices, as a compiler of XLA names them."""

    name: str
    """The value of --chip."""
    compiler: Compiler
    topology: Annotated[str, Meta(pattern=r"^[\w:x]*$", max_length=64)] = ""
    """v5e:2x4, or slices, hosts and GPUs of a host: 1x1x8."""
    target: Annotated[str, Meta(max_length=4096)] = ""
    """XLA's GpuTargetConfigProto as text."""


class ChipRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The step of an engine, and the chips to compile it for."""

    engine: str
    experiment: Experiment
    chip: Chip
    cache_dir: str = ""
    """Folder of compiled programs; '' for none."""


class ChipProgram(Struct, frozen=True, kw_only=True):
    """Facts of a compiled step."""

    ledger: Ledger
    state_bytes: int
    """Parameters and moments on a device."""
    peak_bytes: int
    """Peak of a device by the compiler: its buffer assignment. Donated buffers count once."""
    compile_s: float
    """CPU seconds of the compiler, when the program was compiled."""
    is_cached: bool
    device: str
    """The compiler's name of a chip."""
    versions: dict[str, str]
