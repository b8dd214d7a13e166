"""`make studies`: run the studies that the docs show, and keep what each found in docs/data/NAME.json.

    python docs/studies.py savings moves        # some of them; those that time things need an idle machine
    python docs/studies.py proofs               # check, golden and faults, of which the errors are kept
    python docs/studies.py benches              # those of docs/performance.md: hours

A page shows one between `generated: study-NAME` and `end`: its columns are the study's own.

What was found is set aside in runs/ as soon as it is there, and put into docs/data when all have run, or by
the next call: a file that changed between two studies would be a change of the source, which they record.
What is stored of others stays. After one that fails nothing is stored for it, and the exit code says so.
"""

import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec
import performance
import proofs

from compare.host.disk import write_atomically
from compare.host.json_files import read_json
from compare.judge.comparison import Comparison
from compare.judge.outcome import OUTCOME, Outcome
from compare.judge.timed_outcome import TimedOutcome
from compare.show.findings import Findings
from compare.show.markdown import markdown, markdown_table
from compare.studies.registry import STUDIES

CTRL_C = 130
DOCS = Path(__file__).parent
DATA = DOCS / "data"
ASIDE = DOCS.parent / "runs" / "aside"
"""Of git ignored."""
SWEEP = "sweep demo --model.n_layer 3 --train.max_iters 40"
GROWING = "--presets ddp fsdp --devices 1 2 4 --engines jax-manual torch-manual"
SHOWN = {
    "accumulation": "accumulation demo --layout.dp_replicate 2",
    "moves": "moves check",
    "counts": "counts check",
    "precisions": "precisions cpu --train.max_iters 200 --optimizer.lr_decay_iters 200 "
    "--optimizer.warmup_iters 10",
    "recipes": "recipes",
    "savings": "savings demo --model.n_layer 6 --model.n_embd 128 --model.block_size 128 "
    "--model.vocab_size 8192 --train.batch_size 8",
    "memory": "memory demo --model.n_embd 64 --model.vocab_size 1024 --train.batch_size 8 "
    "--layout.remat none --layout.bucket_mb 0.1",
    "strategies": SWEEP,
    "strong": f"{SWEEP} --scaling strong {GROWING}",
    "weak": f"{SWEEP} --scaling weak {GROWING}",
}
"""Arguments of shardpair, by name."""
PICTURES = {"precisions": "precisions.png", "recipes": "recipe.png"}


def outcome_in(file: Path) -> Outcome:
    """What a study left in a file, which says which study it is."""
    return read_json(file, STUDIES[read_json(file, Outcome).study].kept)


@cache
def found_in(file: Path) -> Findings:
    """What the study in a file says."""
    outcome = outcome_in(file)
    return STUDIES[outcome.study].findings(outcome, file.parent)


def study_section(name: str, data: Path = DATA) -> str:
    """A study's command, tables and sentences; or that it was not run yet."""
    command, file = f"```sh\nshardpair {SHOWN[name]}\n```", data / f"{name}.json"
    if not file.is_file():
        return f"{command}\n\nNot measured yet: `make studies` measures it."
    return f"{command}\n\n{markdown(found_in(file))}"


def details_section(name: str) -> str:
    """The tables that a study's page has folded."""
    return "\n\n".join(map(markdown_table, found_in(DATA / f"{name}.json").details))


def sentence(name: str) -> str:
    """A study's outcome in a line."""
    return found_in(DATA / f"{name}.json").sentence


def in_lines(outcome: object) -> bytes:
    """JSON with a line for each field, and for each entry of a field that has several."""

    def lines(value: object, depth: int) -> str:
        if not isinstance(value, Mapping) or not value or not depth:
            return msgspec.json.encode(value).decode()
        inside = (f'"{key}": {lines(one, depth - 1)}' for key, one in value.items())
        return "{\n" + ",\n".join(inside) + "\n}"

    return f"{lines(msgspec.to_builtins(outcome), 2)}\n".encode()


def main(names: list[str]) -> int:
    """Run the studies of these names, or those of `SHOWN`. Returns the exit code: 0 if all passed."""
    known = SHOWN | proofs.PROOFS | performance.BENCHES
    groups = {"proofs": proofs.PROOFS, "benches": performance.BENCHES}
    names = [one for name in names for one in groups.get(name, (name,))]
    if unknown := sorted(set(names) - set(known)):
        print(f"{unknown[0]}: no such study (there are {', '.join(known)})", file=sys.stderr)
        return 2
    collect()
    worst = 0
    for name in names or SHOWN:
        print(f"{name}: shardpair {known[name]}", file=sys.stderr)
        worst = max(worst, code := _measured(name, known[name]))
        if code == CTRL_C:
            break
    collect()
    return worst


def collect() -> None:
    """Put what was set aside into docs/data."""
    for path in ASIDE.glob("*.json"):
        DATA.mkdir(exist_ok=True)
        shutil.move(path, DATA / path.name)


def _measured(name: str, arguments: str) -> int:
    """Exit code of a study; if it is 0, what it found is set aside."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / name
        picture = ["--picture", str(DOCS / PICTURES[name])] if name in PICTURES else []
        asked = [*shlex.split(arguments), *picture, "--run_dir", str(run_dir)]
        if code := subprocess.run([sys.executable, "-m", "compare", *asked], check=False).returncode:
            return code
        found = outcome_in(run_dir / OUTCOME)
        if name in performance.BENCHES and isinstance(found, TimedOutcome):
            found = performance.kept(arguments, found)
        if name in proofs.PROOFS and isinstance(found, Comparison):
            found = proofs.kept(found)
        ASIDE.mkdir(parents=True, exist_ok=True)
        write_atomically(ASIDE / f"{name}.json", in_lines(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
