"""Tests on ranks and devices, as another project has them. One run of pytest has all ways to fail."""

import os
import re
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.support import processes

ROOT = Path(__file__).parents[2]
PROJECT = Path(__file__).with_name("project")
FILES = {
    "test_a_first": "first",
    "conftest": "options",
    "test_ranks": "ranks",
    "test_devices": "devices",
    "test_broken": "broken",
}
"""Files of the project, and where their text is."""
pytestmark = pytest.mark.slow


class Result(NamedTuple):
    outcome: str
    text: str


def command(folder: Path, *options: str) -> list[str]:
    shown = [
        "--junitxml",
        str(folder / "results.xml"),
        "-p",
        "torchpar.plugin.hooks",
        "-p",
        "no:cacheprovider",
    ]
    return [sys.executable, "-m", "pytest", "-rA", "--rootdir", str(folder), *shown, *options, str(folder)]


ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Result], str]:
    """Results by name, and the output, of one run of pytest."""
    folder = tmp_path_factory.mktemp("project")
    for name, source in FILES.items():
        shutil.copy(PROJECT / f"{source}.py", folder / f"{name}.py")
    done = processes.run(command(folder, "--size", "3"), cwd=folder, env=ENVIRONMENT)
    blocks = dict(
        re.findall(r"^_{3,} (\S+) _{3,}\n(.*?)(?=^[_=]{3,} )", done.stdout, re.MULTILINE | re.DOTALL)
    )
    results = {}
    for case in ElementTree.parse(folder / "results.xml").iter("testcase"):
        found = [child for child in case if child.tag in ("failure", "error", "skipped")]
        name = case.attrib["name"]
        text = "".join(child.get("message", "") for child in found) + blocks.get(name, "")
        results[name] = Result(found[0].tag if found else "passed", text)
    return results, done.stdout + done.stderr


PASSES = [
    "test_plugin_imports_no_framework",
    "test_fixtures_and_parameters[1]",
    "test_fixtures_and_parameters[2]",
    "test_method_and_ledger_of_the_mesh",
    "test_ranks_are_replaced",
    "test_mesh",
    "test_other_count",
]
FAILS = {
    "test_later_rank_fails": [
        "rank 1 of 2: KeyError: 'rank one'",
        "rank 0: no answer",
        "printed by 0",
        "printed by 1",
    ],
    "test_rank_dies": ["rank 1 of 2: killed by SIGKILL", "printed by 1"],
    "test_rank_hangs": ["no answer within 1.5 s from rank 1", "in test_rank_hangs", "rank 0: passed"],
    "test_unequal_shapes": [
        "rank 0 of 2: the ranks call different collectives: rank 0 ALLREDUCE of [4], rank 1 ALLREDUCE of [5]"
    ],
    "test_group_is_destroyed": ["a test may not call destroy_process_group()"],
    "test_wrong_mesh": ["has 2 x 2 = 4 ranks: change the mesh, or write ranks(4)"],
    "test_both_marks": ["a test runs on ranks or on devices"],
    "test_no_mark": ["mesh: mark the test with @pytest.mark.ranks(N) or @pytest.mark.devices(N)"],
    "test_fails": ["assert 2 == 3", "printed"],
    "test_rank_on_devices": ["rank: mark the test with @pytest.mark.ranks(N)"],
    "test_file_breaks_on_ranks": ["rank 0 of 1: it cannot import the file", "ImportError: only on ranks"],
}


@pytest.mark.parametrize("name", PASSES)
def test_passes(session, name):
    assert session[0][name].outcome == "passed", session[0][name].text


@pytest.mark.parametrize("name", FAILS)
def test_fails_with_the_cause(session, name):
    result = session[0][name]
    assert result.outcome in ("failure", "error")
    for words in FAILS[name]:
        assert words in result.text, result.text


def test_skips_and_expected_failures(session):
    assert "not today" in session[0]["test_skip"].text
    assert session[0]["test_expected_failure"].outcome == "skipped"


def test_warning_of_a_rank_is_shown(session):
    assert re.search(r"test_ranks.py:\d+: UserWarning: (UserWarning: )?careful", session[1]), session[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_nothing_outlives_pytest(tmp_path, number):
    shutil.copy(PROJECT / "hangs.py", tmp_path / "test_hangs.py")
    process = processes.start(command(tmp_path), cwd=tmp_path, env=ENVIRONMENT)
    processes.wait_for((tmp_path / "started").exists, process)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 2  # a server and its worker
    process.send_signal(number)
    done = processes.ended(process)
    processes.assert_gone(family)
    assert done.returncode == (2 if number == signal.SIGINT else -number)


def test_hidden_package_is_named(tmp_path):
    """A project may have a module `compare`. Only a marked test needs ours."""
    (tmp_path / "compare.py").write_text("THEIRS = 1\n")
    (tmp_path / "test_theirs.py").write_text(
        "import compare, pytest\n"
        "def test_theirs(): assert compare.THEIRS\n"
        "@pytest.mark.ranks(2)\ndef test_marked(rank): ...\n"
    )
    done = subprocess.run(command(tmp_path), cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert "compare.py hides shardpair's package `compare`: rename it" in done.stdout
    assert "1 failed, 1 passed" in done.stdout
