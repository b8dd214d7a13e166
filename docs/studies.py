"""`make studies`: the studies that the docs show, on an idle machine; docs/data/NAME.json, an outcome each.

    python docs/studies.py accumulation        # one of them, or of the benches

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
from pathlib import Path

from performance import BENCHES, keep, kept

from compare.host.json_files import read_json
from compare.judge.outcome import OUTCOME, Outcome, TimedOutcome, read_outcome
from compare.show.markdown import markdown
from compare.studies.registry import STUDIES

CTRL_C = 130
DATA = Path(__file__).parent / "data"
ASIDE = Path(__file__).parents[1] / "runs" / "aside"
"""Of git ignored."""
SHOWN = {"accumulation": "accumulation demo --layout.dp_replicate 2"}
"""Arguments of shardpair, by name."""


def study_section(name: str, data: Path = DATA) -> str:
    """A study's command, tables and sentences; or that it was not run yet."""
    command, file = f"```sh\nshardpair {SHOWN[name]}\n```", data / f"{name}.json"
    if not file.is_file():
        return f"{command}\n\nNot measured yet: `make studies` measures it."
    study = STUDIES[read_json(file, Outcome).study]
    return f"{command}\n\n{markdown(study.findings(read_json(file, study.kept), data))}"


def main(names: list[str]) -> int:
    """Run the studies of these names, or all but the benches. Returns the exit code: 0 if all passed."""
    known = SHOWN | BENCHES
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
        command = [sys.executable, "-m", "compare", *shlex.split(arguments), "--run_dir", str(run_dir)]
        if code := subprocess.run(command, check=False).returncode:
            return code
        ASIDE.mkdir(parents=True, exist_ok=True)
        if name in BENCHES:
            keep(kept(arguments, read_outcome(run_dir, TimedOutcome)), ASIDE / f"{name}.json")
        else:
            shutil.copy(run_dir / OUTCOME, ASIDE / f"{name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
