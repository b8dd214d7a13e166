"""Run the processes of several hosts on this machine: `python -m compare.execute.loopback`.

The arguments are the number of hosts, the number of processes on each, the folder of the run, and the command
of a process. The first process that fails ends all.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from compare.contract.record import leave_failure
from compare.execute.launchers import LOOPBACK
from compare.side.process_states import find_first_cause
from compare.side.processes import Process

POLL_S = 0.05


def run_hosts(hosts: int, on_host: int, folder: Path, command: Sequence[str]) -> int:
    """Run `command` as each process and wait. Returns the exit code, and writes the cause of a failure."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    places = [Process(n, hosts * on_host, n % on_host, LOOPBACK, port) for n in range(hosts * on_host)]
    processes = [subprocess.Popen(command, env=os.environ | place.variables) for place in places]

    def exit_codes() -> dict[int, int]:
        return {number: code for number, process in enumerate(processes) if (code := process.poll())}

    while not exit_codes():
        if all(process.poll() == 0 for process in processes):
            return 0
        time.sleep(POLL_S)
    cause = find_first_cause(folder, exit_codes, lambda n: f"process {n} on {socket.gethostname()}")
    for process in processes:
        process.kill()
        process.wait()
    leave_failure(folder, cause)
    return cause.exit_code


if __name__ == "__main__":
    sys.exit(run_hosts(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
