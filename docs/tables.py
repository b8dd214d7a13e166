"""The tables and numbers that the docs quote: from the code, from docs/data, or from docs/generated."""

from collections.abc import Callable, Iterable
from functools import partial

import constraints
import inserted
import msgspec
from link_collectives import link_collectives_section
from links_tables import links_section
from performance import BENCHES
from performance_tables import TOLD_COLUMNS, agreement, method, one_device, performance, resolution
from performance_tables import summary as performance_summary
from plans import plans, published_rows, published_sources, published_summary
from proofs import Errors, errors_of
from studies import SHOWN, details_section, sentence, study_section
from summaries import ledger as ledger_summary
from summaries import parity, parity_count
from type_errors import WAYS, Outcome, read_type_errors

from compare.commands import list as names
from compare.commands.mirror import FOLDERS
from compare.commands.mirror import rows as mirror_rows
from compare.commands.overview import GROUPS
from compare.commands.schedule import cost_of
from compare.judge.ladder import REQUEST, RUNGS
from compare.judge.tolerances import TOLERANCES, Tolerance
from compare.pipeline.schedules import SCHEDULES, make_schedule
from compare.present.lesson import worked
from compare.show.markdown import markdown_rows as markdown
from compare.spec.engines.registry import PEERS, STUDIED
from compare.spec.experiment import Layout
from compare.studies.faults import FAULTS
from compare.studies.harness_faults import HARNESS_FAULTS
from compare.studies.presets import PRESETS, preset_layout
from compare.terminal.units import error_text

RANKS, MICROBATCHES, CHUNKS = 4, 8, 2  # of the schedules that are drawn in schedules.png
SGD = ".sgd"
"""Ends the names of golden cases by SGD."""
COUNTS = "counts"
"""A study whose table is empty: its sentence is all there is to show."""
QUOTED = ("loss", "gradients", "later_weights", "loss_curve")
"""Rungs whose errors the docs quote."""


def type_errors() -> str:
    """Planted mistakes of sharding, and what became of them in each way of writing."""

    def words(found: Outcome) -> str:
        if found.error:
            return f"**error**: {found.error.split(': ')[0]}"
        sent = ", ".join(kind.replace("_", "-") for kind in found.sent) or "nothing"
        return f"{'right' if found.right else '**wrong**'}; sends {sent}"

    header = ["mistake", "types", "constraints (Auto)", "per device (`check_vma`)"]
    rows = ([one.mistake, *(words(one.outcomes[way]) for way in WAYS)] for one in read_type_errors())
    return markdown(header, rows)


def mirror() -> str:
    """Lines of code of every strategy: its own file / with helpers; and of guards."""
    rows = ([f"`{name}`", *cells] for name, *cells in mirror_rows())
    return markdown(["", *(f"`{folder}`" for folder in FOLDERS.values())], rows)


def which_strategy() -> str:
    """The worked example of the lessons: what a GPU holds and sends under each strategy."""
    table = worked.table()
    cells = (
        [cell.text + (f", {cell.note}" if cell.note else "") for cell in row.cells] for row in table.rows
    )
    rows = ([row.head.text, *own] for row, own in zip(table.rows, cells, strict=True))
    return f"{worked.sentence()}\n\n{markdown([table.corner, *table.columns], rows)}"


def commands() -> str:
    """Every command in the groups of `shardpair --help`; a group's name stands beside its first command."""
    rows = [
        (f"**{group}**" if place == 0 else "", f"`{word}`", does)
        for group, words in GROUPS.items()
        for place, (word, does) in enumerate(words.items())
    ]
    return markdown(["", "`shardpair`", "what it does"], rows, numbers_from=3)


def experiments() -> str:
    """Those that ship."""
    facts = ("parameters", "steps", "dtype")
    rows = []
    for entry in names.experiments():
        values = (entry.facts[fact] for fact in facts)
        cells = (f"{value:,}" if isinstance(value, int) else value for value in values)
        rows.append((f"`{entry.name}`", entry.description, *cells))
    return markdown(["experiment", "what it is", *facts], rows, numbers_from=2)


def presets() -> str:
    """Layouts by name, and the fields that each sets on the devices that the matrix gives it."""
    plain = msgspec.structs.asdict(Layout())
    rows = []
    for name, preset in PRESETS.items():
        layout = msgspec.structs.asdict(preset_layout(Layout(), name, preset.devices))
        fields = ", ".join(f"{key}={value}" for key, value in layout.items() if value != plain[key])
        rows.append((f"`{name}`", preset.description, f"`{fields}`" if fields else ""))
    return markdown(["preset", "what it is", "its layout in the matrix"], rows, numbers_from=3)


def engines() -> str:
    """Table of engines, and what each offers."""
    rows = [
        (
            f"`{e.name}`",
            ", ".join(e.gradient_sync),
            ", ".join(e.layouts.schedules),
            e.layouts.no_other_schedule.split(":")[0],
        )
        for e in STUDIED.values()
    ]
    header = ["engine", "gradient synchronisation", "pipeline schedules", "why no other"]
    return markdown(header, rows, numbers_from=4)


def peers() -> str:
    """What others use, to be run beside the engines."""
    rows = [
        (f"`{e.name}`", e.decides, ", ".join(e.precisions.dtypes), f"`{e.pip_line}`" if e.pip_line else "")
        for e in PEERS.values()
    ]
    return markdown(["peer", "what it is", "dtypes", "if it is missing"], rows, numbers_from=4)


