"""`python -m jaxpar`: one process, which drives all devices of a run or of its host.

See `compare.side.main`.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from compare.contract.request import Request
from compare.side.collective_bench import TYPE, CollectiveRequest
from compare.side.main import Side
from compare.side.main import main as main_of
from compare.side.process_states import Heartbeat
from compare.side.processes import Process
from compare.side.supervisor import Supervisor

# JAX is configured before a module that uses it is imported: a backend, once started, keeps its devices.


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
    if isinstance(request, Request):
        supervisor.run(partial(train, request, folder, process, supervisor.heartbeat))
    else:
        supervisor.run(partial(time_collectives, request, folder, process, supervisor.heartbeat))


def train(request: Request, folder: Path, process: Process | None, heartbeat: Heartbeat) -> None:
    """Train the request's experiment."""
    from jaxpar.configuration import configure_jax

    configure_jax(request, process)
    if process:
        from jaxpar.comm.hosts import agree_with_others

        agree_with_others(process, reads=request.experiment)
    heartbeat.at(0, "setting up")
    from jaxpar.train import train as train_engine

    train_engine(request, folder, at=heartbeat.at)


def time_collectives(
    request: CollectiveRequest, folder: Path, process: Process | None, heartbeat: Heartbeat
) -> None:
    """Time the request's collectives."""
    from jaxpar.configuration import configure_products, join_devices

    configure_products(request.platform, TYPE.name)
    join_devices(request.platform, request.ranks, process, timeout_s=request.timeout_s)
    from jaxpar.comm.hosts import agree_with_others
    from jaxpar.measure.bench import run_bench

    if process:
        agree_with_others(process)
    run_bench(request, folder, at=heartbeat.at)


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
