"""Tables of what the scripts beside this file measured: each from its JSON, or a word that there is none."""

import json
from pathlib import Path

from memory import LAYOUTS, read_memory, spec_of
from moves import read_moves
from precisions import (
    DTYPES,
    ENGINES,
    NEARBY,
    STEPS,
    apart,
    between_engines,
    from_float32,
    read_precisions,
)
from recipes import read_recipes
from savings import read_savings
from strategies import SWEEPS, read_sweeps
from survival import read_survival

from compare.contract.memory_profile import CLASSES as MEMORY_CLASSES
from compare.judge.closed_forms.peak_memory import peak_form
from compare.present.memory_tables import AtPeak
from compare.present.memory_tables import rows as memory_rows
from compare.present.sweep import sweep_table, worth
from compare.show.markdown import markdown_rows as markdown
from compare.terminal.units import error_text, human_bytes

COUNTS = Path(__file__).parent / "dynamic_counts.json"
"""As text: the script that writes it needs JAX, and the docs do not."""


def moves() -> str:
    """The differences of trainings that went on elsewhere."""
    stored = read_moves()
    if not stored:
        return "Not measured yet: `make moves` measures it."
    rows = []
    for name, journeys in stored.items():
        for journey in journeys:
            off = [error_text(journey.difference[group]) for group in ("weights", "m", "v")]
            engines = " > ".join(f"`{engine}`" for engine in journey.engines)
            rows.append((name, engines, str(journey.dropout), *off))
    return markdown(["journey", "engines", "dropout", "weights", "m", "v"], rows, numbers_from=2)


def sweep(name: str) -> str:
    """A sweep's table, the command that makes it, and what it is worth; or that it was not run yet."""
    outcome, command = read_sweeps().get(name), f"```sh\nshardpair {SWEEPS[name]}\n```"
    if outcome is None:
        return f"{command}\n\nNot measured yet: `make sweeps` measures it."
    found = sweep_table(outcome)
    rows = [[row.head.text, *(cell.text for cell in row.cells)] for row in found.rows]
    table = markdown([found.corner, *found.columns], rows, numbers_from=2)
    versions = ", ".join(f"{package} {version}" for package, version in sorted(outcome.versions.items()))
    words = [
        f"{outcome.sentence}.",
        worth(outcome),
        f"Machine: {outcome.machine}; {versions}; shardpair {outcome.git_commit[:12]}.",
        *(f"Left out: {case}: {why}." for case, why in outcome.left_out.items()),
    ]
    return "\n\n".join([command, f"**{found.name}**", table, " ".join(words)])


def endings() -> str:
    """What is left after kills and stops."""
    stored = read_survival()
    if stored is None:
        return "Not measured yet: `make survival` measures it."
    rows = [
        (
            f"`{one.engine}`",
            one.fault,
            one.moment,
            one.message.removeprefix("shardpair: "),
            str(one.exit_code),
            f"{one.seconds:.1f}",
            str(one.left),
            f"step {one.newest}, whole" if one.newest else "none yet",
        )
        for one in stored.endings
    ]
    header = ["engine", "fault", "when", "last line", "exit code", "seconds to end", "processes left"]
    return markdown([*header, "newest checkpoint"], rows)


def refusals() -> str:
    """What damaged checkpoints are met with."""
    stored = read_survival()
    if stored is None:
        return "Not measured yet: `make survival` measures it."
    rows = [
        (one.damage, one.message.removeprefix("shardpair: error: "), str(one.exit_code), "nothing")
        for one in stored.refusals
        if one.unchanged
    ]
    return markdown(["damage", "message", "exit code", "changed on disk"], rows)


def recipes(name: str) -> str:
    """What came of one of nanoGPT's recipes."""
    stored = read_recipes().get(name)
    if stored is None:
        return "Not trained yet: `make recipes` does it."
    engines = list(stored.evaluations)
    rows = [
        [str(step), *("{:.4f} / {:.4f}".format(*stored.evaluations[engine][step]) for engine in engines)]
        for step in stored.evaluations[engines[0]]
    ]
    table = markdown(["after steps", *(f"`{engine}`" for engine in engines)], rows, numbers_from=1)
    words = ", ".join(f"{key} = {value}" for key, value in stored.settings.items())
    return f"{table}\n\n{words}. {stored.minutes:.1f} minutes for all engines. {stored.verdict}"


def precisions() -> str:
    """How far losses in 16 bits are from those in 32, and engines from each other."""
    stored = read_precisions()
    if not stored:
        return "Not trained yet: `make precisions` does it."
    rows = [
        (
            dtype,
            f"{next(iter(curves.losses.values()))[-1]:.4f}",
            "" if dtype == DTYPES[0] else f"{from_float32(stored, dtype).max():.1e}",
            f"{between_engines(curves).max():.1e}",
            f"{apart(curves.nearby, curves.losses[ENGINES[0]]).max():.1e}" if curves.nearby else "not run",
            str(max(curves.skipped.values())),
            curves.verdict,
        )
        for dtype, curves in stored.items()
    ]
    header = [f"{STEPS} steps", "last loss", "furthest from float32", "between engines"]
    header += [f"weights changed by {NEARBY:g}", "skipped", "verdict"]
    return markdown(header, rows)


def counts_agree() -> str:
    """How many of the layouts whose collectives were counted as they ran agree with the ledger."""
    found = json.loads(COUNTS.read_text())
    agree = sum(one["agrees"] for one in found)
    rows = [row for one in found for row in one["rows"]]
    calls = sum(sum(row["dynamic"]) for row in rows)
    return f"{agree} of {len(found)} layouts agree: {len(rows)} rows, {calls:,} calls on all devices"


def savings() -> str:
    """What a device holds with each setting."""
    stored = read_savings()
    if not stored:
        return "Not measured yet: `make savings` measures it."
    engines = list(next(iter(stored.values())))
    rows = []
    for setting, held in stored.items():
        kept = [", ".join(map(human_bytes, (held[name].peak, held[name].at_rest))) for name in engines]
        host = {human_bytes(one.on_host) for one in held.values()}
        rows.append([f"`{setting}`", *kept, " or ".join(sorted(host))])
    return markdown(["setting", *(f"`{engine}`: peak, at rest" for engine in engines), "on the host"], rows)


def memory() -> str:
    """What the fullest device holds at the peak, by class, beside the closed form."""
    stored = read_memory()
    if not stored:
        return "Not measured yet: `make memory` measures it."
    rows = []
    for preset in LAYOUTS:
        for engine, held in stored.get(preset, {}).items():
            form = peak_form(engine, spec_of(preset), device=held.device)
            one = AtPeak(device=held.device, peak=held.peak, form=form)
            (cells,) = memory_rows([(f"`{preset}`", one)])
            rows.append([cells[0], f"`{engine}`", *cells[1:]])
    return markdown(["layout", "engine", *MEMORY_CLASSES, "all"], rows, numbers_from=2)
