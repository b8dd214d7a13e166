"""A bench in words: what is to be known of its figures, and what spoils those of any study."""

import math
from collections.abc import Iterable, Sequence

from compare.execute.load import is_busy
from compare.judge.bench_agreement import mistakes, unequal_terms, what_was_held
from compare.judge.bench_rows import BenchRow, baseline_of, blocks
from compare.judge.outcome import Case
from compare.judge.statistics import MIN_ROUNDS, Estimate, interval_words, told_by_all
from compare.judge.timed_outcome import TimedOutcome
from compare.show.findings import written
from compare.terminal import human_bytes, layout_in_words

CACHED = "Compiled programs may have been kept between processes: compilation may have been reading one."


def told_text(wall: Iterable[Estimate], cpu: Iterable[Estimate]) -> str:
    """What a table with these ratios could have told from 1.00, in every row; '' without intervals."""
    ends = {"wall time": told_by_all(wall), "CPU time": told_by_all(cpu)}
    said = [f"a {what} below {one[0]:.2f} or above {one[1]:.2f}" for what, one in ends.items() if one]
    if not said:
        return ""
    return (
        f"Every row could tell from 1.00 {' and '.join(said)}: every second time there, and nineteen times "
        f"in twenty if twice as far off."
    )


def told_in(rows: Sequence[BenchRow]) -> str:
    """`told_text` of a block's rows."""
    return told_text(
        [row.wall_ratio for row in rows if row.wall_ratio], [row.cpu_ratio for row in rows if row.cpu_ratio]
    )


def block_title(result: TimedOutcome, block: str) -> str:
    """A block's name, what is split over what, and the tokens of a step."""
    case = next(case for case in result.cases if case.block == block)
    words = layout_in_words(case.experiment, result.platform)
    tokens, dtype = case.experiment.tokens_per_step, case.experiment.precision.dtype
    return f"{block}: {words}, {tokens:,} tokens a step, {dtype}"


def in_one_line(result: TimedOutcome) -> str:
    """The best and the worst ratio to the baseline; or that there is none."""
    compared = [row for rows in blocks(result).values() for row in rows if row.wall_ratio]
    if not compared:
        return f"{_rounds(result)}; nothing to divide by {result.baseline}"

    def said(row: BenchRow) -> str:
        return f"{row.label} under {row.block} {written(row.wall_ratio, '.2f')}"

    ordered = sorted(compared, key=lambda row: row.wall_ratio.median if row.wall_ratio else 1.0)
    ends = [ordered[0]] if len(ordered) == 1 else [ordered[0], ordered[-1]]
    return f"Wall time over that of {result.baseline}, {_rounds(result)}: {'; '.join(map(said, ends))}"


def sentences(result: TimedOutcome) -> list[str]:
    """What must be known to read the table: how it was timed, where, and what is missing."""
    timing, machine = result.timing, result.circumstances.machine
    windows = f"{timing.windows} windows of {timing.window} steps, inside of which nothing waits for a step"
    return [
        f"{result.platform.upper()} timings: {_rounds(result)}, each case a fresh process, in an order that "
        f"rotates. A step's wall time is the median of {windows}, its CPU time that of all processes; single "
        f"is a step that is waited for. Start, compilation and first step are apart. Memory is the peak of "
        f"the fullest device.",
        f"Ratios are to {_baseline(result)}, within a round; {_interval(result)}",
        f"GFLOP/s are the model's, without what is computed anew.{_ceilings(result)}",
        f"Machine: {machine.cpu_model}, {machine.cores} cores, "
        f"{human_bytes(machine.memory_bytes)} of memory, {machine.system}; "
        f"{_versions(result)}; {result.circumstances.made_by}.",
        *filter(None, [what_was_held(result)]),
        *([CACHED] if result.is_cached else []),
    ]


def warnings(result: TimedOutcome) -> list[str]:
    """What spoils the figures, a line each: load, other work, wrong times, unequal terms."""
    busy = [
        f"round {number} ({cores:.1f} cores)"
        for number, cores in enumerate(result.circumstances.busy_cores, start=1)
        if is_busy(cores)
    ]
    wanted = " It was wanted so (--anyway)." if result.anyway else ""
    lines = []
    if busy:
        lines.append(f"Others used the processor before {', '.join(busy)}: figures may not hold.{wanted}")
    beside = [
        f"{one.case} in round {one.round} ({one.others_cores:.1f} cores)"
        for one in result.measurements
        if is_busy(one.others_cores)
    ]
    if beside:
        lines.append(f"Others used the processor beside {', '.join(beside)}: these figures may not hold.")
    if any(math.isnan(one.others_cores) for one in result.measurements):
        lines.append("What else used the hosts' processors is not known: a launcher started the engines.")
    return [*lines, *mistakes(result), *unequal_terms(result)]


def _rounds(result: TimedOutcome) -> str:
    done = result.finished_rounds
    plural = "" if result.rounds == 1 else "s"
    return f"{result.rounds} round{plural}" if done == result.rounds else f"{done} of {result.rounds} rounds"


def _baseline(result: TimedOutcome) -> str:
    without = dict.fromkeys(case.block for case in result.cases if not baseline_of(result, case))
    missing = f" (which is not in {', '.join(without)})" if without else ""
    return f"{result.baseline}{missing}"


def _interval(result: TimedOutcome) -> str:
    if result.rounds < MIN_ROUNDS:
        return f"the median over rounds. Fewer than {MIN_ROUNDS} rounds: no interval can be told."
    rows = [row for rows in blocks(result).values() for row in rows]
    intervals = interval_words(row.wall_ratio for row in rows if row.wall_ratio)
    return f"the median over rounds, and two of the rounds' own ratios around it: {intervals}."


def _ceilings(result: TimedOutcome) -> str:
    if not result.ceilings:
        return ""
    where = "on one GPU" if result.platform == "gpu" else "on all cores"
    each = (f"{name} {one.flops_per_s / 1e9:,.0f} GFLOP/s" for name, one in result.ceilings.items())
    return f" Their ceiling is the fastest matrix product {where}: {', '.join(each)}."


def _versions(result: TimedOutcome) -> str:
    found = result.circumstances.versions
    return ", ".join(f"{name} {found[name]}" for name in ("python", "jax", "torch") if name in found)


def circumstances_rows(result: TimedOutcome) -> list[tuple[Case, list[str]]]:
    """Every case that finished: synchronisation, recomputation, threads, device, how memory was measured."""
    return [
        (case, [one.gradient_sync, one.remat, one.threads, one.device_kind, one.peak_memory_method])
        for case in result.cases
        if (one := result.how.get(case.name))
    ]
