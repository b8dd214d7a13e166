"""Engines for tests of `shardpair bench`: they take no time, and fail when they are told to."""

import msgspec
from records import make_record

from compare.cli import main
from compare.contract.ceiling import Ceiling
from compare.contract.timing import Window
from compare.execute.launch import EngineError, EnvironmentMissing

ARGUMENTS = ("--engines", "torch-manual", "torch-library", "--run_dir", "b", "--quiet")


class Engines:
    """Stands in for `launch`: leaves a record of a run that took no time, fails, or is interrupted."""

    def __init__(self):
        self.launched: list[str] = []
        self.requests = []
        self.failing: tuple[str, ...] = ()
        self.interrupted_at = 0
        self.loss = {}
        self.threads = iter(())
        """Of each process that is started; one thread where there are no more."""
        self.windows = None
        self.ceilings = [1e8, 1e9, 1e7]
        """FLOP/s, round by round: the machine was somebody else's in the first and in the third."""

    def ceiling(self, side, platform, dtype, python):
        if side == "jaxpar":
            raise EnvironmentMissing("no matmul ceiling: it is shy")
        fast = self.ceilings.pop(0) if self.ceilings else 1e8
        return Ceiling(flops_per_s=fast)

    def __call__(self, request, folder, *, pythons, hosts, on_step):
        self.launched.append(folder.name)
        self.requests.append(request)
        if len(self.launched) == self.interrupted_at:
            folder.mkdir()
            raise KeyboardInterrupt
        if request.engine in self.failing:
            folder.mkdir()
            raise EngineError(f"{request.engine}: <b>no</b> luck", exit_code=1)
        record = make_record(folder, request.experiment, engine=request.engine, tensors={}, ladder=False)
        for step in record.steps:
            on_step(step)
        timing = request.timing
        one = Window(steps=timing.window, wall_s=0.01 * timing.window, cpu_s=0.02 * timing.window)
        manifest = msgspec.structs.replace(
            record.manifest,
            corpus_sha256=request.corpus_sha256,
            threads=next(self.threads, "one"),
            windows=[one] * (timing.windows if self.windows is None else self.windows),
        )
        last = msgspec.structs.replace(record.steps[-1], loss=self.loss.get(request.engine, 2.5))
        steps = [*record.steps[:-1], last]
        return msgspec.structs.replace(record, manifest=manifest, request=request, steps=steps)


def bench(*arguments: str) -> int:
    return main(["bench", "tiny.toml", *ARGUMENTS, *arguments])
