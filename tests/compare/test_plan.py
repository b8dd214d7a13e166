"""`shardpair plan`: tables, page, JSON, the sum of one layout, and what is refused in a line."""

import importlib.metadata
import json
from pathlib import Path

import msgspec
import pytest

from compare import api
from compare.cli import main
from compare.contract.ahead_of_time import CompiledAhead, Waited, read_ahead_request
from compare.contract.communication import Communication
from compare.contract.memory_profile import Curve, DeviceMemory, Peak
from compare.contract.rank_alone import RankAlone, read_rank_alone_request
from compare.execute import ahead_of_time, alone
from compare.judge.closed_forms.communication import communication
from compare.judge.outcome import Outcome, read_outcome
from compare.judge.strategy import with_remat_resolved
from compare.plan.machine import FOLDER
from compare.plan.outcome import PlanOutcome
from compare.plan.predict import predict
from compare.spec.experiment import edited, to_toml

CURVE = Curve(positions=[0, 5], bytes={"parameters": [8, 12]}, length=6)
ARGUMENTS = ("plan", "small.toml", "--machine", "h100x16", "--quiet")


@pytest.fixture
def small(tiny, tmp_path, monkeypatch):
    """An experiment in bfloat16 in the current folder."""
    monkeypatch.chdir(tmp_path)
    wide = edited(tiny, {"precision": {"dtype": "bfloat16"}, "train": {"batch_size": 32}})
    (tmp_path / "small.toml").write_text(to_toml(wide))


