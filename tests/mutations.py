"""Plant mistakes in the product, one at a time, and see that the tests turn red: a nightly job, not a test.

    python tests/mutations.py              all of `tests/data/mutations.toml`
    python tests/mutations.py ladder tp    those whose id contains one of these words
    python tests/mutations.py --unmutated  their tests on the code as it is, which must pass

Each mistake goes into a copy of the tree, where the tests that are named beside it run. RED is right.
SURVIVED: the tests pass. MISSING: `old` is not once in the file; whoever moves code moves its mistakes.
NO TEST: pytest found no such test, or could not import it. The exit code is 1 unless all are right.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
OPTIONS = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--timeout", "120"]


def verdict_of(mutation: dict, tree: Path, *, plants: bool) -> str:
    """Plant a mistake, run its tests, and take it out again."""
    path = tree / mutation["file"]
    text = path.read_text() if path.is_file() else ""
    if text.count(mutation["old"]) != 1:
        return "MISSING"
    path.write_text(text.replace(mutation["old"], mutation["new"]) if plants else text)
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", *OPTIONS, *mutation["tests"]]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True)
    path.write_text(text)
    return {0: "SURVIVED" if plants else "GREEN", 1: "RED"}.get(done.returncode, "NO TEST")


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("words", nargs="*", help="parts of ids")
parser.add_argument("--unmutated", action="store_true", help="run the tests on the code as it is")
arguments = parser.parse_args()
listed = tomllib.loads((ROOT / "tests/data/mutations.toml").read_text())["mutation"]
chosen = [m for m in listed if not arguments.words or any(word in m["id"] for word in arguments.words)]
verdicts = set()
with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
    for name in subprocess.check_output(FILES, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, Path(folder) / name)
    for mutation in chosen:
        begun = time.monotonic()
        verdict = verdict_of(mutation, Path(folder), plants=not arguments.unmutated)
        print(f"{verdict:8} {time.monotonic() - begun:5.1f} s  {mutation['id']}", flush=True)
        verdicts.add(verdict)
sys.exit(verdicts != {"GREEN" if arguments.unmutated else "RED"})
