"""Start one engine as `python -m SIDE RUN_DIR`, watch it, end it if it hangs, and read its record.

The harness never imports a framework: each engine is a fresh process of its own, which may belong to
another environment. What an engine has to say it writes to its folder; nothing is read from its output
except, when it died without a word, the last lines of its log.

SIGINT that was ignored at the start (`shardpair run &` in a script, `nohup`) stays ignored, here and in the
engines: Ctrl-C is for what runs in the foreground.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from compare.contract import record as files
from compare.contract.record import Record, Step
from compare.contract.request import Request
from compare.execute.failures import LOG, why
from compare.execute.folders import remove_run_dir
from compare.execute.launchers import HERE, Hosts, print_lines
from compare.execute.this_machine import gpu_memories
from compare.execute.watch import BEFORE_FIRST_STEP, NOT_STARTED, watch
from compare.numerics.data import open_corpus, standard_library_text
from compare.side.collective_bench import CollectiveRequest
from compare.side.ending import BAD_REQUEST, DONE, FAILED, MISSING, STOPPED, StopRequest
from compare.side.process_states import START, State, write_state
from compare.side.processes import VARIABLES
from compare.spec.engines.engine import Side
from compare.spec.engines.registry import side_of
from compare.spec.experiment import MAX_CPU_DEVICES, Data, Experiment, ExperimentError, Layout, edited
from compare.system.disk import write_atomically

POLITE_S = 3.0
PROBE_S = 60.0
LOOK = f"""
test -e "$1" || {{ echo "missing on $SLURMD_NODENAME" >&2; exit {BAD_REQUEST}; }}
(: >"$1.$SLURM_PROCID") || exit {BAD_REQUEST}
rm "$1.$SLURM_PROCID"
command -v "$2" >/dev/null || {{ echo "$SLURMD_NODENAME has no $2" >&2; exit {MISSING}; }}
echo "$SLURM_PROCID $SLURMD_NODENAME"
"""
"""What each host is asked, with a file in the folder of a run and an interpreter."""


class EngineError(RuntimeError):
    """An engine did not finish. The message is one line: the engine and its first failure."""

    def __init__(self, message: str, *, exit_code: int, log: Path | None = None):
        super().__init__(message)
        self.exit_code = exit_code
        self.log = log


class EnvironmentMissing(RuntimeError):
    """This machine lacks something that the experiment needs. The message is one line."""


def prepare(experiment: Experiment, folder: Path) -> tuple[Data, str]:
    """Freeze and validate the data in the folder of a run, and take its digest: the last early failure.

    Any process in any place then reads the same tokens: the standard library's text is copied, because the
    two sides may run on two versions of Python, and a relative path becomes absolute. The folder is removed
    if the data is bad. Raises ExperimentError.
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
    """Refuse a layout for more devices than there are, or than hosts divide.

    Raises ExperimentError with both numbers, EnvironmentMissing for platform gpu without a GPU.
    """
    hosts = hosts.under(experiment.layout)
    hosts.require(experiment.layout)
    wanted = experiment.layout.devices // hosts.count
    if platform == "cpu" and wanted > MAX_CPU_DEVICES:
        raise ExperimentError(
            f"the layout needs {wanted} devices; on CPU at most {MAX_CPU_DEVICES} virtual ones make "
            f"sense: lower the degrees of the layout"
        )
    if platform == "gpu" and hosts.launcher == "local":  # a launcher's hosts have the GPUs, and not this one
        if not (gpus := visible_gpus()):
            raise EnvironmentMissing("--platform gpu: no NVIDIA GPU is visible here; use --platform cpu")
        if wanted > gpus:
            raise ExperimentError(
                f"the layout needs {wanted} devices and {gpus} GPUs are visible: lower the degrees of the "
                f"layout, or use --platform cpu"
            )


def visible_gpus() -> int:
    """Number of NVIDIA GPUs that this process may use, asked without loading a framework."""
    chosen, there = os.environ.get("CUDA_VISIBLE_DEVICES"), len(gpu_memories())
    named = [item for item in (chosen or "").split(",") if item.strip() not in ("", "-1")]
    return there if chosen is None else min(there, len(named))


def launch(
    request: Request,
    folder: Path,
    *,
    pythons: Mapping[str, str] | None = None,
    hosts: Hosts = HERE,
    on_step: Callable[[Step], None] = lambda step: None,
    source: Path | None = None,
) -> Record:
    """Train with one engine in a new folder, and return its record. Raises as `run_side`."""
    layout = request.experiment.layout
    run_side(
        side_of(request.engine),
        request,
        folder,
        name=request.engine,
        layout=layout,
        pythons=pythons,
        hosts=hosts.under(layout),
        on_step=on_step,
        source=source,
    )
    return files.read_record(folder)


