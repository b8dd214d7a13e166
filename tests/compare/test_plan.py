"""`shardpair plan`: tables, page, JSON, the sum of one layout, absent devices, and what is refused."""

import importlib.metadata
import json
from pathlib import Path

import msgspec
import pytest
from records import make_ledger

from compare.cli import main
from compare.contract.absent import AbsentRequest, CompiledAhead, RankAlone
from compare.contract.ledger import Ledger
from compare.contract.memory_profile import DeviceMemory, Peak
from compare.contract.request import decode_request
from compare.plan import absent
from compare.plan.machine import read_machine
from compare.plan.predict import CALIBRATED
from compare.spec.experiment import ExperimentError, edited, to_toml

ARGUMENTS = ("plan", "small.toml", "--machine", "h100x16", "--quiet")


@pytest.fixture
def small(tiny, tmp_path, monkeypatch):
    """An experiment in bfloat16 in the current folder."""
    monkeypatch.chdir(tmp_path)
    wide = edited(tiny, {"precision": {"dtype": "bfloat16"}, "train": {"batch_size": 32}})
    (tmp_path / "small.toml").write_text(to_toml(wide))


def said(text: str) -> str:
    return " ".join(text.split())


def textbook_ledger(request, more: int = 0, without: int = 0) -> Ledger:
    """What the textbook says, and so many bytes more in each row, without the first rows."""
    rows = make_ledger(request.engine, request.experiment)[without:]
    return Ledger(rows=[msgspec.structs.replace(row, bytes=row.bytes + more) for row in rows])


