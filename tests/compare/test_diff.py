"""`shardpair diff`: a comparison of two runs of any settings."""

import json
import math
import shutil

import msgspec
import numpy as np
import pytest

from compare.cli import main
from compare.commands.diff.difference import difference
from compare.contract.record import EVALUATIONS, LEDGER, MANIFEST, STEPS, read_tensors, write_tensors
from compare.contract.request import REQUEST, ResumePoint, Rung
from compare.contract.work import WORK
from compare.judge.outcome import save
from compare.spec.experiment import edited
from tests.support.records import finished_of, make_record, make_run, make_steps


def told(capsys, *arguments: object, code: int) -> dict:
    assert main(["diff", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def base(tmp_path, tiny):
    make_run(tmp_path / "one", tiny)
    return tmp_path / "one"


def between(tmp_path, first, second, **options):
    """The difference of two records, of one experiment each; `options` are the second one's."""
    a = make_record(tmp_path / "a", first)
    b = make_record(tmp_path / "b", second, **options)
    return difference(a, b, names=("a", "b"))


def test_equal_runs_are_alike(base, tmp_path, tiny, capsys):
    make_run(tmp_path / "two", tiny)
    found = told(capsys, base, tmp_path / "two", code=0)
    assert found["passed"] is found["values"]["alike"] is True
    assert list(found["values"]["pairs"]) == ["torch-manual", "jax-manual"]
    for pair in found["values"]["pairs"].values():
        assert pair["settings"] == {}
        rungs = {rung["rung"]: rung["error"] for rung in pair["verdict"]["rungs"]}
        assert rungs.keys() >= {"batch", "gradients", "first_moments", "final_weights", "lr_curve"}
        assert not any(rungs.values())
    # Two engines of a run
    found = told(capsys, base / "torch-manual", base / "jax-manual", code=0)
    (pair,) = found["values"]["pairs"].values()
    assert pair["settings"]["engine"] == ["torch-manual", "jax-manual"]
    found = told(capsys, base, base / "jax-manual", code=0)
    assert (len(found["values"]["pairs"]), list(found["left_out"])) == (1, [str(base / "torch-manual")])
    make_run(tmp_path / "few", tiny, names=("jax-manual",))
    assert main(["diff", str(base), str(tmp_path / "few")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"left out: {base / 'torch-manual'}: the other folder has no case of this name" in said
    whole = len(rungs)
    assert f"jax-manual: alike on {whole} rungs, over 3 steps" in said
    for file in (tmp_path / "few").glob("*/*.safetensors"):
        file.unlink()
    assert main(["diff", str(base), str(tmp_path / "few")]) == 0
    assert f"jax-manual: alike on 5 rungs, {whole - 5} not compared, over 3 steps" in capsys.readouterr().out
    skipped = told(capsys, tmp_path / "few", tmp_path / "few", code=0)["values"]["pairs"]["jax-manual"][
        "verdict"
    ]["skipped"]
    assert "first_moments" in skipped
    assert all("have no tensors of it: `shardpair run --keep_tensors`" in why for why in skipped.values())


def test_every_different_tensor_is_found(base, tmp_path, tiny, capsys):
    make_run(tmp_path / "two", tiny)
    folder = tmp_path / "two" / "jax-manual"
    for rung in Rung:
        tensors = {name: np.array(tensor) for name, tensor in read_tensors(folder, rung).items()}
        if rung == Rung.BATCH or rung.startswith("second") or not tensors:
            continue
        last = list(tensors)[-1]
        write_tensors(folder, rung, tensors | {last: tensors[last] + 1.0})
        found = told(capsys, base, tmp_path / "two", code=1)
        bad = [
            one["rung"] for one in found["values"]["pairs"]["jax-manual"]["verdict"]["rungs"] if one["error"]
        ]
        assert bad[:1] == ["first_moments" if rung in (Rung.FIRST_M, Rung.FIRST_V) else rung]
        assert found["values"]["pairs"]["torch-manual"]["verdict"]["rungs"][0]["error"] == 0
        write_tensors(folder, rung, tensors)
    first, *others = make_steps(tiny)
    make_run(tmp_path / "three", tiny, steps=[msgspec.structs.replace(first, loss=first.loss + 1), *others])
    assert main(["diff", str(base), str(tmp_path / "three")]) == 1
    assert "jax-manual: differ at" in capsys.readouterr().out


@pytest.mark.parametrize("name", [REQUEST, MANIFEST, STEPS, EVALUATIONS, LEDGER, WORK])
def test_changed_record_is_rejected(tmp_path, tiny, capsys, name):
    """A space is enough: the verdict belongs to the file as it was."""
    make_run(tmp_path, edited(tiny, {"train": {"eval_interval": 1}}))
    file, words = tmp_path / "jax-manual" / name, "has changed since it was judged: put it back"
    file.write_text(file.read_text().replace('":', '": ', 1))
    for command in (["report", str(tmp_path)], ["run", "--continue", str(tmp_path)]):
        assert main(command) == 2
        assert f"{file} {words}" in capsys.readouterr().err


def test_curves_are_compared_without_tensors(tmp_path, tiny):
    a = make_record(tmp_path / "a", tiny)
    for field in ("loss", "grad_norm", "lr"):
        steps = make_steps(tiny)
        steps[-1] = msgspec.structs.replace(steps[-1], **{field: 7.0})
        b = make_record(tmp_path / field, tiny, tensors={}, steps=steps)
        found = difference(a, b, names=("a", "b"))
        assert not found.verdict.passed
        assert found.verdict.failure
        assert found.verdict.failure.worst == f"{field} of step {len(steps) - 1}"
        assert found.verdict.skipped["gradients"].startswith("b has no tensors of it: ")


def test_costs_decide_nothing(tmp_path, tiny):
    slow = [msgspec.structs.replace(step, step_time_ms=1e3) for step in make_steps(tiny)]
    found = between(tmp_path, tiny, edited(tiny, {"layout": {"dp_replicate": 2}}), steps=slow)
    assert found.verdict.passed
    before, after = found.costs["step_time_ms_median"]
    assert after > 10 * before
    assert found.costs["all_reduce dp_replicate gradients (bytes)"][0] == 0
    assert found.settings["layout.dp_replicate"] == ("1", "2")
    lost = make_record(tmp_path / "c", tiny, steps=[msgspec.structs.replace(s, loss=math.nan) for s in slow])
    assert not difference(make_record(tmp_path / "d", tiny), lost, names=("d", "c")).verdict.passed


def test_longer_run_shares_steps(tmp_path, tiny):
    longer = edited(tiny, {"train": {"max_iters": tiny.train.max_iters + 2}})
    found = between(tmp_path, tiny, longer)
    assert found.verdict.passed
    assert found.steps == tiny.train.max_iters
    few, many = tiny.train.max_iters, longer.train.max_iters
    assert found.verdict.skipped["final_weights"] == f"the runs have {few} and {many} steps"
    assert "were recorded after" in found.verdict.skipped["later_weights"]


def test_coarser_dtype_gives_the_limits(tmp_path, tiny):
    assert tiny.precision.dtype == "float64"
    single = edited(tiny, {"precision": {"dtype": "float32"}})
    near = [msgspec.structs.replace(step, loss=step.loss * (1 + 1e-7)) for step in make_steps(tiny)]
    found = between(tmp_path, tiny, single, steps=near)
    assert found.verdict.passed, found.verdict.sentence()
    assert 0 < found.verdict.error("initial_weights") < 1e-7
    double = make_record(tmp_path / "c", tiny, steps=near)
    back = difference(make_record(tmp_path / "d", tiny), double, names=("d", "c"))
    assert back.verdict.failure.rung == "loss"


def test_incomparable_runs_are_one_line(base, tmp_path, tiny, capsys):
    longer = edited(tiny, {"train": {"max_iters": 53}})
    point = ResumePoint(checkpoint="there", step=50)
    make_record(tmp_path / "later", longer, steps=make_steps(longer)[50:], resume=point)
    shutil.copytree(base / "jax-manual", tmp_path / "short")
    (tmp_path / "short" / STEPS).write_bytes((base / "jax-manual" / STEPS).read_bytes().split(b"\n")[0])
    for name in ("empty", "bench"):
        (tmp_path / name).mkdir()
    save(finished_of(tiny, {"a": {}}, study="bench"), tmp_path / "bench")
    for other, says in {
        "later": "have no step in common",
        "short": "it has 1 of 3 steps; step 1 is missing",
        "bench": "a bench keeps no records to compare: `shardpair report` shows it",
        "empty": "has no manifest.json: it is not a finished run",
    }.items():
        assert main(["diff", str(base), str(tmp_path / other)]) == 2
        assert says in capsys.readouterr().err
