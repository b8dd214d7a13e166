"""Start one engine as `python -m SIDE RUN_DIR`, watch it, end it if it hangs, and read its record.

The harness imports no framework: each engine is a new process, whose Python may belong to another
environment. An engine reports through files in its folder. Its log is read only if it ended without an error
file.

A SIGINT that is ignored at the start (`shardpair run &` in a script, `nohup`) stays ignored, also in the
engines.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from compare.contract import record as files
from compare.contract.record import Record, Step
from compare.contract.request import Request
from compare.execute.failures import LOG, find_cause
from compare.execute.folders import remove_run_dir
from compare.execute.launchers import HERE, Hosts, print_lines
from compare.execute.this_machine import gpu_memories
from compare.execute.watch import NOT_STARTED, STOPPED_EARLY, watch
from compare.numerics.data import open_corpus, standard_library_text
from compare.side.collective_bench import CollectiveRequest
from compare.side.ending import STOPPED, StopRequest
from compare.side.process_states import START, State, write_state
from compare.side.processes import VARIABLES
from compare.spec.engines.engine import Side
from compare.spec.engines.registry import side_of
from compare.spec.experiment import MAX_CPU_DEVICES, Data, Experiment, ExperimentError, Layout, edited
from compare.system.disk import write_atomically

POLITE_S = 3.0


class EngineError(RuntimeError):
    """An engine did not finish. The message is one line: the engine and its first failure."""

    def __init__(self, message: str, *, exit_code: int, log: Path | None = None):
        super().__init__(message)
        self.exit_code = exit_code
        self.log = log


class EnvironmentMissing(RuntimeError):
    """This machine lacks something that the experiment needs. The message is one line."""


def prepare(experiment: Experiment, folder: Path) -> tuple[Data, str]:
    """Check the data and freeze it in the folder of a run. Returns the frozen data and its SHA-256.

    All processes then read the same tokens: the standard library's text is copied, because the sides may run
    on two versions of Python, and a relative path becomes absolute. Invalid data raises ExperimentError, and
    the folder is removed.
    """
    source = experiment.data.source
    try:
        if source == "stdlib":
            text = folder / "stdlib.txt"
            write_atomically(text, standard_library_text())
            source = str(text.absolute())
        elif source != "synthetic":
            source = str(Path(source).absolute())
        frozen = edited(experiment, {"data": {"source": source}})
        corpus = open_corpus(frozen)
    except BaseException:
        remove_run_dir(folder)
        raise
    return frozen.data, corpus.sha256


def require_devices(experiment: Experiment, platform: str, hosts: Hosts = HERE) -> None:
    """Reject a layout that needs more devices than there are, or whose devices the hosts do not divide.

    Raises ExperimentError with both numbers; EnvironmentMissing if there is no GPU for platform gpu.
    """
    hosts = hosts.for_layout(experiment.layout)
    hosts.require_layout(experiment.layout)
    needed = experiment.layout.devices // hosts.count
    if platform == "cpu" and needed > MAX_CPU_DEVICES:
        raise ExperimentError(
            f"the layout needs {needed} devices; platform cpu has at most {MAX_CPU_DEVICES}: lower the "
            "degrees of the layout"
        )
    if platform == "gpu" and hosts.launcher == "local" and not hosts.elsewhere:  # other hosts have other GPUs
        if not (gpus := visible_gpus()):
            raise EnvironmentMissing("--platform gpu: no NVIDIA GPU is visible here; use --platform cpu")
        if needed > gpus:
            raise ExperimentError(
                f"the layout needs {needed} devices and {gpus} GPUs are visible: lower the degrees of the "
                f"layout, or use --platform cpu"
            )


def visible_gpus() -> int:
    """The number of NVIDIA GPUs that this process may use, found without a framework."""
    chosen, available = os.environ.get("CUDA_VISIBLE_DEVICES"), len(gpu_memories())
    named = [item for item in (chosen or "").split(",") if item.strip() not in ("", "-1")]
    return available if chosen is None else min(available, len(named))


def launch(request: Request, folder: Path, **how: Any) -> Record:
    """Train with one engine in a new folder, and return its record. Arguments and errors as in `run_side`."""
    engine, layout = request.engine, request.experiment.layout
    run_side(side_of(engine), request, folder, name=engine, layout=layout, **how)
    return files.read_record(folder)


def run_side(
    side: Side,
    request: Request | CollectiveRequest,
    folder: Path,
    *,
    name: str,
    layout: Layout,
    pythons: Mapping[str, str],
    hosts: Hosts = HERE,
    on_step: Callable[[Step], None] = lambda step: None,
    source: Path | None = None,
) -> None:
    """Run `python -m SIDE FOLDER` to its end in a new folder, with the request and a log in it.

    The folder of a request that continues has the record of a stopped run.

    Args:
        name: for messages.
        layout: its devices are spread over the hosts.
        pythons: an interpreter by side; this one if a side has none.
        on_step: called with each step as it is written.
        source: a folder with packages that come before the installed ones.

    Raises:
        EngineError: the engine failed, or made no progress for request.timeout_s; error.json has the cause.
        ExperimentError: the hosts do not divide the layout.
        KeyboardInterrupt: Ctrl-C, after all processes of the engine have ended.
    """
    if StopRequest.came:
        raise EngineError(f"{name}: {STOPPED_EARLY}", exit_code=STOPPED)
    folder.mkdir(parents=True, exist_ok=isinstance(request, Request) and bool(request.continues))
    files.write_json(folder / files.REQUEST, request)
    python, hosts = pythons.get(side.name, sys.executable), hosts.for_layout(layout)
    options = ["--collectives"] if isinstance(request, CollectiveRequest) else []
    command, *elsewhere = hosts.commands(python, side, folder, layout=layout, options=options)
    on_host = hosts.processes_on_host(side, layout)
    for place, host in enumerate(hosts.slots):
        for number in range(place * on_host, (place + 1) * on_host):
            write_state(folder, State(number=number, host=host, where=NOT_STARTED if place else START))
    print_lines(hosts, elsewhere, side, request.platform, source)
    with (folder / LOG).open("wb") as log:
        # A session of its own, so that one signal reaches every rank. Its standard input is a pipe that
        # closes when this process ends, however it ends; the engine ends itself then.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=child_environment(side, request.platform, source),
        )
        try:
            ended = watch(process, folder, hosts, timeout_s=request.timeout_s, on_step=on_step)
        finally:
            _end(process)
            files.remove_remains(folder, of_states=not elsewhere)
    if not ended and not process.returncode:
        return
    cause = find_cause(process.returncode, folder, ended)
    files.leave_failure(folder, cause)
    message = cause.message if cause.message.startswith(f"{name} ") else f"{name}: {cause.message}"
    raise EngineError(message, exit_code=cause.exit_code, log=folder / LOG)


def _end(process: subprocess.Popen) -> None:
    """End the engine and all that it started: by SIGTERM, then by SIGKILL, also if Ctrl-C comes again."""
    try:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=POLITE_S)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin:
            process.stdin.close()


def child_environment(side: Side, platform: str, source: Path | None = None) -> dict[str, str]:
    """The environment of a side's Python, without this process's place in a launch; `source` as in
    `run_side`."""
    inherited = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    if source:
        folders = [str(source.absolute()), inherited.get("PYTHONPATH", "")]
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    on_cpu = side.environment_on_cpu if platform == "cpu" else {}
    return {**side.environment, **with_safe_path(inherited), **on_cpu}


def with_safe_path(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a Python that imports installed packages, and nothing from the current folder.

    `python -m SIDE` would execute a `numpy.py` in the user's folder. PYTHONSAFEPATH, unlike `-P`, also
    reaches the processes that this Python starts. If shardpair runs from a source tree, the tree comes last.
    """
    root = Path(__file__).parents[2]
    folders = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
    if (root / "pyproject.toml").is_file():
        folders.append(str(root))
    path = {"PYTHONPATH": os.pathsep.join(folders)} if folders else {}
    return {**environment, "PYTHONSAFEPATH": "1", **path}
