"""Warm Pythons: `python -m torchpar ...` runs as a fork of a process that has imported torchpar.

An interpreter needs 2 to 4 seconds of CPU time to import a framework, and the tests start four hundred.
`python()` returns a program with the command line of Python. For `-m compare`, `-m jaxpar` and `-m torchpar`
the program asks a server for a fork. The fork gets the arguments, environment, folder, files and signals.
The program ends with the exit code of the fork. Other modules run in the real interpreter. So do programs
with other variables of `READ_AT_IMPORT` than the server has.
`-m tests.support.warm` calls a test's function in a fork that has PyTorch: see `start_forked`.

    server ── fork ── monitor ── fork ── the program, in a session of its own
                         │
    started program: forwards signals; ends when the fork ends; if it is killed, the fork is killed
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import json
import os
import pickle
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import traceback
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, NoReturn

import psutil

from compare.contract.record import Record, read_record
from compare.contract.request import REQUEST, Request
from compare.execute.launch import child_environment
from compare.spec.engines.registry import SIDES
from compare.system.json_files import write_json
from tests.support import processes

PRELOADED = {
    "compare": ("compare.cli", "matplotlib.figure"),
    "jaxpar": (
        "jax",
        "jax.numpy",
        "optax",
        "flax.nnx",
        "jaxlib.mlir.dialects.mhlo",
        "jaxpar.__main__",
        "jaxpar.configuration",
        "jaxpar.train",
    ),
    "torchpar": (
        "torch",
        "numpy.ma",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.optim",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
        "torchpar.__main__",
        "torchpar.train",
    ),
}
READ_AT_IMPORT = ("OMP_", "KMP_", "MKL_", "TORCH", "PYTORCH", "JAX_", "LD_", "MALLOC", "GLIBC", "PYTHON")
"""Beginnings of environment variables that a fork would come too late for."""
SET_BY_IMPORT = "TORCHINDUCTOR_CACHE_DIR"
"""A variable that begins so, and that PyTorch sets for itself and its children."""
MAX_MESSAGE = 100_000
ITSELF = "tests.support.warm"
CLIENT = Path(__file__).with_name("warm_client.py")
REAL = sys.executable
EMPTY_SVG = '<svg viewBox="0 0 1 1"></svg>'
NO_MARK = "0" * processes.MARK_LENGTH
"""The mark of a server: it belongs to no worker."""
_folders: list[Path] = []
_users: list[IO] = []
_servers: list[subprocess.Popen] = []


def python() -> str:
    """The program's path. The first call starts the servers, unless another worker of pytest-xdist has.

    On other systems than Linux it is the real interpreter's.
    """
    if sys.platform != "linux":
        return REAL
    if not _folders:
        session = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex
        folder = Path(tempfile.gettempdir(), f"warm-{session}")
        folder.mkdir(mode=stat.S_IRWXU, exist_ok=True)
        _folders.append(folder)
        _users.append((folder / "users").open("w"))
        fcntl.flock(_users[0], fcntl.LOCK_SH)
        with (folder / "start").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "python").exists():
                start_servers(folder)
    return str(_folders[0] / "python")


def start_servers(folder: Path) -> None:
    """Write the program, and start a server for each package."""
    (folder / "python").write_text(f"#!{REAL} -ISE\n{CLIENT.read_text()}")
    settings = REAL, str(folder), ITSELF, READ_AT_IMPORT, SET_BY_IMPORT
    (folder / "python.json").write_text(json.dumps(settings))
    (folder / "python").chmod(stat.S_IRWXU)
    for module, (first, *_) in PRELOADED.items():
        if importlib.util.find_spec(first):  # one side may be tested alone
            start_server(module, folder)


def start_server(module: str, folder: Path) -> None:
    """Start the server of a package's programs, in the environment that the harness starts them in."""
    side = SIDES.get(module)
    environment = child_environment(side, "cpu") if side else dict(os.environ)
    begin = f"import sys; sys.path[:0] = {sys.path!r}; from tests.support import warm; "
    begin += f"warm.serve({module!r}, {str(folder)!r})"
    environment[processes.MARK] = NO_MARK
    (folder / f"{module}.begun").touch()  # from now on clients wait for it
    _servers.append(processes.start([REAL, "-c", begin], env=environment, stdout=None, stderr=None))


def start_forked(function: Callable[..., int], *arguments: object, **options) -> subprocess.Popen:
    """Call a picklable function, which returns the exit code, in a fork that has imported PyTorch."""
    command = [python(), "-m", ITSELF, json.dumps(sys.path), pickle.dumps((function, arguments)).hex()]
    return processes.start(command, **options)


def run_forked(function: Callable[..., int], *arguments: object) -> subprocess.CompletedProcess:
    return processes.ended(start_forked(function, *arguments))


def run_torchpar(folder: Path, request: Request) -> Record:
    """Write the request, and run `python -m torchpar FOLDER`, which must succeed. Returns its record."""
    folder.mkdir(exist_ok=True)
    write_json(folder / REQUEST, request)
    command = [python(), "-m", "torchpar", str(folder)]
    done = processes.run(command, env=child_environment(SIDES["torchpar"], "cpu"))
    assert done.returncode == 0, done.stdout + done.stderr
    return read_record(folder)


def program(pid: int) -> psutil.Process:
    """The program that a started process stands for: the fork behind a warm one, any other itself."""
    for note in [folder / str(pid) for folder in _folders]:
        with contextlib.suppress(FileNotFoundError, ValueError):  # not begun, or half written
            return psutil.Process(int(note.read_text()))
    return psutil.Process(pid)