def run_side(
    side: Side,
    request: Request | CollectiveRequest,
    folder: Path,
    *,
    name: str,
    layout: Layout,
    options: Sequence[str] = (),
    pythons: Mapping[str, str] | None = None,
    hosts: Hosts = HERE,
    on_step: Callable[[Step], None] = lambda step: None,
    source: Path | None = None,
) -> None:
    """Run `python -m SIDE OPTIONS FOLDER` to its end; the folder is made, for the request and the log.

    Without `options` it trains as the request says; `name` is for messages, the layout's devices are spread
    over the hosts, and a side without an interpreter in `pythons` has this one. Packages in `source` come
    before the installed ones.

    Raises:
        EngineError: the engine failed, died, or made no progress for request.timeout_s. The folder has an
            error.json with the same words.
        ExperimentError: a host does not see the folder, or srun refuses an option.
        KeyboardInterrupt: Ctrl-C, after ending every process of the engine.
    """
    if StopRequest.came:
        raise EngineError(f"{name}: {BEFORE_FIRST_STEP}", exit_code=STOPPED)
    folder.mkdir(parents=True)
    files.write_json(folder / files.REQUEST, request)
    python = (pythons or {}).get(side.name, sys.executable)
    command, *elsewhere = hosts.commands(python, side, folder, layout=layout, options=options)
    names = ready_hosts(hosts, folder, python, name) if hosts.launcher == "slurm" else list(hosts.slots)
    on_host = hosts.processes_on_host(side, layout)
    for number in range(len(names) * on_host):
        where = NOT_STARTED if elsewhere and number >= on_host else START
        write_state(folder, State(number=number, host=names[number // on_host], where=where))
    print_lines(hosts, elsewhere, side, request.platform, source)
    with (folder / LOG).open("wb") as log:
        # A session of its own, so that one signal reaches every rank; its standard input is a pipe that
        # closes when we die, however we die, and the engine ends itself then.
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
    launcher = "srun" if hosts.launcher == "slurm" else ""
    cause = why(process.returncode, folder, ended, launcher)
    files.leave_failure(folder, cause)  # unless the engine could write_state it itself
    said = cause.message
    message = said if said.startswith(f"{name} ") else f"{name}: {said}"
    raise EngineError(message, exit_code=cause.exit_code, log=folder / LOG)


def ready_hosts(hosts: Hosts, folder: Path, python: str, name: str) -> list[str]:
    """The names of SLURM's hosts in their order, all of which can write into a folder, and have a Python.

    Raises:
        ExperimentError: the folder is not shared, or srun refuses an option, in its words.
        EngineError: an interpreter is missing, or srun reaches not all hosts, twice.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix="probe.") as probe:
        command = [*hosts.srun(1), "sh", "-c", LOOK, "sh", probe.name, python]
        for _ in range(2):  # a link may be down for a moment
            try:
                done = subprocess.run(
                    command, input="", capture_output=True, text=True, check=False, timeout=PROBE_S
                )
                said, code = " ".join(done.stderr.split()) or "srun failed", done.returncode
            except subprocess.TimeoutExpired:
                said, code = f"srun began nothing in {PROBE_S:g} s: is there another step?", FAILED
            if code in (DONE, BAD_REQUEST, MISSING):
                break
    if hosts.options and any(words in said for words in ("unrecognized option", "Invalid --")):
        raise ExperimentError(f"--launcher_options {' '.join(hosts.options)}: {said}")
    if code == BAD_REQUEST:
        raise ExperimentError(f"{folder}: {said}: give --run_dir on a file system that all hosts share")
    if code:
        raise EngineError(f"{name}: {said}", exit_code=MISSING)
    names = dict(line.split() for line in done.stdout.splitlines())
    return [names[str(number)] for number in range(hosts.count)]


def _end(process: subprocess.Popen) -> None:
    """End the engine and whatever it started: politely, then for certain, also if Ctrl-C comes again."""
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
    """The environment of a side's Python, which must not take itself for a rank of who started us.

    Packages in `source` come before the installed ones.
    """
    inherited = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    if source:
        folders = [str(source.absolute()), inherited.get("PYTHONPATH", "")]
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    on_cpu = side.environment_on_cpu if platform == "cpu" else {}
    return {**side.environment, **with_safe_path(inherited), **on_cpu}


def with_safe_path(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` of a Python that imports what is installed, and never from the current folder.

    `python -m SIDE` would execute a `numpy.py` that lies where the user works. PYTHONSAFEPATH, unlike `-P`,
    also reaches what that Python starts. Our source tree comes last, if we run from one.
    """
    root = Path(__file__).parents[2]
    folders = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
    if (root / "pyproject.toml").is_file():
        folders.append(str(root))
    path = {"PYTHONPATH": os.pathsep.join(folders)} if folders else {}
    return {**environment, "PYTHONSAFEPATH": "1", **path}
