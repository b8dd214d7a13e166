"""Progress of a running comparison: engine, step, rate and remaining time.

Times are handed in, so that all of this can be tested without waiting.
"""

import statistics
from collections.abc import Collection, Mapping
from pathlib import Path

from compare.contract.record import STEPS_PART, Step
from compare.contract.request import Request
from compare.spec.engines.registry import ENGINES, side_of
from compare.terminal import human_seconds

SHORTEST_S = 10.0  # between two lines, whatever there is to say
LONGEST_S = 60.0  # without a line, at first
STRETCH = 0.05  # of the time since the start: a run of hours has lines for hours


class Pace:
    """Speed of the engines, as far as it is known.

    Args:
        requests: of all cases, in the order in which they run.
        folder: of the comparison; each case has its own in it.
        finished: cases that need not run.
        now: the time, in seconds from anywhere.
    """

    def __init__(self, requests: Mapping[str, Request], folder: Path, finished: Collection[str], now: float):
        self._requests, self._folder = requests, folder
        self._waiting = [name for name in requests if name not in finished]
        self._noun = "engine" if requests.keys() <= ENGINES.keys() else "case"
        self._start_ups_s: list[float] = []
        self._steps_s: list[float] = []
        self._begun = now
        self.name = ""
        self.last: Step | None = None

    def begin(self, name: str, now: float) -> None:
        """A case starts."""
        self._waiting.remove(name)
        self.name, self.last = name, None
        self._begun, self._first, self._latest = now, now, now

    def step(self, step: Step, now: float) -> None:
        """The case has recorded a step."""
        if self.last is None:
            self._first = now
        self.last, self._latest = step, now

    def end(self) -> None:
        """The case has ended: what it took is what the next ones are expected to take."""
        step_s = self._step_s()
        if step_s is not None:
            self._start_ups_s.append(self._first - self._begun)
            self._steps_s.append(step_s)

    @property
    def steps(self) -> int:
        """Number of steps that the case is asked for."""
        return self._requests[self.name].experiment.train.max_iters

    @property
    def done(self) -> int:
        """Number of steps that it has recorded."""
        return 0 if self.last is None else self.last.step + 1

    def place(self) -> str:
        """Name of the case among others: `engine 2 of 4: jax-manual`, or the name alone if there is one."""
        if len(self._requests) == 1:
            return self.name
        number = list(self._requests).index(self.name) + 1
        return f"{self._noun} {number} of {len(self._requests)}: {self.name}"

    def doing(self) -> str:
        """The step it is at; before the first, what it does as far as its folder tells."""
        if self.last is not None:
            return f"step {self.done} of {self.steps}{', finishing' if self.done == self.steps else ''}"
        if not (self._folder / self.name / STEPS_PART).is_file():
            return "starting"
        return side_of(self._requests[self.name].engine).before_first_step

    def figures(self, now: float) -> str:
        """Loss, tokens/s, time gone and time left, as far as they are known."""
        loss = [f"loss {self.last.loss:.4f}"] if self.last else []
        gone = f"{human_seconds(now - self._begun)} so far"
        return ", ".join([*loss, *self._tokens(), gone, *self._left(now)])

    def line(self, now: float) -> str:
        """All of it in one line."""
        return f"{self.place()}: {self.doing()}, {self.figures(now)}"

    def outcome(self, now: float) -> str:
        """Duration of the case, once it has ended: well, or before its last step."""
        steps = "1 step" if self.done == 1 else f"{self.done} steps"
        how = steps if self.done == self.steps else f"stopped after {steps} of {self.steps}"
        start_up = f" ({human_seconds(self._first - self._begun)} to the first step)" if self.last else ""
        loss = [f"loss {self.last.loss:.4f}"] if self.last else []
        took = f"{how} in {human_seconds(now - self._begun)}{start_up}"
        return f"{self.place()}: {', '.join([took, *loss, *self._tokens()])}"

    def left_s(self, now: float) -> float | None:
        """Seconds until the last case ends, None while nothing is known.

        Cases that have not begun are taken to start up and to step like those before them, on average: an
        estimate, as engines differ.
        """
        step_s, latest = self._step_s(), self._latest
        rates = [*self._steps_s, *([step_s] if step_s is not None else [])]
        if not rates:
            return None
        start_ups = [*self._start_ups_s, *([self._first - self._begun] if step_s is not None else [])]

        def expected_s(name: str) -> float:
            steps = self._requests[name].experiment.train.max_iters
            return statistics.fmean(start_ups) + steps * statistics.fmean(rates)

        if step_s is None:
            this = expected_s(self.name) - (now - self._begun)
        else:
            this = step_s * (self.steps - self.done) - (now - latest)
        return max(this, 0.0) + sum(map(expected_s, self._waiting))

    def _step_s(self) -> float | None:
        """Seconds between two steps, on average since the first; None before the second."""
        took_s = self._latest - self._first  # 0 for steps that were read together
        return took_s / (self.done - 1) if took_s > 0 and self.done > 1 else None

    def _left(self, now: float) -> list[str]:
        left_s = self.left_s(now)
        if left_s is None:
            return []
        amount = f"about {human_seconds(left_s)}" if left_s >= SHORTEST_S else f"less than {SHORTEST_S:.0f} s"
        return [f"{amount} left{' in all' if len(self._requests) > 1 else ''}"]

    def _tokens(self) -> list[str]:
        experiment, step_s = self._requests[self.name].experiment, self._step_s()
        return [f"{experiment.tokens_per_step / step_s:,.0f} tokens/s"] if step_s else []


class Cadence:
    """Times at which a line is due: at each tenth of the steps, and now and then in between.

    Never twice within SHORTEST_S, and ever less often the longer it takes.
    """

    def __init__(self, now: float):
        self._begun = self._said = now
        self._tenth = 0

    def begin(self, now: float) -> None:
        """A line was said as a case started."""
        self._said, self._tenth = now, 0

    def is_due(self, fraction: float, now: float) -> bool:
        """True if a line is due, which is then taken as said. `fraction` of the case's steps are done."""
        tenth, silent_s = int(10 * fraction), now - self._said
        has_news = tenth > self._tenth and silent_s >= SHORTEST_S
        if not has_news and silent_s < max(LONGEST_S, STRETCH * (now - self._begun)):
            return False
        self._said, self._tenth = now, tenth
        return True
