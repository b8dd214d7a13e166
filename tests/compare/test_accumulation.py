"""`shardpair accumulation`: cases of equal tokens, loss over time, and everything that a study has."""

import json

import msgspec
import pytest
from benches import bench_of, measurement_of

from compare import api
from compare.cli import main
from compare.judge.outcome import save
from compare.judge.timed_outcome import TimedOutcome
from compare.show.markdown import markdown
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.accumulation import Accumulation

ARGUMENTS = ("tiny.toml", "--passes", "2", "1", "--rounds", "2", "--quiet")


def asked(experiment: Experiment, **given) -> Accumulation:
    sections = {name: getattr(experiment, name) for name in Experiment.__struct_fields__}
    return Accumulation(**sections, **{"window": 2, "windows": 3, "anyway": True, **given})


def timed(experiment: Experiment) -> TimedOutcome:
    """Losses fall by 1 % an update; an update takes 10 ms, and 2 ms for every pass."""
    plan = asked(experiment, passes=(1, 2, 4)).planned(experiment)
    done = [
        measurement_of(
            case,
            number,
            wall_ms=10.0 + 2 * case.experiment.train.gradient_accumulation_steps,
            losses=[4.0 * 0.99**step for step in range(case.experiment.train.max_iters)],
            grad_norms=[1.0] * case.experiment.train.max_iters,
        )
        for number in range(1, 6)
        for case in plan.cases
    ]
    timing = {"timing": plan.timing, "study": "accumulation"}
    return bench_of(plan.cases, measurements=done, busy_cores=[0.0] * 5, **timing)


def test_every_case_trains_on_the_same_tokens(tiny):
    plan = asked(tiny, passes=(4, 1, 2)).planned(tiny)
    trains = [case.experiment.train for case in plan.cases]
    assert [train.gradient_accumulation_steps for train in trains] == [1, 2, 4]
    assert trains[-1].max_iters == plan.timing.steps
    assert (
        len({case.experiment.tokens_per_step * case.experiment.train.max_iters for case in plan.cases}) == 1
    )
    assert [plan.timing_of(case).steps for case in plan.cases] == [train.max_iters for train in trains]
    longer = asked(tiny, passes=(1, 2), updates=50).planned(tiny)
    assert [case.experiment.train.max_iters for case in longer.cases] == [100, 50]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"passes": (2, 3)}, "--passes 2 3: give several numbers that divide the largest"),
        ({"passes": (2,)}, "give several"),
        ({"passes": (0, 2)}, "give several"),
        ({"updates": 3}, "--updates 3: --window and --windows need 20"),
    ],
)
def test_what_cannot_work_is_refused(tiny, given, message):
    with pytest.raises(ExperimentError, match=message):
        asked(tiny, **given).planned(tiny)


def test_what_has_no_effect_or_no_engine_is_refused(capsys):
    assert main(["accumulation", "demo", "--train.gradient_accumulation_steps", "3"]) == 2
    assert "it follows from --passes" in capsys.readouterr().err
    pipeline = ["--layout.dp_replicate", "1", "--layout.pp", "2", "--engine", "jax-compiler"]
    pipeline += ["--layout.microbatches", "2"]
    assert main(["accumulation", "demo", *pipeline]) == 2
    assert "jax-compiler has gpipe" in " ".join(capsys.readouterr().err.split())


def test_loss_is_held_against_time(tiny, tmp_path):
    findings = Accumulation.findings(timed(tiny), tmp_path)
    one, two, four = findings.value["rows"]
    assert (one.updates, two.updates, four.updates) == (80, 40, 20)
    assert (one.seconds[-1], four.seconds[-1]) == pytest.approx((0.96, 0.36))
    assert one.loss < two.loss < four.loss
    assert one.seconds_to(four.loss) == pytest.approx(0.30)  # 20 updates of 12 ms, and half an eighth
    assert one.seconds_to(0.0) == float("inf")
    assert findings.sentence.startswith(f"loss {four.loss:.3f} after 0.30 s with 1; ")
    assert findings.sentence.endswith("0.36 s with 4")
    assert len(findings.figures[0].series) == 3


def test_it_is_shown_everywhere(tiny, tmp_path, capsys):
    save(timed(tiny), tmp_path)
    assert main(["report", str(tmp_path), "--picture", str(tmp_path / "a.png")]) == 0
    assert "Equal tokens, in many updates or few" in capsys.readouterr().out
    assert (tmp_path / "accumulation.html").read_text().count("<svg") == 1
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert [row["passes"] for row in json.loads(capsys.readouterr().out)["rows"]] == [1, 2, 4]
    assert main(["report", str(tmp_path), "--markdown"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "outcome.json").rename(tmp_path / "accumulation.json")
    assert printed == markdown(Accumulation.findings(timed(tiny), tmp_path)) + "\n"
    assert "| passes | updates | tokens/s | s | loss |\n| --- | ---: |" in printed


def test_it_is_measured_interrupted_and_goes_on(timed_engines, tmp_path, capsys):
    timed_engines.interrupted_at = 4
    assert main(["accumulation", *ARGUMENTS, "--run_dir", "b"]) == 130
    said = capsys.readouterr()
    assert "Kept: 1 of 2 rounds, 3 processes" in said.err
    assert "shardpair accumulation --continue b" in said.err
    assert "Equal tokens" in said.out
    timed_engines.interrupted_at = 0
    assert main(["accumulation", "--continue", "b", "--passes", "1", "2"]) == 2
    assert main(["accumulation", "--continue", "b", "--quiet", "--json"]) == 0
    outcome = msgspec.convert(json.loads(capsys.readouterr().out)["result"], TimedOutcome)
    assert (outcome.finished_rounds, len(timed_engines.launched)) == (2, 5)
    assert {request.experiment.train.max_iters for request in timed_engines.requests} == {44, 88}


def test_a_plan_starts_nothing(timed_engines, capsys):
    assert main(["accumulation", *ARGUMENTS, "--dry_run"]) == 0
    assert "torch-manual.single, 2 an update" in capsys.readouterr().out
    assert timed_engines.launched == []


def test_it_is_answered_from_python(timed_engines, capsys):
    answer = api.study("accumulation", "tiny.toml", passes=[1, 2], rounds=1, run_dir="b", quiet=True)
    assert [row.updates for row in answer.findings.value["rows"]] == [88, 44]
    assert answer.findings.sentence in repr(answer)
    assert capsys.readouterr().out == ""
    with pytest.raises(ExperimentError, match="no such study"):
        api.study("nothing")
