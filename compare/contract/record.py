"""Record: the files that an engine writes into RUN_DIR, next to its request.

    request.json              the request: the harness writes it, `python -m SIDE RUN_DIR` reads it
    steps.jsonl               one `Step` per line
    evaluations.jsonl         one `Evaluation` per line, if there are any
    ledger.json               messages of one steady step (`compare.contract.ledger`)
    timeline.json             spans of one step, in a profiled run (`compare.contract.timeline`)
    memory.json               memory of one step by class (`compare.contract.memory_profile`)
    work.json                 observed operations of one step (`compare.contract.work`)
    TENSORS.safetensors       tensors of the ladder, by canonical parameter name (`Rung`)
    trace-WAY.safetensors     outputs (forward) and their gradients (backward) (`compare.contract.trace`)
    manifest.json             circumstances and costs; written last, so a record with a manifest is complete
    checkpoints/              the full state after some of the steps (`compare.checkpoint`)
    error.json                instead of a manifest: the rank that failed first, and its traceback
    process-K.json            state of each process without a parent (`process_states`)

Every file is written to a temporary name and renamed. While the run goes on, steps are appended to
`steps.jsonl.part`, which the progress bar reads.
"""

import hashlib
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType, field

from compare.checkpoint.description import CHECKPOINTS, UNFINISHED
from compare.contract.ledger import Ledger
from compare.contract.memory_profile import MEMORY, MemoryProfile
from compare.contract.request import REQUEST, Request, Rung
from compare.contract.timeline import TIMELINE, TRACES, Timeline
from compare.contract.timing import Window
from compare.contract.trace import BACKWARD, FORWARD
from compare.contract.work import WORK, ObservedWork
from compare.numerics.initial_weights import write_weights
from compare.numerics.stream import Evaluation
from compare.spec.experiment import Experiment
from compare.system.disk import no_room, write_atomically
from compare.system.json_files import decode_json, read_json, write_json
from compare.system.tensors import RecordError, Tensors, garbled

T = TypeVar("T")
MANIFEST, ERROR = "manifest.json", "error.json"
STEPS, STEPS_PART, EVALUATIONS = "steps.jsonl", "steps.jsonl.part", "evaluations.jsonl"
LEDGER = "ledger.json"
STATE = "process-"
"""Beginning of the names of processes' state files (`process_states`)."""
ON_HOST = "host"
"""Kind of `Manifest.resident_bytes` in the host's memory."""


class Step(Struct, frozen=True, kw_only=True):
    """Numbers and cost of one optimizer step."""

    step: int
    """Counted from 0."""
    loss: float
    """Mean cross-entropy in nats over the global batch, before the update, plus the load-balance loss."""
    grad_norm: float
    """Global norm before clipping; 0 if the step was skipped."""
    lr: float
    step_time_ms: float
    """Wall time from the batch on the host to the updated weights, synchronised; in a window of a timed run
    the mean over the window."""
    memory_bytes: int | UnsetType = UNSET
    """Memory in use after the step, on rank 0: of a GPU what its allocator reserved for tensors; on a CPU the
    RAM of the process, which in JAX has all devices."""
    loss_scale: float | UnsetType = UNSET
    """Loss scale of the step, in float16."""
    tokens_per_expert: list[list[int]] | UnsetType = UNSET
    """With experts: number of tokens that chose each expert, over the batches of all passes (L, E)."""
    skipped: bool = False
    """Gradients overflowed float16, and the step changed no weight."""
    instrumented: bool = False
    """The ledger and the memory tracker watched the step, so its time does not count."""


class Manifest(Struct, frozen=True, kw_only=True):
    """Circumstances of a run, and its costs beyond the steps."""

    engine: str
    experiment: Experiment
    platform: str
    devices: int
    device_kind: str
    """The device as the framework names it: a CPU model or a GPU model."""
    parameters: int
    initial_weights_sha256: str
    corpus_sha256: str
    """Digest of the training tokens."""
    versions: dict[str, str]
    """python, numpy, and the framework's packages."""
    threads: str
    """Threads of each device, in words: CPU timings depend on them."""
    compile_s: float
    """Compilation before the first step; 0 if nothing is compiled."""
    compiler_options: dict[str, bool | int | str] = field(default_factory=dict)
    """Options with which the step was compiled, beyond the compiler's defaults."""
    first_step_s: float
    cpu_time_s: float
    """User plus system CPU seconds of all of the engine's processes, start-up and compilation included."""
    peak_memory_bytes: list[int]
    """Peak of one step, per device."""
    peak_memory_method: str
    resident_bytes: dict[str, list[int]] = field(default_factory=dict)
    """Bytes between two steps, per device: parameters, gradients, optimizer (moments and masters). With
    `layout.offload` also host: the device's share of the host's memory."""
    replicas_apart: str = ""
    """Two devices whose copies of one shard differ at the end; '' if all copies are equal."""
    windows: list[Window] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    """Host of each device, in order."""


