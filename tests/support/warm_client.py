"""The program of `warm.python()`: a copy of this file, with the real interpreter in its first line.

It starts 100 times as fast as the real program, because it imports few modules. Its settings are in the JSON
file with its name.
"""

import json
import os
import signal
import sys
import time

with open(sys.argv[0] + ".json") as settings:
    REAL, FOLDER, FORKED, AT_IMPORT, SET_BY_IMPORT = json.load(settings)


def run_real() -> None:
    """Become the real interpreter, with the same command line."""
    os.execv(REAL, [REAL, *sys.argv[1:]])


module = sys.argv[2] if sys.argv[1:2] == ["-m"] and len(sys.argv) > 2 else ""
server = os.path.join(FOLDER, "torchpar" if module == FORKED else module)
while os.path.exists(server + ".begun") and not os.path.exists(server + ".json"):
    time.sleep(0.02)
at_import = None
try:
    with open(server + ".json") as file:
        at_import = json.load(file)
except (OSError, ValueError):
    run_real()
own = {key: value for key, value in os.environ.items() if key.startswith(tuple(AT_IMPORT))}
own.pop(SET_BY_IMPORT, None)
path, server_path = own.pop("PYTHONPATH", ""), at_import.pop("PYTHONPATH", "")
first, _, others = path.partition(os.pathsep)
# A patched copy of the source comes before the server's path: see warm.use_sources.
is_copy = module != "compare" and others == server_path and first not in server_path.split(os.pathsep)
if (own != at_import or not (path == server_path or is_copy)) and module != FORKED:
    run_real()

import socket  # noqa: E402  most programs that end above do not need it

connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
ignored = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) == signal.SIG_IGN]
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    if number not in ignored:
        signal.signal(number, lambda number, frame: connection.send(bytes([number])))
try:
    connection.connect(server)
    request = {
        "module": module,
        "arguments": sys.argv[3:],
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "ignored": [int(n) for n in ignored],
    }
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
except OSError:
    run_real()
status = int(connection.recv(16) or b"9")
if os.WIFSIGNALED(status):
    if os.WTERMSIG(status) != signal.SIGKILL:
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.WEXITSTATUS(status))
