"""`make studies`: the studies that the docs show, on an idle machine; docs/data/NAME.json, an outcome each.

    python docs/studies.py accumulation        # one of them

A page shows one between `generated: study-NAME` and `end`: its columns are the study's own.
"""

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from compare.host.json_files import read_json
from compare.judge.outcome import OUTCOME, Outcome
from compare.show.markdown import markdown
from compare.studies.registry import STUDIES

DATA = Path(__file__).parent / "data"
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
    """Run the studies of these names, or all. Returns the exit code: that of the first which failed."""
    if unknown := sorted(set(names) - set(SHOWN)):
        print(f"{unknown[0]}: no such study (there are {', '.join(SHOWN)})", file=sys.stderr)
        return 2
    for name in names or SHOWN:
        with tempfile.TemporaryDirectory() as folder:
            run_dir = Path(folder) / name
            command = [sys.executable, "-m", "compare", *shlex.split(SHOWN[name]), "--run_dir", str(run_dir)]
            if code := subprocess.run(command, check=False).returncode:
                return code
            DATA.mkdir(exist_ok=True)
            shutil.copy(run_dir / OUTCOME, DATA / f"{name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