def test_a_plan_is_shown_kept_and_shown_again(small, capsys, with_pictures):
    assert main([*ARGUMENTS, "--run_dir", "p", "--picture", "p.png"]) == 0
    printed = capsys.readouterr().out
    assert "layouts that fit; ms of a step" in printed
    assert "Predicted, not measured. 16 devices of 80 GB" in printed
    page = Path("p/plan.html").read_text()
    assert page.count("<svg") == 1
    assert "Memory against time" in page
    assert Path("p.png").read_bytes()[:4] == b"\x89PNG"
    assert main(["report", "p"]) == 0
    assert capsys.readouterr().out == printed
    assert main(["report", "p", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["rows"][0]
    assert best["seconds"] == pytest.approx(sum(best["parts"].values()))
    assert len(found["rows"]) == 10
    assert found["result"]["more"]["plan"]["machine"]["devices"] == 16


def plan_in(outcome: Outcome) -> PlanOutcome:
    return msgspec.convert(outcome.more["plan"], PlanOutcome)


def test_the_sum_of_one_layout_is_written_out_term_by_term(small, capsys):
    assert main([*ARGUMENTS, "--explain", "2", "--json", "--run_dir", "p"]) == 0
    outcome = plan_in(read_outcome(Path("p")))
    second = outcome.candidates[1]
    terms = predict(outcome.engine, second.of(outcome.experiment), outcome.machine).terms
    capsys.readouterr()
    assert main(["report", "p", "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert f"The step of {second.name}, term by term" in printed
    for term in terms:
        assert f"| {term.what} | {term.seconds * 1e3:,.3f} | {term.formula} |" in printed
    assert main([*ARGUMENTS, "--explain", second.name, "--run_dir", "q"]) == 0


def test_slower_links_change_the_choice_and_its_time(small, capsys):
    asked = {"machine": "h100x16", "quiet": True}
    fast = api.study("plan", "small.toml", **asked, run_dir="f")
    slow = api.study("plan", "small.toml", **asked, link_speed=1e-4, run_dir="s")
    fast, slow = plan_in(fast.outcome), plan_in(slow.outcome)
    assert slow.candidates[0].seconds > fast.candidates[0].seconds
    assert slow.machine.inside.bytes_per_s == pytest.approx(1e-4 * fast.machine.inside.bytes_per_s)
    assert capsys.readouterr().out == ""


def test_nothing_that_fits_is_an_answer_that_names_the_class(small, capsys):
    Path("tight.toml").write_text('like = "h100"\ndevices = 8\nmemory_bytes = 20e3')
    assert main(["plan", "small.toml", "--machine", "tight.toml", "--run_dir", "p"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "layouts fits: the smallest needs" in printed
    assert "What does not fit" in printed


def test_a_rank_that_runs_alone_is_held_against_the_closed_form(small, monkeypatch, capsys):
    """Stands in for the rank: it sends what the closed form says, and 4 bytes more if a fault is planted."""
    more = 0

    def ask(side, python, question, *, answer, environment, timeout_s):
        request = read_rank_alone_request(question[1])
        whole = with_remat_resolved(request.engine, request.experiment)
        rows = [
            Communication(
                kind=kind, axis=axis, purpose=purpose, calls=1, bytes=round(size) + more, wire_bytes=1
            )
            for (kind, axis, purpose), size in communication(request.engine, whole).items()
        ]
        memory = DeviceMemory(peak=Peak(bytes={"parameters": 12}), curve=CURVE)
        return RankAlone(rows=rows, memory=memory) if side == "torchpar" else "it is shy"

    monkeypatch.setattr(alone, "ask", ask)
    given = ["--layout.pp", "1", "--layout.no_sequence_parallel", "--layout.remat", "none", "--alone"]
    given += ["--precision.dtype", "float32"]
    assert main([*ARGUMENTS, *given, "--run_dir", "p"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "sends, run alone" in printed
    assert "What it keeps at its peak" in printed
    assert "Memory of the first rank of" in Path("p/plan.html").read_text()
    more = 4
    assert main([*ARGUMENTS, *given, "--run_dir", "q"]) == 1
    assert main([*ARGUMENTS, "--engine", "jax-manual", "--alone"]) == 2
    assert "--alone: jax-manual is one program for all devices" in " ".join(capsys.readouterr().err.split())
    of_ddp = ["--layout.dp_replicate", "8", "--layout.tp", "1", "--layout.pp", "1"]
    assert main([*ARGUMENTS, "--engine", "torch-library", *of_ddp, "--alone"]) == 2
    assert "DistributedDataParallel waits for answers" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--machine", "gb9000x8"), "--machine gb9000: no such chip (there are a100, b200, h100"),
        (("--machine", "h100x12"), "12 devices do not fill hosts of 8: give fewer than that, or a multiple"),
        (("--machine", "h100x8", "--layout.tp", "3"), "layout.tp = 3"),
        (("--machine", "h100x8", "--layout.tp", "8"), "layout.tp = 8 does not divide model.n_head = 2"),
        (
            ("--machine", "v5ex8", "--precision.dtype", "float32"),
            "no peak is known for float32",
        ),
        (("--machine", "h100x8", "--link_speed", "-1"), "--link_speed -1.0 must be more than 0"),
        (("--machine", "h100x8", "--explain", "9999"), "--explain 9999: give a place from 1 to"),
        (("--machine", "h100x8", "--explain", "fsdp7"), "or the name of a layout"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_line(small, capsys, arguments, says):
    assert main(["plan", "small.toml", *arguments, "--run_dir", "p"]) == 2
    said = capsys.readouterr()
    assert says in " ".join(said.err.split())
    assert "Traceback" not in said.err
    assert said.out == ""


AHEAD = ("plan", "small.toml", "--quiet", "--engine", "jax-manual", "--compile", "--layout.dp_shard", "4")


def test_a_layout_is_compiled_for_chips_that_are_not_here(small, monkeypatch, capsys):
    """The compiler's answer stands beside the closed form; a row less than that is seen."""

    def ask(side, python, question, *, answer, environment, timeout_s):
        request = read_ahead_request(question[1])
        assert (request.compiler, request.topology, request.target) == ("tpu", "v5e:2x2", "")
        sent = communication(request.engine, with_remat_resolved(request.engine, request.experiment))
        rows = [
            Communication(
                kind=kind, axis=axis, purpose=purpose, calls=1, bytes=int(size), wire_bytes=0, group_size=4
            )
            for (kind, axis, purpose), size in sent.items()
        ]
        return CompiledAhead(
            rows=rows[1:],
            problems=[],
            waited=[Waited(kind="all_gather", axis="dp_shard", hidden_bytes=3_000_000, waited_bytes=5_000)],
            state_bytes=1_000,
            argument_bytes=2_000,
            temporary_bytes=3_000,
            peak_bytes=4_000,
            compile_s=7.0,
            device="TPU v5 lite",
            versions={"libtpu": "0"},
        )

    monkeypatch.setattr(ahead_of_time, "ask", ask)
    assert main([*AHEAD, "--machine", "v5ex4", "--layout.zero", "3"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "compiled for v5e:2x2, TPU v5 lite" in printed
    assert "dp_shard reduce 0 0 43,776 0 0.00" in printed
    assert "3 MB 5 kB" in printed


@pytest.mark.parametrize(
    ("engine", "machine", "said"),
    {
        "whose": ("torch-manual", "v5ex4", "--compile: torch-manual is of torchpar: give --alone"),
        "no slice": (
            "jax-manual",
            "v5ex12",
            "12 chips are no slice of a pod of v5e: give a power of two up to 256",
        ),
        "no compiler": (
            "jax-manual",
            "v5ex4",
            "libtpu, which compiles for what is not here, is not installed",
        ),
        "no target": ("jax-manual", "mine.tomlx4", "mine.tomlx4 has no [target], which names a chip to XLA"),
    }.values(),
)
def test_what_cannot_be_compiled_is_refused_in_a_line(small, capsys, engine, machine, said):
    text = (FOLDER / "v5e.toml").read_text()
    Path("mine.toml").write_text(text[: text.index("[target]")])
    if "libtpu" in said and list(importlib.metadata.distributions(name="libtpu")):
        pytest.skip("libtpu is installed")
    assert main(["plan", "small.toml", "--quiet", "--engine", engine, "--machine", machine, "--compile"]) in (
        2,
        3,
    )
    assert said in " ".join(capsys.readouterr().err.split())
