"""docs/performance.md: what it keeps of a bench, and what it says where nothing was measured."""

import msgspec
import performance
import pytest
import studies
import tables
from benches import cases_of, finished
from performance import BENCHES, Kept, kept, read_kept

from compare.cli import parse
from compare.studies.bench import Bench


@pytest.fixture
def stored(tmp_path, monkeypatch, tiny):
    """A bench that is kept, in a file of its own."""
    for module in (performance, studies):
        monkeypatch.setattr(module, "DATA", tmp_path / "data")
    result = finished(cases_of(tiny), left_out={"pp-8": "it has too few layers"}, busy_cores=[1.5])
    found = kept(BENCHES["itself"], result)
    write({"itself": found})
    return found


def write(found: dict[str, Kept]) -> None:
    performance.DATA.mkdir(exist_ok=True)
    for name, one in found.items():
        (performance.DATA / f"{name}.json").write_bytes(studies.in_lines(one))


def test_every_bench_of_the_page_is_one():
    for name, arguments in BENCHES.items():
        command, _ = parse(arguments.split())
        assert isinstance(command, Bench), name


def test_a_stored_bench_is_a_table_with_its_command(stored):
    section = tables.performance("itself")
    assert f"shardpair {BENCHES['itself']}" in section
    assert "**single: nothing split: 1 CPU device, 64 tokens a step, float64**" in section
    assert "| engine | wall ms | ratio |" in section
    assert "| torch-library | " in section
    assert "Fewer than 5" not in section
    assert "Every row could tell from 1.00 a wall time below 0." in section
    assert tables.resolution().startswith("The 2 ratios have 93.8 % intervals of 5 rounds, ")
    assert "Machine: a CPU, 2 cores" in section
    assert "**Others used the processor before round 1 (1.5 cores): figures may not hold.**" in section
    assert "Left out: pp-8: it has too few layers." in section


def test_the_summary_has_a_row_for_each_layout_and_the_method_is_said_once(stored):
    once = stored
    (ratios, *_) = once.ratios.values()
    named = msgspec.structs.replace(once, ratios={"torch-manual.fsdp-2": ratios, "torch-manual.pp2": ratios})
    write({"torch-2": named, "itself": once})
    rows = [line.split(" | ")[:2] for line in tables.performance_summary().splitlines()[2:]]
    assert rows == [["| `fsdp`", "2"], ["| `pp`", "2"]]
    assert tables.method().count("each case a fresh process") == 1
    assert "each case a fresh process" not in tables.performance("itself")


def test_two_benches_agree_where_all_their_intervals_overlap(stored):
    once = stored
    name, ratios = next((n, r) for n, r in once.ratios.items() if r.wall.median != 1)
    write({"torch-2-tensor": once, "torch-2-tensor-again": once})
    assert (
        tables.agreement()
        == f"Both of 0123456789ab: {2 * len(once.ratios)} of {2 * len(once.ratios)} intervals overlap."
    )
    far = msgspec.structs.replace(ratios.wall, median=9.0, low=8.9, high=9.1)
    moved = once.ratios | {name: msgspec.structs.replace(ratios, wall=far)}
    other = msgspec.structs.replace(once, ratios=moved, git_commit="f" * 16)
    write({"torch-2-tensor": once, "torch-2-tensor-again": other})
    assert tables.agreement().startswith("Of 0123456789ab and ffffffffffff: ")
    assert tables.agreement().endswith(f"; apart are {name}, wall.")


def test_another_command_than_the_stored_one_is_told(stored):
    old = msgspec.structs.replace(stored, command="shardpair bench demo")
    write({"itself": old})
    assert "**Measured with another command: `shardpair bench demo`.**" in tables.performance("itself")


def test_what_was_not_measured_is_said(stored):
    assert "Not measured yet: `make performance` measures it." in tables.performance("single")


def test_what_was_measured_before_a_bench_that_was_interrupted_is_kept(stored, tmp_path, monkeypatch):
    monkeypatch.setattr(studies, "ASIDE", tmp_path / "aside")
    (tmp_path / "aside").mkdir()
    codes = {"torch-2": 0, "torch-4": 1, "single": 130}

    def measured(name: str, arguments: str) -> int:
        if codes[name] == 0:
            (tmp_path / "aside" / f"{name}.json").write_bytes(studies.in_lines(stored))
        return codes[name]

    monkeypatch.setattr(studies, "_measured", measured)
    assert studies.main(list(codes)) == 130
    assert {name for name in BENCHES if read_kept(name) == stored} == {"itself", "torch-2"}
    assert not list((tmp_path / "aside").iterdir())


def test_an_unknown_bench_is_refused(capsys):
    assert studies.main(["nosuch"]) == 2
    assert "nosuch: no such study" in capsys.readouterr().err
