"""`python -m jaxpar`: one process, which drives all devices of a run or of its host.

See `compare.side.main`. JAX is configured before a module that uses it is imported, because a backend keeps
the devices with which it starts.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from compare.contract.request import Request
from compare.side.collective_bench import CollectiveRequest
from compare.side.main import Side
from compare.side.main import main as main_of
from compare.side.process_states import Heartbeat
from compare.side.processes import Process
from compare.side.supervisor import Supervisor


def run(request: Request | CollectiveRequest, folder: Path, process: Process | None) -> None:
    """Train or time collectives, alone or as one of several processes."""
    supervisor = Supervisor(
        side="jaxpar",
        folder=folder,
        number=process.number if process else 0,
        count=process.count if process else 1,
        timeout_s=request.timeout_s,
        is_consequence=_is_consequence,
    )
    supervisor.run(partial(work, request, folder, process, supervisor.heartbeat))


def work(
    request: Request | CollectiveRequest, folder: Path, process: Process | None, heartbeat: Heartbeat
) -> None:
    """Configure JAX, join the other processes, and do the request."""
    from jaxpar.configuration import configure_jax

    configure_jax(request, process)
    if process:
        from jaxpar.comm.hosts import agree_with_others

        agree_with_others(process, reads=request.experiment if isinstance(request, Request) else None)
    heartbeat.at(0, "setting up")
    if isinstance(request, CollectiveRequest):
        from jaxpar.measure.bench import run_bench

        run_bench(request, folder, at=heartbeat.at)
    else:
        from jaxpar.train import train

        train(request, folder, at=heartbeat.at)


def answer(arguments: argparse.Namespace) -> object:
    """The answer to a question."""
    from jaxpar.questions import answer

    return answer(arguments)


def _is_consequence(error: BaseException) -> bool:
    from jaxpar.comm.hosts import is_consequence

    return is_consequence(error)


def main() -> int:
    """Run or answer. Returns the exit code."""
    return main_of(Side("jaxpar", run, answer))


if __name__ == "__main__":
    sys.exit(main())
