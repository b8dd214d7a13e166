"""`python -m SIDE`: its command line, and what an error that ends it is worth.

    python -m SIDE RUN_DIR                  do RUN_DIR/request.json, and leave a record there
    python -m SIDE --collectives RUN_DIR    time collectives instead (`compare.side.collective_bench`)
    python -m SIDE --QUESTION               print the answer as a line of JSON

Exit codes: 0 done; 1 the run failed; 2 a bad request, or RUN_DIR is in use; 3 this machine lacks something;
4 it was asked to end early, and saved its state; 128 + n signal n. Other than 0, RUN_DIR/error.json says why,
unless another run is in RUN_DIR. A SIGINT that is ignored at the start, as of a script's background job,
stays so.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from compare.contract.record import Failure
from compare.side.ending import BAD_REQUEST, FAILED, MISSING, STOPPED, DivergedError, StoppedEarly
from compare.spec.experiment import ExperimentError, one_line
from compare.system.disk import no_room
from compare.system.facts import MissingDevicesError
from compare.system.tensors import RecordError

CODES: dict[type[Exception], int] = {
    StoppedEarly: STOPPED,
    DivergedError: FAILED,
    ExperimentError: BAD_REQUEST,
    RecordError: BAD_REQUEST,
    MissingDevicesError: MISSING,
    ImportError: MISSING,
}
"""Of errors whose message says all."""


class RunFailed(Exception):
    """The run failed; `failure` says which of its processes did, and why."""

    def __init__(self, failure: Failure):
        super().__init__(failure.message)
        self.failure = failure


def told_by(error: BaseException, folder: Path | None = None) -> Failure | None:
    """An error that says all by itself, or a full disk, as error.json states it; None of a bug."""
    if isinstance(error, RunFailed):
        return error.failure
    full = no_room(error, folder)
    code = FAILED if full else next((code for of, code in CODES.items() if isinstance(error, of)), None)
    return None if code is None else Failure(message=full or one_line(error), exit_code=code)


def parse_arguments(
    side: str, asked_in_json: Mapping[str, str], arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """A side's command line (default: this process's); `question` is the one that is asked, or ''.

    The side answers `--doctor` and `--convert`, and `asked_in_json`: what is answered, by question.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {side}", description="Run one engine.")
    parser.add_argument("run_dir", nargs="?", type=Path, help="holds request.json; the record goes there")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when standard input ends")
    parser.add_argument("--collectives", action="store_true", help="time collectives, not a training")
    parser.add_argument("--doctor", action="store_true", help="print what this environment offers, as JSON")
    parser.add_argument(
        "--convert", nargs=2, type=Path, metavar=("FROM", "TO"), help="a checkpoint from or to another form"
    )
    parser.add_argument("--base", default="", metavar="JSON", help="the experiment, if FROM does not say it")
    for question, subject in asked_in_json.items():
        parser.add_argument(f"--{question}", metavar="JSON", help=f"print {subject}, as JSON")
    found = parser.parse_args(arguments)
    questions = ("doctor", "convert", *asked_in_json)
    found.question = next((question for question in questions if getattr(found, question)), "")
    if found.run_dir is None and not found.question:
        parser.error("RUN_DIR is missing")
    return found
