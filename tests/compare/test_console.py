"""Console blocks of README.md and docs/: every command runs, and prints what the page shows."""

import re

import console
import pytest

from compare.execute.cpu_load import warn_of_load
from compare.judge.outcome import Circumstances
from tests.support import warm
from tests.support.records import outcome_of

DEMO = "shardpair run demo --quiet"
SHORTER = {
    f"{DEMO} | tail -n 24": f"{DEMO} --train.max_iters 3 | tail -n 23",
    "--presets fsdp_tp --train.max_iters 5": "--presets fsdp_tp --train.max_iters 3 --model.n_layer 2",
}
"""Parts of commands, and what the test runs in their place."""
OF_ALL_STEPS = re.compile(r"^(final loss|mean loss|tokens seen)\b.*")
"""Lines whose numbers depend on the number of steps."""
OF_MANY_STEPS = "step time, p"


def lines_of(command: str, output: str) -> list[str]:
    """Lines of an output as `comparable`; of the demo, below the heading and without numbers of all steps."""
    lines = console.comparable(output)
    if DEMO not in command:
        return lines
    of_table = [line for line in lines[1:] if not line.startswith(OF_MANY_STEPS)]
    return [OF_ALL_STEPS.sub(r"\1", line) for line in of_table]


@pytest.mark.slow
@pytest.mark.parametrize("page", console.pages(), ids=lambda page: page.stem)
def test_page_shows_true_output(page, tmp_path):
    """The demo makes 3 of its 100 steps: `make docs` wrote its losses, which are not compared."""
    text = page.read_text()
    shown = [*console.commands(text)]
    for part, shorter in SHORTER.items():
        text = text.replace(part, shorter)
    found = console.outputs(text, tmp_path, warm.python())
    for (command, old), new in zip(shown, found, strict=True):
        assert lines_of(command, new) == lines_of(command, old), f"{command}: run `make docs`"


def test_environment_of_a_page_is_inherited(tmp_path, monkeypatch):
    """A warm Python leaves a command with another PYTHONPATH to a real one, which imports for seconds."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert [*console.outputs("```console\n$ env | grep -c ^PYTHONPATH=\n```", tmp_path)] == ["0\n"]


def test_changed_output_is_found():
    page = "```console\n$ shardpair list\nthree engines\n```\n"
    assert list(console.commands(page)) == [("shardpair list", "three engines\n")]
    assert console.rewritten(page, iter(["six engines\n"])) == page.replace("three", "six")
    assert console.comparable("a 2e-16 of 7") == console.comparable("a  3e-15 of 7")
    assert console.comparable("7 rungs") != console.comparable("8 rungs")
    assert console.comparable("step 7 ms") == console.comparable("step 8.5 ms")


def test_busy_machine_changes_no_page(tiny):
    busy = Circumstances(cores=2, used_by_others={"jax-manual": 2.0})
    (warning,) = warn_of_load(outcome_of(tiny, circumstances=busy))
    assert console.comparable(f"PASS\n{warning}\n") == ["PASS"]


def test_some_page_has_a_console():
    assert {page.name for page in console.pages()} >= {"README.md", "tour.md"}
