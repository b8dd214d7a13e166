"""docs/gpu_day.sh: its commands exist, and finished parts are kept. Stubs replace what the script calls."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from compare.cli import main

SCRIPT = Path(__file__).parents[2] / "docs" / "gpu_day.sh"
ROW = {"wall_ratio": {"median": 0.5}, "mfu": 0.3, "peak_mem_bytes": 14.6e9}
ROWS = [
    {**ROW, "label": "nanogpt-loop", "wall_ms": 36.0, "wall_ratio": None},
    {**ROW, "label": "nanogpt-loop layout.compile=inductor", "wall_ms": 18.0},
    {**ROW, "label": "jax-manual", "wall_ms": 20.0},
]
REPORT = {"values": {"rows": {"single": ROWS}}}
STUBS = {
    "shardpair": f"""
        [ "$1" = report ] && {{ echo '{json.dumps(REPORT)}'; [ $UNFINISHED = none ]; exit; }}
        for folder; do :; done
        mkdir -p "$folder" && touch "$folder/outcome.json"
        case $1 in $UNFINISHED) exit 1 ;; esac""",
    "timeout": """
        shift 5
        echo "$@" >> calls
        "$@" """,
}


def run_script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(SCRIPT), *arguments],
        env={**os.environ, "PATH": f"{Path.cwd()}:{os.environ['PATH']}", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """A folder with the stubs, and a function that returns the commands since its last call."""
    monkeypatch.chdir(tmp_path)
    for name, body in STUBS.items():
        Path(name).write_text(f"#!/bin/sh{body}\n")
        Path(name).chmod(0o755)

    def since() -> list[str]:
        path = Path("calls")
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    return since


def test_parts_are_kept_and_continued(calls):
    """The bench runs out of time; the second start repeats only the bench, from its folder."""
    first = run_script(UNFINISHED="bench", GPU_DAY_SECONDS="100000")
    assert first.returncode == 1
    assert "no time was left: bench." in first.stderr
    begun = calls()
    assert len(begun) == 9
    assert not any("--continue" in line for line in begun)
    assert "| jax-manual | 20.0 | 0.50 | 1.11 | 30% | 14.6 GB |\n" in first.stdout
    second = run_script(UNFINISHED="none", GPU_DAY_SECONDS="100000")
    assert calls() == ["shardpair bench --continue runs/gpu-day/bench"]
    assert second.returncode == 0, second.stderr


def test_no_part_starts_after_the_end(calls):
    ended = run_script(UNFINISHED="none", GPU_DAY_SECONDS="0")
    assert ended.returncode == 1
    assert calls() == []


def test_commands_would_run_on_a_gpu(calls, capsys):
    printed = run_script("--dry_run").stdout.splitlines()
    assert len(printed) == 9
    for line in printed:
        command = shlex.split(line)[1:]
        may_be_dry = [] if command[0] == "ledger" else ["--dry_run"]
        assert main([*command, *may_be_dry]) == (0 if may_be_dry else 3), capsys.readouterr().err
