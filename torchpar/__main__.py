"""`python -m torchpar RUN_DIR [--exit-with-stdin]`, or `python -m torchpar --doctor`.

Exit codes: 0 done; 1 the run failed; 2 a bad request; 3 the machine lacks something; 128 + n signal n.
Under torchrun (RANK is set) this process becomes that rank; else it is the parent of all ranks.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from compare.contract.experiment import ExperimentError
from compare.contract.record import Failure, write_failure

STDIN_GRACE_S = 5.0


def main() -> int:
    """Parse the command line, and run. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m torchpar", description="Run one engine of torchpar.")
    parser.add_argument("run_dir", nargs="?", type=Path, help="holds request.json; the record goes there")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when standard input ends")
    parser.add_argument("--doctor", action="store_true", help="say as JSON what this environment offers")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # while PyTorch is imported there are no ranks to end
        signal.signal(number, lambda number, frame: os._exit(128 + number))
    if arguments.exit_with_stdin:
        threading.Thread(target=_exit_with_stdin, daemon=True).start()
    if arguments.doctor:
        from torchpar.start import doctor

        print(json.dumps(doctor()))
        return 0
    if arguments.run_dir is None:
        parser.error("RUN_DIR is missing")
    return run(arguments.run_dir)


def run(folder: Path) -> int:
    """Run the request in `folder`, and leave a record or error.json there. Returns the exit code."""
    from torchpar import start
    from torchpar.launch import Interrupted
    from torchpar.watch import RanksFailed

    try:
        request = start.read_request(folder)
        if "RANK" in os.environ:
            start.become_rank(request, folder, os.environ)
        else:
            start.clear_record(folder)
            start.start_ranks(start.validate_data(request), folder)
    except ExperimentError as error:
        return _fail(folder, Failure(message=str(error)), code=2)
    except start.MissingDevicesError as error:
        return _fail(folder, Failure(message=str(error)), code=3)
    except RanksFailed as error:
        return _fail(folder, error.failure, code=1)
    except OSError as error:
        return _fail(folder, Failure(message=f"{folder}: {error}"), code=2)
    except Interrupted as error:
        return 128 + error.signal_number
    return 0


def _fail(folder: Path, failure: Failure, *, code: int) -> int:
    print(failure.message, file=sys.stderr)
    if failure.traceback:
        print(failure.traceback, file=sys.stderr, end="")
    try:
        write_failure(folder, failure)
    except OSError as error:
        print(f"{folder}: cannot leave error.json: {error}", file=sys.stderr)
    return code


def _exit_with_stdin() -> None:
    """End this process and its ranks as SIGTERM does, once nobody holds standard input open any more."""
    while os.read(0, 4096):  # not sys.stdin: its lock must not be held while ranks are forked
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STDIN_GRACE_S)
    os._exit(128 + signal.SIGTERM)  # the main thread is deep in C; the ranks notice that it is gone


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # under torchrun this is a rank, whose process group must not be destroyed (groups.py)