class Failure(Struct, frozen=True, kw_only=True):
    """The first failure of a run."""

    message: str
    """The rank and the error, in one line."""
    traceback: str = ""
    rank: int = -1
    """The rank that failed; -1 without ranks, or if the rank is unknown."""
    is_consequence: bool = False
    """Another process failed before or ended this one; the cause may follow."""
    exit_code: int = 1
    """Exit code of the process that failed; the launcher's may be the code of a process that it ended."""


class Record(Struct, frozen=True, kw_only=True):
    """A finished run. `read_tensors` reads its tensors from disk."""

    folder: Path
    manifest: Manifest
    steps: list[Step]
    ledger: Ledger = field(default_factory=Ledger)
    evaluations: list[Evaluation] = field(default_factory=list)
    timeline: Timeline | None = None
    memory: MemoryProfile | None = None
    work: ObservedWork | None = None
    request: Request | None = None
    """None for numbers from outside our engines."""


def write_tensors(folder: Path, rung: Rung, tensors: Mapping[str, np.ndarray]) -> None:
    """Write one rung's tensors, atomically."""
    write_weights(folder / f"{rung}.safetensors", tensors)


def read_tensors(folder: Path, rung: Rung) -> Mapping[str, np.ndarray]:
    """One rung's tensors by name, each read on access; {} if the run did not record them."""
    path = folder / f"{rung}.safetensors"
    return Tensors(path) if path.exists() else {}


FILES: dict[type, str] = {Ledger: LEDGER, MemoryProfile: MEMORY, ObservedWork: WORK, Timeline: TIMELINE}
"""File of each finding of a step."""


class Recorder:
    """Writes a record into RUN_DIR while an engine runs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._steps = (folder / STEPS_PART).open("ab")

    def step(self, step: Step) -> None:
        """Append one step. Readers see it at once."""
        self._steps.write(msgspec.json.encode(step) + b"\n")
        self._steps.flush()

    def evaluation(self, evaluation: Evaluation) -> None:
        """Append one evaluation. Readers see it at once."""
        with (self.folder / EVALUATIONS).open("ab") as file:
            file.write(msgspec.json.encode(evaluation) + b"\n")

    def leave(self, *findings: Ledger | MemoryProfile | ObservedWork | Timeline) -> None:
        """Write the findings of one step, each into its file."""
        for found in findings:
            write_json(self.folder / FILES[type(found)], found)

    def finish(self, manifest: Manifest) -> None:
        """Complete the record. The manifest comes last."""
        self._steps.close()
        os.replace(self.folder / STEPS_PART, self.folder / STEPS)
        write_json(self.folder / MANIFEST, manifest)


def clear_record(folder: Path) -> None:
    """Remove the files of an earlier run. The caller has the folder's lock."""
    names = [MANIFEST, ERROR, STEPS, STEPS_PART, EVALUATIONS, *FILES.values()]
    for name in [*names, *TRACES, FORWARD, BACKWARD, *(f"{rung}.safetensors" for rung in Rung)]:
        (folder / name).unlink(missing_ok=True)
    remove_remains(folder)


def cut_record(folder: Path, step: int) -> None:
    """Remove what a stopped run recorded after `step` steps. The caller has the folder's lock.

    Later tensors stay until the run writes them again. Raises RecordError: an earlier line is damaged.
    """
    for name in (ERROR, *FILES.values()):
        (folder / name).unlink(missing_ok=True)
    _cut_lines(folder / STEPS_PART, Step, before=step)
    _cut_lines(folder / EVALUATIONS, Evaluation, before=step + 1)
    remove_remains(folder)


def remove_remains(folder: Path, *, of_states: bool = False) -> None:
    """Remove unfinished files of a killed process; of states only if no process writes any more."""
    for path in set(folder.glob("*.tmp")) - set(() if of_states else folder.glob(f"{STATE}*")):
        path.unlink(missing_ok=True)
    for path in (folder / CHECKPOINTS).glob(f"*{UNFINISHED}"):
        shutil.rmtree(path, ignore_errors=True)