def all_of(pid: int) -> set[int]:
    """A started process, the fork that it stands for, and the monitor between them."""
    fork = program(pid)
    return {pid, fork.pid, fork.ppid()}


def end() -> None:
    """End the servers, if this process has started them, when no other worker needs them any more."""
    for users in _users:
        if _servers:
            fcntl.flock(users, fcntl.LOCK_EX)
        users.close()
    for server in _servers:
        server.kill()
        server.wait()
    for folder in _folders if _servers else ():
        shutil.rmtree(folder, ignore_errors=True)
    for kept in (_users, _servers, _folders):
        kept.clear()


def serve(module: str, folder: str) -> NoReturn:
    """Import what `module` needs, and fork for whoever asks."""
    at_import = {key: value for key, value in os.environ.items() if key.startswith(READ_AT_IMPORT)}
    at_import.pop(SET_BY_IMPORT, None)
    if module == "compare":
        sys.executable = os.path.join(folder, "python")  # with which it starts its sides
    try:
        for name in PRELOADED[module]:
            importlib.import_module(name)
    except BaseException:  # a real interpreter then prints the error
        Path(folder, f"{module}.begun").unlink()
        raise
    if module == "compare":
        leave_pictures_out()
    gc.collect()
    gc.freeze()  # a collection in a fork would visit, and so copy, all that is imported
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.path.join(folder, module))
    listener.listen(64)
    unfinished = Path(folder, f"{module}.part")
    unfinished.write_text(json.dumps(at_import))
    unfinished.rename(Path(folder, f"{module}.json"))  # now clients come
    signal.signal(signal.SIGCHLD, lambda number, frame: reap())
    while True:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            monitor(connection, Path(folder))
        connection.close()


def leave_pictures_out() -> None:
    """Leave pictures empty: to draw one takes a tenth of a second.

    Tests that look at pictures draw them in their own process, or with the real interpreter.
    """
    from markupsafe import Markup

    from compare.show import page

    page.svg = lambda figure: Markup(EMPTY_SVG)


def reap() -> None:
    """Wait for the monitors that have ended, so that their CPU time counts for the tests."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def monitor(connection: socket.socket, folder: Path) -> NoReturn:
    """Fork the program that a client requests, forward signals to it, and send the client its exit code."""
    message, files, _, _ = socket.recv_fds(connection, MAX_MESSAGE, 3)
    asked = json.loads(message)
    mark_as(asked["environment"].get(processes.MARK, NO_MARK))
    client, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    child = os.fork()
    if not child:
        connection.close()
        become(asked, files)
    note = folder / str(client)
    note.write_text(str(child))
    for file in files:
        os.close(file)
    ended = os.pidfd_open(child)
    while True:
        ready, _, _ = select.select([connection, ended], [], [])
        if ended in ready:
            break
        number = connection.recv(1) or bytes([signal.SIGKILL])  # a client that is gone was killed
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, number[0])
        if number[0] == signal.SIGKILL:
            break
    _, status = os.waitpid(child, 0)
    note.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        connection.send(str(status).encode())
    os._exit(0)


def mark_as(mark: str) -> None:
    """Become a process of the worker with this mark: change the environment that other processes see."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = map(int, fields[47:49])  # env_start, env_end
    name = f"{processes.MARK}=".encode()
    place = begin + ctypes.string_at(begin, end - begin).index(name) + len(name)
    ctypes.memmove(place, mark.encode(), processes.MARK_LENGTH)


def main() -> int:
    """The program of `start_forked`. Returns the function's exit code."""
    path, called = sys.argv[1:]
    sys.path[:] = json.loads(path)
    function, arguments = pickle.loads(bytes.fromhex(called))
    return function(*arguments)


def use_sources(path: str) -> None:
    """Import the project's packages again, without the frameworks, if PYTHONPATH has other copies of them."""
    folders = [folder for folder in path.split(os.pathsep) if folder and folder not in sys.path]
    copied = {package for folder in folders for package in PRELOADED if Path(folder, package).is_dir()}
    if not copied:
        return
    if "compare" in copied:  # which the sides import
        copied |= PRELOADED.keys()
    sys.path[:0] = folders
    gloo = sys.modules.get("torchpar.comm.gloo")
    if gloo and "torchpar" in copied:  # PyTorch registers a backend once
        del gloo.dist.Backend._plugins[gloo.BACKEND.upper()]
        delattr(gloo.dist.Backend, gloo.BACKEND.upper())
    for name in [name for name in sys.modules if name.partition(".")[0] in copied]:
        del sys.modules[name]


def become(asked: dict, files: list[int]) -> NoReturn:
    """From now on be what `python -m MODULE` would have been."""
    module: str = asked["module"]
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    use_sources(os.environ.get("PYTHONPATH", ""))
    for number in (signal.SIGINT, signal.SIGTERM):
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in asked["ignored"] else default)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
    sys.stderr.reconfigure(errors="backslashreplace", line_buffering=True)
    program = sys.modules[__name__] if module == ITSELF else importlib.import_module(f"{module}.__main__")
    sys.argv = [str(program.__file__), *asked["arguments"]]
    code: object = 1
    try:
        code = program.main()
    except SystemExit as ended:
        code = ended.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    if module == "compare":
        atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 0)
