"""Engines without processes: they write made-up records, or fail on request."""

import msgspec

from compare.cli import main
from compare.contract.record import Record, Step
from compare.contract.request import REQUEST, Request
from compare.contract.timing import Window
from compare.system.json_files import write_json
from tests.support.records import make_record, make_steps

ARGUMENTS = ("--engines", "torch-manual", "torch-library", "--run_dir", "b", "--quiet")


class Engines:
    """Stands in for `launch`."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.requests: list[Request] = []
        self.failing: dict[str, BaseException] = {}
        """By case or engine."""
        self.interrupted_at = 0
        self.loss: dict[str, float] = {}
        """The last one of a process that is timed, by engine."""
        self.threads = iter(())
        """Thread counts of the timed processes, in order; afterwards one thread each."""
        self.windows = None

    def steps(self, request: Request) -> list[Step]:
        return make_steps(request.experiment)

    def __call__(self, request, folder, *, pythons, hosts, on_step):
        self.started.append(folder.name)
        self.requests.append(request)
        error = self.failing.get(folder.name) or self.failing.get(request.engine)
        if len(self.started) == self.interrupted_at:
            error = KeyboardInterrupt()
        if error:
            folder.mkdir()
            raise error
        made = {"engine": request.engine, "tensors": None if request.ladder else {}}
        record = make_record(folder, request.experiment, **made, steps=self.steps(request))
        for step in record.steps:
            on_step(step)
        write_json(folder / REQUEST, request)
        record = msgspec.structs.replace(record, request=request)
        return self._timed(record, request) if request.timing else record

    def _timed(self, record: Record, request: Request) -> Record:
        timing = request.timing
        one = Window(steps=timing.window, wall_s=0.01 * timing.window, cpu_s=0.02 * timing.window)
        manifest = msgspec.structs.replace(
            record.manifest,
            corpus_sha256=request.corpus_sha256,
            threads=next(self.threads, "one"),
            windows=[one] * (timing.windows if self.windows is None else self.windows),
        )
        last = msgspec.structs.replace(record.steps[-1], loss=self.loss.get(request.engine, 2.5))
        return msgspec.structs.replace(record, manifest=manifest, steps=[*record.steps[:-1], last])


def bench(*arguments: str) -> int:
    return main(["bench", "tiny.toml", *ARGUMENTS, *arguments])
