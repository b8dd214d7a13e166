"""Time the cases of a study: fresh processes, in rounds whose order rotates, saved after each process."""

from collections.abc import Iterator

import msgspec
from msgspec import field

from compare.contract.request import Request
from compare.execute import load
from compare.execute.launch import EngineError, Prepared
from compare.judge.timed_outcome import FailedLaunch, TimedCase, TimedOutcome
from compare.studies.bench_cases import rotated
from compare.studies.one_process import measure, request_for, with_ceilings
from compare.studies.runner import Runner


class Rounds(Runner[TimedOutcome]):
    """A piece is one process: a case in a round. The round's load and ceilings are measured before it.

    One that fails is told, and tried once more in the next round.
    """

    prepared: Prepared
    busy: float
    """Cores in use by others before the first round."""
    processes: dict[str, tuple[int, TimedCase, Request]] = field(default_factory=dict)

    def pieces(self) -> Iterator[str]:
        result, how = self.outcome, (self.outcome, self.prepared, self.settings)
        requests = {case.name: request_for(case, *how) for case in result.cases}
        self.processes = {
            _place(number, case): (number, case, requests[case.name])
            for number in range(1, result.rounds + 1)
            for case in rotated(result.missing(number), number)
        }
        self.reporter.start({place: asked for place, (*_, asked) in self.processes.items()}, self.folder)
        for number in range(1, self.outcome.rounds + 1):
            if not (missing := self.outcome.missing(number)):
                continue
            busy = self.busy if number == 1 else load.busy_cores()
            self.outcome = with_ceilings(_with_load(self.outcome, number, busy), self.settings)
            for case in rotated(missing, number):
                yield _place(number, case)

    def measured(self, piece: str) -> TimedOutcome:
        """One process, whose folder is removed."""
        how = {"settings": self.settings, "reporter": self.reporter}
        return measure(self.outcome, *self.processes[piece], self.folder / piece, **how)

    def failed(self, piece: str, error: EngineError) -> TimedOutcome:
        number, case, _ = self.processes[piece]
        failure = FailedLaunch(round=number, case=case.name, why=str(error))
        return msgspec.structs.replace(self.outcome, failures=[*self.outcome.failures, failure])

    def kept(self) -> str:
        count = len(self.outcome.measurements)
        return f"Kept: {self.outcome.progress}, {count} processes. {self.rest()}"


def _place(number: int, case: TimedCase) -> str:
    """Folder of one process while it runs, and its name in the progress."""
    return f"round {number}, {case.name}".replace("/", "_")  # which a file of data has


def _with_load(result: TimedOutcome, number: int, busy: float) -> TimedOutcome:
    """The result with what others used before a round, the most if it was begun twice."""
    loads = list(result.circumstances.busy_cores)
    if number <= len(loads):
        loads[number - 1] = max(loads[number - 1], busy)
    else:
        loads.append(busy)
    now = msgspec.structs.replace(result.circumstances, busy_cores=loads)
    return msgspec.structs.replace(result, circumstances=now)
