"""A training step of devices that are not here: what a side is asked for, and what it prints as JSON.

python -m jaxpar --compile REQUEST     `CompiledAhead`: what XLA's compiler for these devices makes of it
python -m torchpar --alone REQUEST     `RankAlone`: what the first rank sends and keeps, without the others
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from compare.contract.ledger import Ledger
from compare.contract.memory_profile import DeviceMemory
from compare.spec.experiment import Experiment

Compiler = Literal["tpu", "cuda"]
"""XLA's for TPUs, which comes with libtpu, or for NVIDIA's GPUs, with JAX's CUDA plugin."""


class AbsentRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which engine, which layout; to compile, for which chips."""

    engine: str
    experiment: Experiment
    compiler: Compiler = "tpu"
    topology: Annotated[str, Meta(max_length=64, pattern=r"^[\w:x]*$")] = ""
    """As the compiler names it: v5e:16x16, or hosts and their GPUs, 1x8x8 (slices, hosts, GPUs)."""
    target: Annotated[str, Meta(max_length=4096)] = ""
    """Of a GPU: XLA's GpuTargetConfigProto as text."""


class CompiledAhead(Struct, frozen=True, kw_only=True):
    """What the compiler made of the step."""

    ledger: Ledger
    state_bytes: int
    """Parameters and moments of a device."""
    peak_bytes: int
    """All that a device keeps at once: donated buffers count once."""
    compile_s: float
    """CPU seconds of tracing, lowering and compiling."""
    device: str
    """As the compiler names it."""
    versions: dict[str, str]


class RankAlone(Struct, frozen=True, kw_only=True):
    """A step of the first rank."""

    ledger: Ledger
    memory: DeviceMemory