def schedules() -> str:
    """Table of schedules and their costs, in forwards of a microbatch through a rank."""
    rows = []
    for name in SCHEDULES:
        chunks = CHUNKS if name == "interleaved" else 1
        cost = cost_of(make_schedule(name, ranks=RANKS, microbatches=MICROBATCHES, chunks=chunks))
        held = ", ".join(map(str, cost.activations_held))
        rows.append((f"`{name}`", f"{cost.makespan:g}", f"{cost.waiting:.1%}", held))
    return markdown(["schedule", "makespan", "waiting", "activations held, by rank"], rows)


def tolerances() -> str:
    """The limit of every rung, by dtype."""
    rows = ([rung, *(_limit(TOLERANCES[dtype][rung]) for dtype in TOLERANCES)] for rung in RUNGS)
    return markdown(["rung", *TOLERANCES], rows)


def _limit(tolerance: Tolerance) -> str:
    return f"{tolerance.limit:g}" + (f", {tolerance.steps} steps" if tolerance.steps else "")


def worst(errors: Iterable[Errors], rung: str) -> str:
    """The largest error on a rung, as text."""
    found = [of_case[rung] for of_case in errors if rung in of_case]
    return error_text(max(float("inf") if error is None else error for error in found))


def check() -> str:
    """Worst errors of `shardpair check`, beside their limits."""
    studies = {dtype: errors_of(f"check-{dtype}") for dtype in ("float64", "float32")}
    rows = []
    for rung in QUOTED:
        cells = [rung]
        for dtype, cases in studies.items():
            cells += [worst(cases.values(), rung), f"{TOLERANCES[dtype][rung].limit:g}"]
        rows.append(cells)
    count = len(studies["float64"])
    header = [f"worst of {count} cases", *(text for dtype in studies for text in (dtype, "limit"))]
    return markdown(header, rows)


def golden() -> str:
    """Every engine's errors against nanoGPT."""
    cases = errors_of("golden")
    engines = [name for name in cases if not name.endswith(SGD)]
    rows = (
        [words.format(rung), *(worst([cases[name + suffix]], rung) for name in engines)]
        for suffix, words in (("", "{}"), (SGD, "{}, by SGD"))
        for rung in (*QUOTED, "evaluations")
    )
    return markdown(["worst error against nanoGPT", *(f"`{name}`" for name in engines)], rows)


def caught() -> dict[str, list[float]]:
    """Errors of every fault at its rung, an engine each."""
    found: dict[str, list[float]] = {name: [] for name in FAULTS}
    for case, errors in errors_of("faults").items():
        name = case.rpartition(".")[0]
        error = errors[FAULTS[name].rung]
        found[name].append(float("inf") if error is None else error)
    return found


def faults() -> str:
    """Every planted fault, the rung that catches it, and the least error that any engine showed there."""
    errors, rows = caught(), []
    for fault in FAULTS.values():
        able = [name for name, engine in STUDIED.items() if fault.name not in engine.impossible_faults]
        among = "all" if len(able) == len(STUDIED) else ", ".join(able)
        rows.append(
            (f"`{fault.name}`", fault.description, fault.rung, error_text(min(errors[fault.name])), among)
        )
    header = ["planted fault", "what went wrong", "caught at", "least error", "engines"]
    return markdown(header, rows, numbers_from=5)


def harness_faults() -> str:
    """Every record that is not what was asked for."""
    rows = (
        (f"`{fault.name}`", fault.description, "both" if fault.both else "one", fault.rung)
        for fault in HARNESS_FAULTS.values()
    )
    return markdown(["damaged records", "what is wrong", "of", "caught at"], rows, numbers_from=4)


def missed_without_request() -> str:
    """Faults of the harness that only the first rung sees; another dtype shows between the two as well."""
    return str(sum(fault.rung == REQUEST for fault in HARNESS_FAULTS.values()) - 1)


SECTIONS: dict[str, Callable[[], str]] = {
    "mirror": mirror,
    "type-errors": type_errors,
    "constraints": constraints.section,
    **{f"inserted-{dtype}": partial(inserted.section, dtype) for dtype in inserted.LAYOUTS},
    "which-strategy": which_strategy,
    "commands": commands,
    "experiments": experiments,
    "presets": presets,
    "engines": engines,
    "peers": peers,
    "schedules": schedules,
    "tolerances": tolerances,
    "check": check,
    "golden": golden,
    "faults": faults,
    "faults-caught": lambda: str(sum(len(errors) for errors in caught().values())),
    "faults-count": lambda: str(len(FAULTS)),
    "harness-faults": harness_faults,
    "harness-faults-count": lambda: str(len(HARNESS_FAULTS)),
    "harness-faults-missed": missed_without_request,
    "parity": parity,
    "parity-count": parity_count,
    **{f"performance-{name}": partial(performance, name) for name in BENCHES},
    "performance-summary": performance_summary,
    "performance-compilers": partial(performance_summary, TOLD_COLUMNS),
    "performance-one-device": one_device,
    "performance-method": method,
    "performance-agreement": agreement,
    "performance-resolution": resolution,
    **{f"study-{name}": partial(study_section, name) for name in SHOWN if name != COUNTS},
    f"sentence-{COUNTS}": partial(sentence, COUNTS),
    "details-memory": partial(details_section, "memory"),
    "ledger-summary": ledger_summary,
    "links": links_section,
    "link-collectives": link_collectives_section,
    "plans": plans,
    "published-rows": published_rows,
    "published-sources": published_sources,
    "published-summary": published_summary,
}
"""What stands between `<!-- generated: NAME -->` and `<!-- end -->`."""
