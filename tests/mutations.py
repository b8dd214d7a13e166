"""Plant mistakes in the product, one at a time, and check that the tests fail: a nightly job, not a test.

    python tests/mutations.py              all of `tests/data/mutations.toml`
    python tests/mutations.py ladder tp    the mistakes whose id contains one of these words
    python tests/mutations.py --unmutated  their tests on the unchanged code, which must pass

Each mistake goes into a copy of the tree, and its tests run there. RED is right. SURVIVED: the tests pass.
TIMEOUT: a test took longer than 120 s, so nothing is known. MISSING: `old` does not occur once in the file;
move the mistake with the code. NO TEST: pytest found no such test, or could not import it. The exit code is
1 unless all are right.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from compare.setup.planted import Diff, patched_copy
from compare.spec.experiment import ExperimentError

ROOT = Path(__file__).parents[1]
FILES = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
TIMED_OUT = re.compile(rb"from pytest-timeout|^\++ Timeout \++$", re.MULTILINE)
"""Words of pytest-timeout in pytest's output."""
OPTIONS = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--timeout", "120"]


def verdict_of(tests: list[str], diffs: list[Diff], names: list[str]) -> str:
    """Run tests in a copy of the tree with these changes."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as tree:
        try:
            patched_copy(Path(tree), diffs, names)
        except ExperimentError:
            return "MISSING"
        environment = {**os.environ, "PYTHONPATH": tree, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", *OPTIONS, *tests]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True)
    if done.returncode == 1 and TIMED_OUT.search(done.stdout):
        return "TIMEOUT"
    return {0: "SURVIVED" if diffs else "GREEN", 1: "RED"}.get(done.returncode, "NO TEST")


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("words", nargs="*", help="parts of ids")
parser.add_argument("--unmutated", action="store_true", help="run the tests on the unchanged code")
arguments = parser.parse_args()
listed = tomllib.loads((ROOT / "tests/data/mutations.toml").read_text())["mutation"]
chosen = [m for m in listed if not arguments.words or any(word in m["id"] for word in arguments.words)]
listing = subprocess.check_output(FILES, cwd=ROOT, text=True).splitlines()
names = [name for name in listing if (ROOT / name).is_file()]
verdicts = set()
for mutation in chosen:
    begun = time.monotonic()
    diff = Diff(file=mutation["file"], old=mutation["old"], new=mutation["new"])
    verdict = verdict_of(mutation["tests"], [] if arguments.unmutated else [diff], names)
    print(f"{verdict:8} {time.monotonic() - begun:5.1f} s  {mutation['id']}", flush=True)
    verdicts.add(verdict)
sys.exit(verdicts != {"GREEN" if arguments.unmutated else "RED"})
