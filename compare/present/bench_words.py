"""A bench in words, for the terminal, the page and the docs: cells of its table, and what is to be known."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from compare.execute.load import is_busy
from compare.judge.bench import MOST_FAILURES, BenchCase, BenchResult
from compare.judge.bench_agreement import mistakes, unequal_terms, what_was_held
from compare.judge.bench_rows import BenchRow, baseline_of, blocks
from compare.judge.statistics import MIN_ROUNDS, Estimate, interval_words, told_by_all
from compare.terminal.layout_words import layout_in_words
from compare.terminal.units import human_bytes

NONE = "-"
CACHED = "Compiled programs may have been kept between processes: compilation may have been reading one."

_COLUMNS: Mapping[str, Callable[[BenchRow], str]] = {
    "wall ms": lambda row: f"{row.wall_ms:.1f}",
    "ratio": lambda row: ratio_text(row.wall_ratio),
    "CPU ms": lambda row: f"{row.cpu_ms:.1f}",
    "CPU ratio": lambda row: ratio_text(row.cpu_ratio),
    "single ms": lambda row: f"{row.single_ms:.1f}",
    "tokens/s": lambda row: f"{row.tokens_per_s:,.0f}",
    "GFLOP/s": lambda row: f"{row.flops_per_s / 1e9:,.3g}",
    "of ceiling": lambda row: _percent(row.of_ceiling),
    "MFU": lambda row: _percent(row.mfu),
    "compile s": lambda row: f"{row.compile_s:.2f}",
    "first s": lambda row: f"{row.first_step_s:.2f}",
    "start s": lambda row: f"{row.start_up_s:.1f}",
    "memory": lambda row: human_bytes(row.peak_mem_bytes),
}


def table_cells(rows: Sequence[BenchRow]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells of a block's rows, label first. A column without any figure is left out."""
    columns = {name: [cell(row) for row in rows] for name, cell in _COLUMNS.items()}
    kept = {name: cells for name, cells in columns.items() if any(cell != NONE for cell in cells)}
    header = ["engine", *kept]
    return header, [[row.label, *(cells[place] for cells in kept.values())] for place, row in enumerate(rows)]


def ratio_text(ratio: Estimate | None) -> str:
    """A ratio and its interval: 0.73 [0.71, 0.75]; the ratio alone without one."""
    if ratio is None:
        return NONE
    interval = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio.has_interval else ""
    return f"{ratio.median:.2f}{interval}"


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


def block_title(result: BenchResult, block: str) -> str:
    """A block's name, what is split over what, and the tokens of a step."""
    case = next(case for case in result.cases if case.block == block)
    words = layout_in_words(case.experiment, result.platform)
    tokens, dtype = case.experiment.tokens_per_step, case.experiment.precision.dtype
    return f"{block}: {words}, {tokens:,} tokens a step, {dtype}"


def in_one_line(result: BenchResult) -> str:
    """The best and the worst ratio to the baseline; or that there is none."""
    compared = [row for rows in blocks(result).values() for row in rows if row.wall_ratio]
    if not compared:
        return f"{_rounds(result)}; nothing to divide by {result.baseline}"

    def said(row: BenchRow) -> str:
        return f"{row.label} under {row.block} {ratio_text(row.wall_ratio)}"

    ordered = sorted(compared, key=lambda row: row.wall_ratio.median if row.wall_ratio else 1.0)
    ends = [ordered[0]] if len(ordered) == 1 else [ordered[0], ordered[-1]]
    return f"Wall time over that of {result.baseline}, {_rounds(result)}: {'; '.join(map(said, ends))}"


def sentences(result: BenchResult) -> list[str]:
    """What must be known to read the table: how it was timed, where, and what is missing."""
    timing = result.timing
    windows = f"{timing.windows} windows of {timing.window} steps, inside of which nothing waits for a step"
    return [
        f"{result.platform.upper()} timings: {_rounds(result)}, each case a fresh process, in an order that "
        f"rotates. A step's wall time is the median of {windows}, its CPU time that of all processes; single "
        f"is a step that is waited for. Start, compilation and first step are apart. Memory is the peak of "
        f"the fullest device.",
        f"Ratios are to {_baseline(result)}, within a round; {_interval(result)}",
        f"GFLOP/s are the model's, without what is computed anew.{_ceilings(result)}",
        f"Machine: {result.machine.cpu_model}, {result.machine.cores} cores, "
        f"{human_bytes(result.machine.memory_bytes)} of memory, {result.machine.system}; "
        f"{_versions(result)}; {_source(result)}.",
        *filter(None, [what_was_held(result)]),
        *([CACHED] if result.is_cached else []),
    ]


def warnings(result: BenchResult) -> list[str]:
    """What spoils the figures, a line each: load, failures, other work, wrong times, unequal terms."""
    busy = [
        f"round {number} ({cores:.1f} cores)"
        for number, cores in enumerate(result.busy_cores, start=1)
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
    times: Counter[str] = Counter()
    for failure in result.failures:
        times[failure.case] += 1
        then = " and is not tried again" if times[failure.case] == MOST_FAILURES else ""
        lines.append(f"{failure.case} failed in round {failure.round}{then}: {failure.why}")
    return [*lines, *mistakes(result), *unequal_terms(result)]


def _rounds(result: BenchResult) -> str:
    done = result.finished_rounds
    plural = "" if result.rounds == 1 else "s"
    return f"{result.rounds} round{plural}" if done == result.rounds else f"{done} of {result.rounds} rounds"


def _baseline(result: BenchResult) -> str:
    without = dict.fromkeys(case.block for case in result.cases if not baseline_of(result, case))
    missing = f" (which is not in {', '.join(without)})" if without else ""
    return f"{result.baseline}{missing}"


def _interval(result: BenchResult) -> str:
    if result.rounds < MIN_ROUNDS:
        return f"the median over rounds. Fewer than {MIN_ROUNDS} rounds: no interval can be told."
    rows = [row for rows in blocks(result).values() for row in rows]
    intervals = interval_words(row.wall_ratio for row in rows if row.wall_ratio)
    return f"the median over rounds, and two of the rounds' own ratios around it: {intervals}."


def _ceilings(result: BenchResult) -> str:
    if not result.ceilings:
        return ""
    where = "on one GPU" if result.platform == "gpu" else "on all cores"
    each = (f"{name} {one.flops_per_s / 1e9:,.0f} GFLOP/s" for name, one in result.ceilings.items())
    return f" Their ceiling is the fastest matrix product {where}: {', '.join(each)}."


def _versions(result: BenchResult) -> str:
    found: dict[str, str] = {}
    for one in result.circumstances.values():
        found |= one.versions
    return ", ".join(f"{name} {found[name]}" for name in ("python", "jax", "torch") if name in found)


def _source(result: BenchResult) -> str:
    if not result.git_commit:
        return "shardpair, not from a git checkout"
    changed = " with uncommitted changes" if result.git_dirty else ""
    return f"shardpair {result.git_commit[:12]}{changed}"


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}"


def circumstances_rows(result: BenchResult) -> list[tuple[BenchCase, list[str]]]:
    """Every case that finished: synchronisation, recomputation, threads, device, how memory was measured."""
    return [
        (case, [one.gradient_sync, one.remat, one.threads, one.device_kind, one.peak_memory_method])
        for case in result.cases
        if (one := result.circumstances.get(case.name))
    ]
