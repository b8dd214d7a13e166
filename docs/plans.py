"""`make plans`: the plans that docs/plan.md shows, into docs/data/plans.json; and its tables.

A plan is a pure function of its experiment and its machine: the file has what the code said then.
"""

from functools import cache
from pathlib import Path

from msgspec import Struct

from compare.host.json_files import read_json, write_json
from compare.plan.machine import read_machine
from compare.plan.predict import PARTS
from compare.plan.published import HeldRow, held_rows, mean_error, null_errors, read_tables, worst_error
from compare.plan.search import Candidate, search
from compare.show.markdown import markdown_rows as markdown
from compare.spec.experiment import Experiment, Model, edited, load
from compare.terminal.units import human_bytes

FILE = Path(__file__).parent / "data" / "plans.json"
SEVEN_B = Model(n_layer=32, n_head=32, n_embd=4096, block_size=2048, vocab_size=50304)
MODELS = {"GPT-2 350M": load("gpt2-350m").model, "7B": SEVEN_B}
MACHINES, SPEEDS, SEQUENCES, TOP = ("h100x64", "v5e-256"), (1.0, 0.1), 512, 3
CALCULON = 0.0365
"""Mean error of Calculon's `llm-validation` on the rows of the A100 (caa4b11, run by us)."""


class Planned(Struct, frozen=True, kw_only=True):
    """The best layouts of one model on one machine."""

    model: str
    machine: str
    link_speed: float
    fitting: int
    dropped: int
    best: list[Candidate]


def main() -> None:
    """Plan every model for every machine, with links as they are and ten times slower."""
    FILE.parent.mkdir(exist_ok=True)
    cases = [(model, machine, speed) for model in MODELS for machine in MACHINES for speed in SPEEDS]
    write_json(FILE, [_planned(*case) for case in cases])


def _planned(model: str, machine: str, speed: float) -> Planned:
    train = {"batch_size": SEQUENCES, "gradient_accumulation_steps": 1}
    base = edited(Experiment(model=MODELS[model]), {"train": train, "precision": {"dtype": "bfloat16"}})
    found = search("torch-manual", base, read_machine(machine, link_speed=speed), fixed=frozenset())
    return Planned(
        model=model,
        machine=machine,
        link_speed=speed,
        fitting=len(found.fitting),
        dropped=len(found.dropped),
        best=found.fitting[:TOP],
    )


def plans() -> str:
    """The three best layouts of each plan, and the parts of their time."""
    header = ["model", "machine", "links", "layout", "step ms", "MFU", "memory", *PARTS.values()]
    rows = []
    for one in read_json(FILE, list[Planned]):
        links = "as they are" if one.link_speed == 1 else "ten times slower"
        for place, best in enumerate(one.best):
            first = [one.model, one.machine, links] if not place else ["", "", ""]
            parts = (f"{best.parts.get(part, 0.0) * 1e3:,.1f}" for part in PARTS)
            figures = [f"{best.seconds * 1e3:,.1f}", f"{best.mfu:.0%}", human_bytes(best.bytes)]
            rows.append([*first, f"`{best.name}`", *figures, *parts])
    return markdown(header, rows, numbers_from=4)


@cache
def _held() -> dict[str, list[HeldRow]]:
    return {table.name: held_rows(table) for table in read_tables()}


def published_summary() -> str:
    """Errors of each table beside those of the null model."""
    header = ["table", "rows", "mean error", "worst", "null model: mean", "worst", "after one factor"]
    rows = []
    for name, held in _held().items():
        errors, null = [row.error for row in held], null_errors(held)
        figures = [mean_error(errors), worst_error(errors), mean_error(null), worst_error(null)]
        cells = [f"{figure:.1%}" for figure in (*figures, mean_error(_after_one_factor(errors)))]
        rows.append([name, str(len(held)), *cells])
    return markdown(header, rows)


def _after_one_factor(errors: list[float]) -> list[float]:
    """Errors that are left once the median ratio of the table is divided out."""
    ratios = sorted(1 + error for error in errors)
    middle = len(ratios) // 2
    median = ratios[middle] if len(ratios) % 2 else (ratios[middle - 1] + ratios[middle]) / 2
    return [ratio / median - 1 for ratio in ratios]


def published_rows() -> str:
    """Every row: measured and predicted utilisation, error of the step time, parts of the time."""
    header = ["table", "row", "devices", "MFU measured", "predicted", "error", *PARTS.values()]
    rows = []
    for name, held in _held().items():
        for place, row in enumerate(held):
            parts = (f"{row.prediction.of_part(part) / row.prediction.seconds:.0%}" for part in PARTS)
            figures = [f"{row.measured_mfu:.1%}", f"{row.prediction.mfu:.1%}", f"{row.error:+.1%}"]
            rows.append(["" if place else name, row.name, f"{row.devices:,}", *figures, *parts])
    return markdown(header, rows, numbers_from=2)


def published_sources() -> str:
    """Where each table is from, and what is assumed where it does not say."""
    rows = ([table.name, table.source, table.assumed] for table in read_tables())
    return markdown(["table", "source", "assumed"], rows, numbers_from=3)


if __name__ == "__main__":
    main()
