"""A training step compiled for devices that are not here: what a side is asked for, and what it prints.

    python -m jaxpar --compile REQUEST

prints a `CompiledAhead` as one line of JSON. Nothing runs: the compiler says what the step sends, what a
device has to keep, and for which messages the devices wait.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from compare.contract.communication import Communication
from compare.spec.experiment import Experiment, ExperimentError, revalidate

Compiler = Literal["tpu", "cuda"]


class AheadRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which engine, which layout, which absent devices."""

    engine: str
    experiment: Experiment
    compiler: Compiler
    """XLA's for TPUs, which comes with libtpu, or for NVIDIA's GPUs, with JAX's CUDA plugin."""
    topology: Annotated[str, Meta(max_length=64, pattern=r"^[\w:x]+$")]
    """As the compiler names it: v5e:16x16, or hosts and their GPUs, 1x8x8 (slices, hosts, GPUs)."""
    target: Annotated[str, Meta(max_length=4096)] = ""
    """Of a GPU: XLA's GpuTargetConfigProto as text."""


class Waited(Struct, frozen=True, kw_only=True):
    """Collectives of one kind and axis, in a step of one device: hidden behind other work, or waited for."""

    kind: str
    axis: str
    hidden_bytes: int
    """Logical bytes of those that begin before, and end after, other work."""
    waited_bytes: int
    """Of those that the compiler made synchronous."""


class CompiledAhead(Struct, frozen=True, kw_only=True):
    """What the compiler made of the step."""

    rows: list[Communication]
    problems: list[str]
    """What could not be read: the ledger is incomplete."""
    waited: list[Waited]
    state_bytes: int
    """Parameters and moments of a device."""
    argument_bytes: int
    """Of a device, what the step is given: its state, and the batch."""
    temporary_bytes: int
    peak_bytes: int
    """All that a device keeps at once: donated buffers count once."""
    compile_s: float
    """CPU seconds of tracing, lowering and compiling."""
    device: str
    """As the compiler names it."""
    versions: dict[str, str]


def read_ahead_request(text: str) -> AheadRequest:
    """The request from JSON, checked. Raises ExperimentError for any other text."""
    try:
        request = msgspec.json.decode(text, type=AheadRequest)
    except msgspec.MsgspecError as error:
        raise ExperimentError(f"--compile: {' '.join(str(error).split())}") from None
    revalidate(request.experiment)
    return request
