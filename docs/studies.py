"""`make studies`: run the studies that the docs show, and keep what each found in docs/data/NAME.json.

    python docs/studies.py savings moves        # some of them; those that time things need an idle machine

A page shows one between `generated: study-NAME` and `end`: its columns are the study's own.
"""

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from compare.host.disk import write_atomically
from compare.host.json_files import read_json
from compare.judge.outcome import OUTCOME, Outcome
from compare.show.findings import Findings
from compare.show.markdown import markdown, markdown_table
from compare.studies.registry import STUDIES

DOCS = Path(__file__).parent
DATA = DOCS / "data"
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
    """Run the studies of these names, or all. Returns the exit code: that of the first which failed."""
    if unknown := sorted(set(names) - set(SHOWN)):
        print(f"{unknown[0]}: no such study (there are {', '.join(SHOWN)})", file=sys.stderr)
        return 2
    for name in names or SHOWN:
        with tempfile.TemporaryDirectory() as folder:
            run_dir = Path(folder) / name
            picture = ["--picture", str(DOCS / PICTURES[name])] if name in PICTURES else []
            asked = [*shlex.split(SHOWN[name]), *picture, "--run_dir", str(run_dir)]
            if code := subprocess.run([sys.executable, "-m", "compare", *asked], check=False).returncode:
                return code
            DATA.mkdir(exist_ok=True)
            write_atomically(DATA / f"{name}.json", in_lines(outcome_in(run_dir / OUTCOME)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
