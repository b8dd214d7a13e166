"""A bench in words: how it was timed, its result in one line, and its warnings."""

from collections.abc import Sequence

from compare.commands.bench.agreement import summarize_agreement
from compare.commands.bench.outcome import BenchRow, TimedOutcome
from compare.show.findings import format_value
from compare.show.statistics import MIN_ROUNDS, interval_words
from compare.text import layout_in_words


def block_title(result: TimedOutcome, block: str) -> str:
    """A block's name, its layout in words, and the tokens of a step."""
    case = next(case for case in result.cases.values() if case.block == block)
    words = layout_in_words(case.experiment, result.platform)
    tokens, dtype = case.experiment.tokens_per_step, case.experiment.precision.dtype
    return f"{block}: {words}, {tokens:,} tokens a step, {dtype}"


def summarize(result: TimedOutcome, rows: Sequence[BenchRow]) -> str:
    """The lowest and the highest ratio to the baseline."""
    ratios = sorted((row.wall_ratio.median, row.case, row) for row in rows if row.wall_ratio)
    if not ratios:
        return f"{_rounds(result)}; nothing to divide by {result.baseline}"
    words = [
        f"{row.label} under {row.block} {format_value(row.wall_ratio, '.2f')}"
        for *_, row in ratios[:: max(len(ratios) - 1, 1)]
    ]
    return f"Wall time divided by the wall time of {result.baseline}, {_rounds(result)}: {'; '.join(words)}"


def describe_timing(result: TimedOutcome, rows: Sequence[BenchRow]) -> list[str]:
    """How the cases were timed, and how to read the columns."""
    timing = result.timing
    without = dict.fromkeys(case.block for case in result.cases.values() if not result.baseline_of(case))
    missing = f" (which is not in {', '.join(without)})" if without else ""
    interval = f"Fewer than {MIN_ROUNDS} rounds give no interval."
    if result.rounds >= MIN_ROUNDS:
        interval = f"Around it: {interval_words(row.wall_ratio for row in rows if row.wall_ratio)}."
    return [
        f"{result.platform.upper()} timings: {_rounds(result)}, each case a fresh process, in an order that "
        f"rotates. A step's wall time is the median of {timing.windows} windows of {timing.window} steps, in "
        f"which nothing waits for a step; its CPU time is the sum over all processes; single is a step that "
        f"is waited for. Start, compilation and first step are apart. Memory is the peak of the fullest "
        f"device.",
        f"Ratios are to {result.baseline}{missing}, within a round; the median over rounds. {interval}",
        "GFLOP/s are the model's, without recomputation; MFU is their share of the vendor's peak.",
        *filter(None, [summarize_agreement(result)]),
    ]


def warn_of_changes(result: TimedOutcome) -> list[str]:
    """A warning for each case whose device, threads, versions or settings changed between rounds."""
    return [
        f"{name} did not run in the same way in all rounds: such figures do not mix"
        for name, rounds in result.measurements.items()
        if any(process.how != next(iter(rounds.values())).how for process in rounds.values())
    ]


def _rounds(result: TimedOutcome) -> str:
    done = result.finished_rounds
    plural = "" if result.rounds == 1 else "s"
    return f"{result.rounds} round{plural}" if done == result.rounds else f"{done} of {result.rounds} rounds"