def leave_failure(folder: Path, failure: Failure) -> None:
    """Write error.json, if the disk has room. Only a cause replaces an earlier failure, a consequence."""
    there = read_failure(folder)
    if there is None or (there.is_consequence and not failure.is_consequence):
        try:
            write_json(folder / ERROR, failure)
        except OSError as error:
            if not no_room(error, folder):  # the failure names a full disk
                print(f"{folder}: cannot write {ERROR}: {error}", file=sys.stderr, flush=True)


def read_failure(folder: Path) -> Failure | None:
    """The failure of a run; None if it did not fail."""
    path = folder / ERROR
    return read_json(path, Failure) if path.is_file() else None


def read_lines(path: Path, type: type[T], *, may_be_torn: bool = False) -> list[T]:
    """Every line of a file of JSON lines, without a last line that a kill tore, if that may be.

    Raises RecordError: the file is missing or damaged.
    """
    try:
        content = path.read_bytes()
        whole = content.rpartition(b"\n")[0] if may_be_torn else content
        return [decode_json(line, type) for line in whole.splitlines()]
    except (OSError, msgspec.DecodeError) as error:
        raise garbled(path, error) from None


def _cut_lines(path: Path, type: type[Step] | type[Evaluation], *, before: int) -> None:
    """Keep the lines of a file before a step. Raises RecordError: a line is damaged."""
    if path.is_file():
        kept = [line for line in read_lines(path, type, may_be_torn=True) if line.step < before]
        write_atomically(path, b"".join(msgspec.json.encode(line) + b"\n" for line in kept))


def require_folder(folder: Path) -> None:
    """Reject a run whose folder was removed. Raises RecordError."""
    if not folder.is_dir():
        raise RecordError(f"{folder} does not exist: put the folder back, or begin a new run")


def file_sums(folder: Path) -> dict[str, str]:
    """SHA-256 of each file, by name, on which a verdict depends, except tensors and checkpoints."""
    paths = [folder / name for name in (REQUEST, MANIFEST, STEPS, EVALUATIONS, LEDGER, WORK)]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}


def read_record(folder: Path, *, requested: bool = True) -> Record:
    """Read a finished run. `requested` is False for numbers from outside our engines.

    Raises RecordError: the run has no manifest, a file cannot be read, or the record does not belong to its
    request: another engine, other devices, missing steps.
    """

    def found(type: type[T]) -> T | None:
        path = folder / FILES[type]
        return read_json(path, type) if path.exists() else None

    require_folder(folder)
    if not (folder / MANIFEST).is_file():
        raise RecordError(f"{folder} has no {MANIFEST}: it is not a finished run")
    if left := next((name for name in (ERROR, STEPS_PART) if (folder / name).exists()), None):
        raise RecordError(f"{folder} has {left} beside {MANIFEST}: two runs were mixed in it")
    record = Record(
        folder=folder,
        manifest=read_json(folder / MANIFEST, Manifest),
        steps=read_lines(folder / STEPS, Step),
        ledger=read_json(folder / LEDGER, Ledger),
        evaluations=read_lines(folder / EVALUATIONS, Evaluation) if (folder / EVALUATIONS).exists() else [],
        timeline=found(Timeline),
        memory=found(MemoryProfile),
        work=found(ObservedWork),
        request=read_json(folder / REQUEST, Request) if requested else None,
    )
    if record.request:
        _require_form(record, record.request)
    return record


def _require_form(record: Record, request: Request) -> None:
    """Reject a record that does not belong to its request. Raises RecordError."""
    manifest, devices = record.manifest, request.experiment.layout.devices
    memory = {"peak_memory_bytes": manifest.peak_memory_bytes, **manifest.resident_bytes}
    for what, value, right in (
        ("engine", manifest.engine, request.engine),
        ("platform", manifest.platform, request.platform),
        ("devices", manifest.devices, devices),
        *((f"devices in {kind}", len(sizes), devices) for kind, sizes in memory.items()),
    ):
        if value != right:
            raise RecordError(
                f"{record.folder / MANIFEST}: {what} = {value} instead of {right}: run it again"
            )
    steps = [step.step for step in record.steps]
    asked = range(request.first_step, request.experiment.train.max_iters)
    if steps != [*asked]:
        pairs = zip(steps, asked, strict=False)
        odd = next((right for found, right in pairs if found != right), asked.start + len(steps))
        has = f"it has {len(steps)} of {len(asked)} steps; step {odd} is missing"
        raise RecordError(f"{record.folder / STEPS}: {has}: run it again")
