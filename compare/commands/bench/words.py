"""A bench in words: what is to be known of its figures, and what spoils those of any study."""

import math

from compare.commands.bench.agreement import agreement_summary, disagreements
from compare.commands.bench.outcome import TimedOutcome, blocks
from compare.execute.load import is_busy
from compare.judge.statistics import MIN_ROUNDS, interval_words
from compare.show.findings import written
from compare.terminal import layout_in_words


def block_title(result: TimedOutcome, block: str) -> str:
    """A block's name, what is split over what, and the tokens of a step."""
    case = next(case for case in result.cases.values() if case.block == block)
    words = layout_in_words(case.experiment, result.platform)
    tokens, dtype = case.experiment.tokens_per_step, case.experiment.precision.dtype
    return f"{block}: {words}, {tokens:,} tokens a step, {dtype}"


def in_one_line(result: TimedOutcome) -> str:
    """The best and the worst ratio to the baseline; or that there is none."""
    rows = [row for rows in blocks(result).values() for row in rows]
    ratios = sorted((row.wall_ratio.median, row.case, row) for row in rows if row.wall_ratio)
    if not ratios:
        return f"{_rounds(result)}; nothing to divide by {result.baseline}"
    words = [
        f"{row.label} under {row.block} {written(row.wall_ratio, '.2f')}"
        for *_, row in ratios[:: max(len(ratios) - 1, 1)]
    ]
    return f"Wall time over that of {result.baseline}, {_rounds(result)}: {'; '.join(words)}"


def sentences(result: TimedOutcome) -> list[str]:
    """What must be known to read the table: how it was timed, and what is missing."""
    timing = result.timing
    without = dict.fromkeys(case.block for case in result.cases.values() if not result.baseline_of(case))
    missing = f" (which is not in {', '.join(without)})" if without else ""
    interval = f"Fewer than {MIN_ROUNDS} rounds: no interval can be told."
    if result.rounds >= MIN_ROUNDS:
        rows = [row for rows in blocks(result).values() for row in rows]
        interval = f"Around it: {interval_words(row.wall_ratio for row in rows if row.wall_ratio)}."
    ceilings = [f"{name} {one.flops_per_s / 1e9:,.0f} GFLOP/s" for name, one in result.ceilings.items()]
    where = "on one GPU" if result.platform == "gpu" else "on all cores"
    ceiling = f" Their ceiling is the fastest matrix product {where}: {', '.join(ceilings)}."
    return [
        f"{result.platform.upper()} timings: {_rounds(result)}, each case a fresh process, in an order that "
        f"rotates. A step's wall time is the median of {timing.windows} windows of {timing.window} steps, "
        f"inside of which nothing waits for a step, its CPU time that of all processes; single is a step "
        f"that is waited for. Start, compilation and first step are apart. Memory is the peak of the fullest "
        f"device.",
        f"Ratios are to {result.baseline}{missing}, within a round; the median over rounds. {interval}",
        f"GFLOP/s are the model's, without what is computed anew.{ceiling if ceilings else ''}",
        *filter(None, [agreement_summary(result)]),
    ]


def warnings(result: TimedOutcome) -> list[str]:
    """What spoils the figures, a line each: load, other work."""
    busy = [
        f"round {number} ({cores:.1f} cores)"
        for number, cores in enumerate(result.circumstances.busy_cores, start=1)
        if is_busy(cores)
    ]
    wanted = " It was wanted so (--anyway)." if result.options.get("anyway") else ""
    lines = []
    if busy:
        lines.append(f"Others used the processor before {', '.join(busy)}: figures may not hold.{wanted}")
    seen = {
        f"{name} in round {number}": one.others_cores
        for name, rounds in result.measurements.items()
        for number, one in rounds.items()
    }
    beside = [f"{place} ({cores:.1f} cores)" for place, cores in seen.items() if is_busy(cores)]
    if beside:
        lines.append(f"Others used the processor beside {', '.join(beside)}: these figures may not hold.")
    if any(map(math.isnan, seen.values())):
        lines.append("What else used the hosts' processors is not known: a launcher started the engines.")
    return [*lines, *disagreements(result)]


def _rounds(result: TimedOutcome) -> str:
    done = result.finished_rounds
    plural = "" if result.rounds == 1 else "s"
    return f"{result.rounds} round{plural}" if done == result.rounds else f"{done} of {result.rounds} rounds"