def test_a_plan_is_shown_kept_and_shown_again(small, capsys):
    assert main([*ARGUMENTS, "--explain", "2", "--run_dir", "p"]) == 0
    printed = capsys.readouterr().out
    assert ", term by term" in printed
    assert "layouts that fit, one of each kind; ms of a step" in printed
    assert "Predicted, not measured. 16 devices of 80 GB" in printed
    page = Path("p/plan.html").read_text()
    assert main(["report", "p"]) == 0
    assert capsys.readouterr().out == printed
    assert main(["report", "p", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["rows"][0]
    assert best["seconds"] == pytest.approx(sum(best["parts"].values()))
    assert len(found["rows"]) == 10
    assert (
        len({(row["layout"]["tp"], row["layout"]["pp"], row["layout"]["remat"]) for row in found["rows"]}) > 3
    )
    low, high = found["times_as_long"]
    milliseconds = 1e3 * best["seconds"]
    span = f"{low:g} to {high:g} times as long, {low * milliseconds:,.1f} to {high * milliseconds:,.1f} ms"
    assert span in said(printed)
    assert span in page
    assert found["result"]["more"]["plan"]["machine"]["devices"] == 16


def test_one_measured_step_calibrates(small, capsys):
    assert main([*ARGUMENTS, "--json", "--run_dir", "p"]) == 0
    plain = json.loads(capsys.readouterr().out)["rows"][0]
    milliseconds = 3e3 * plain["seconds"]
    given = (
        "--measured",
        f"{plain['name']}={milliseconds:.6f}ms",
        "--layout.remat",
        plain["layout"]["remat"],
    )
    assert main([*ARGUMENTS, *given, "--json", "--run_dir", "q"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row["seconds"] for row in found["rows"]}
    assert found["times_as_long"] == list(CALIBRATED)
    assert min(rows.values()) <= 1.0001 * milliseconds / 1e3
    assert rows.get(plain["name"], milliseconds / 1e3) == pytest.approx(milliseconds / 1e3, rel=1e-4)
    assert found["result"]["more"]["plan"]["machine"]["slowdown"] > 2.9
    assert main(["report", "q"]) == 0
    assert "one measured step makes compute take" in said(capsys.readouterr().out)
    for wrong in ("fsdp3=4ms", f"{plain['name']}=soon"):
        assert main([*ARGUMENTS, "--measured", wrong]) == 2
        assert "give a layout as the plan names it" in said(capsys.readouterr().err)


def test_sequences_that_devices_do_not_divide_are_named(small, capsys):
    """24 sequences on 16 devices: not another step, and not without a word."""
    given = ("--train.batch_size", "24", "--json", "--run_dir", "p")
    assert main([*ARGUMENTS, *given]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["batch_size"] * row["gradient_accumulation_steps"] for row in found["rows"]} == {24}
    assert main(["report", "p"]) == 0
    assert "data parallelism over 16: 24 sequences do not divide: 32 do" in said(capsys.readouterr().out)


def test_nothing_that_fits_is_an_answer_that_says_what_the_smallest_needs(small, capsys):
    Path("tight.toml").write_text('like = "h100"\ndevices = 8\nmemory_bytes = 20e3')
    assert main(["plan", "small.toml", "--machine", "tight.toml", "--run_dir", "p"]) == 1
    assert "layouts fits: the smallest, " in said(capsys.readouterr().out)


def test_a_rank_that_runs_alone_is_held_against_the_textbook(small, monkeypatch, capsys):
    """Stands in for the rank: it sends what the textbook says, and 4 bytes more if a fault is planted."""
    more = 0

    def ask(side, python, question, *, answer, timeout_s):
        assert (side, question[0], answer) == ("torchpar", "--alone", RankAlone)
        assert '"source":"synthetic"' in question[1]
        ledger = textbook_ledger(decode_request(question[1], AbsentRequest, source=question[0]), more)
        return RankAlone(ledger=ledger, memory=DeviceMemory(peak=Peak(bytes={"parameters": 12_000})))

    monkeypatch.setattr(absent, "ask", ask)
    data = ["--data.source", "none/such"]  # which nothing reads
    given = [*data, "--layout.pp", "1", "--layout.no_sequence_parallel", "--layout.remat", "none", "--alone"]
    given += ["--precision.dtype", "float32"]
    assert main([*ARGUMENTS, *given, "--run_dir", "p"]) == 0
    printed = said(capsys.readouterr().out)
    assert "run alone: bytes at its peak" in printed
    assert "12 kB" in printed
    more = 4
    assert main([*ARGUMENTS, *given, "--run_dir", "q"]) == 1
    assert main([*ARGUMENTS, "--engine", "jax-manual", "--alone"]) == 2
    assert "--alone: jax-manual is one program for all devices" in said(capsys.readouterr().err)
    of_ddp = ["--layout.dp_replicate", "16", "--layout.tp", "1", "--layout.pp", "1"]
    assert main([*ARGUMENTS, "--engine", "torch-library", *of_ddp, "--alone"]) == 2
    assert "DistributedDataParallel waits for answers" in said(capsys.readouterr().err)


def test_a_layout_is_compiled_for_chips_that_are_not_here(small, monkeypatch, capsys):
    """The compiler's answer stands beside the plan and the textbook; what it does not send shows as 0."""

    def ask(side, python, question, *, answer, timeout_s):
        assert (side, question[0], answer) == ("jaxpar", "--compile", CompiledAhead)
        request = decode_request(question[1], AbsentRequest, source=question[0])
        assert (request.compiler, request.topology, request.target) == ("tpu", "v5e:2x2", "")
        return CompiledAhead(
            ledger=textbook_ledger(request, without=1),
            state_bytes=1_000,
            peak_bytes=4_000,
            compile_s=7.0,
            device="TPU v5 lite",
            versions={"libtpu": "0"},
        )

    monkeypatch.setattr(absent, "ask", ask)
    given = ("--engine", "jax-manual", "--compile", "--layout.dp_shard", "4", "--layout.zero", "3")
    assert main(["plan", "small.toml", "--quiet", "--machine", "v5ex4", *given]) == 0
    printed = said(capsys.readouterr().out)
    assert "compiled for v5e:2x2, TPU v5 lite" in printed
    assert "1 kB" in printed
    assert "4 kB" in printed
    assert "0.00" in printed


def test_what_cannot_be_planned_is_refused_in_a_line(small, capsys):
    for arguments, says in (
        (("--layout.tp", "3"), "layout.tp = 3: the given degrees must divide its 16 devices"),
        (("--layout.tp", "8"), "layout.tp = 8 does not divide model.n_head = 2"),
        (("--explain", "9999"), "--explain 9999: give a place from 1 to"),
        (("--shape.gated", "--alone"), "--alone and --compile have nanoGPT's model alone"),
        (("--compile",), "--compile: torch-manual is of torchpar: give --alone"),
    ):
        assert main([*ARGUMENTS, *arguments, "--run_dir", "p"]) == 2
        streams = capsys.readouterr()
        assert says in said(streams.err)
        assert "Traceback" not in streams.err
        assert streams.out == ""


def test_devices_are_named_as_a_compiler_does():
    assert absent.topology_of(read_machine("h100x16")) == "1x2x8"
    assert absent.topology_of(read_machine("v5e-256")) == "v5e:16x16"
    assert absent.topology_of(read_machine("v5p-128")) == "v5p:4x4x8"
    with pytest.raises(ExperimentError, match="12 chips are no slice of a pod of v5e: give a power of two"):
        absent.topology_of(read_machine("v5ex12"))
    nameless = msgspec.structs.replace(read_machine("v5ex4"), tpu="")
    with pytest.raises(ExperimentError, match="has no tpu or gpu_target"):
        absent.topology_of(nameless)


def test_a_missing_compiler_is_said_in_a_line(small, capsys):
    if list(importlib.metadata.distributions(name="libtpu")):
        pytest.skip("libtpu is installed")
    given = ("--engine", "jax-manual", "--machine", "v5ex4", "--compile")
    assert main(["plan", "small.toml", "--quiet", *given, "--run_dir", "p"]) == 3
    told = said(capsys.readouterr().err)
    assert "libtpu, which compiles for what is not here, is not installed" in told
    assert "ms a step" in told
    assert main(["report", "p"]) == 0, "the plan is kept"
    assert "layouts that fit" in said(capsys.readouterr().out)
