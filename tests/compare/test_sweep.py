"""Sweeps: what runs, what is left out by name, and how figures become rows."""

import msgspec
import pytest
from sweeps import plan_of, swept

from compare.judge.comparison import judged
from compare.judge.outcome import read_outcome, save
from compare.numerics.parameters import parameter_count
from compare.show.page import write_page
from compare.show.terminal import print_findings
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import ExperimentError, edited
from compare.studies import memory_estimate
from compare.studies.sweep import Sweep
from compare.studies.sweep_outcome import FIRST, SweepOutcome


def names(plan: SweepOutcome) -> dict[str, list[str]]:
    return {batch.name: [case.name for case in batch.cases] for batch in plan.batches()}


def test_strategies_run_beside_one_device(small):
    plan = plan_of(small, engines=["jax-manual", "torch-manual"])
    assert names(plan) == {
        "batch-8": [
            FIRST,
            "jax-manual.ddp.2",
            "jax-manual.fsdp.2",
            "torch-manual.ddp.2",
            "torch-manual.fsdp.2",
        ]
    }
    (batch,) = plan.batches()
    degrees = {case.name: case.experiment.layout.axes for case in batch.cases}
    assert degrees[FIRST] == {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1}
    assert degrees["jax-manual.fsdp.2"]["dp_shard"] == 2


def test_strong_scaling_keeps_the_batch_and_weak_scaling_the_share(small):
    chosen = {"engines": ["torch-manual", "jax-manual"], "strategies": ["fsdp"], "devices": [1, 2, 4]}
    strong = names(plan_of(small, scaling="strong", **chosen))
    assert strong == {
        "batch-8": [
            FIRST,
            "jax-manual.single.1",
            "torch-manual.fsdp.2",
            "jax-manual.fsdp.2",
            "torch-manual.fsdp.4",
            "jax-manual.fsdp.4",
        ]
    }
    weak = plan_of(small, scaling="weak", **chosen)
    assert names(weak) == {
        "batch-8": [FIRST, "jax-manual.single.1"],
        "batch-16": [FIRST, "torch-manual.fsdp.2", "jax-manual.fsdp.2"],
        "batch-32": [FIRST, "torch-manual.fsdp.4", "jax-manual.fsdp.4"],
    }
    for batch in weak.batches():
        assert {case.experiment.train.batch_size for case in batch.cases} == {
            batch.experiment.train.batch_size
        }


def test_what_cannot_be_is_left_out_by_name(small):
    plan = plan_of(
        small, engines=list(STUDIED), strategies=["ddp", "ddp_flat", "pp_zero_bubble", "hsdp"], devices=[2]
    )
    (batch,) = plan.batches()
    left_out = batch.left_out
    assert left_out.keys() == {
        *(f"{name}.ddp_flat.2" for name, engine in STUDIED.items() if not engine.offers_choice),
        *(
            f"{name}.pp_zero_bubble.2"
            for name, one in STUDIED.items()
            if "zero_bubble" not in one.layouts.schedules
        ),
        *(f"{engine}.hsdp.2" for engine in STUDIED),
    }
    assert left_out["torch-library.ddp_flat.2"] == "the same as ddp: torch-library chooses for itself"
    assert "jax-manual has" in left_out["jax-manual.pp_zero_bubble.2"]
    assert "--devices 2: preset hsdp takes a multiple" in left_out["jax-manual.hsdp.2"]
    with pytest.raises(ExperimentError, match="no strategy is left: --devices 2: preset hsdp"):
        plan_of(small, strategies=["hsdp"]).batches()


def test_a_model_too_large_for_one_device_has_no_reference(small, monkeypatch):
    def require(engine, experiment, *, platform):
        if experiment.layout.devices == 1:
            raise ExperimentError("too large for one")

    monkeypatch.setattr("compare.studies.sweep_outcome.require_memory", require)
    (batch,) = plan_of(small).batches()
    assert [case.name for case in batch.cases] == ["torch-manual.ddp.2", "torch-manual.fsdp.2"]
    assert batch.left_out == {FIRST: "too large for one"}


def test_a_strategy_too_large_for_this_machine_does_not_end_the_others(small, monkeypatch):
    monkeypatch.setattr(memory_estimate, "memory_bytes", lambda: 10**6)
    large = edited(small, {"model": {"n_embd": 512}})
    with pytest.raises(ExperimentError, match="no strategy is left: torch-manual would need"):
        plan_of(large).batches()


def test_rows_have_the_classic_figures(small, tmp_path):
    outcome, *_ = swept(plan_of(small), tmp_path, lambda case: 20.0 / case.experiment.layout.devices)
    assert [(row.strategy, row.devices) for row in outcome.rows] == [("single", 1), ("ddp", 2), ("fsdp", 2)]
    one, ddp, _ = outcome.rows
    assert (one.verdict, ddp.verdict) == ("", "PASS")
    assert ddp.step_time_ms_mean == ddp.step_time_ms_median == 10.0
    assert ddp.tokens_per_s == 8 * 16 / 0.010
    assert ddp.samples_per_s == 800
    assert ddp.final_loss == 5.5 / 3
    assert ddp.mean_loss == pytest.approx(5.5 * (1 + 1 / 2 + 1 / 3) / 3)
    gradients = 8 * parameter_count(small.model)  # float64
    assert (ddp.comm_bytes, ddp.comm_wire_bytes, ddp.peak_mem_bytes) == (gradients + 4, gradients + 6, 2000)
    assert ddp.mfu is None
    assert ddp.efficiency is None
    assert outcome.passed


def test_efficiency_is_throughput_per_device_over_that_of_the_fewest(small, tmp_path):
    def step_ms(case):
        devices, rows = case.experiment.layout.devices, case.experiment.train.batch_size
        return {1: 10.0, 2: 8.0, 4: 5.0}[devices] * rows / 8

    for scaling in ("strong", "weak"):
        plan = plan_of(small, strategies=["ddp"], devices=[1, 2, 4], scaling=scaling)
        outcome, *_ = swept(plan, tmp_path / scaling, step_ms)
        found = [(row.strategy, row.devices, row.batch_size, row.efficiency) for row in outcome.rows]
        batches = {"strong": [8, 8, 8], "weak": [8, 16, 32]}[scaling]
        assert found == [
            ("single", 1, batches[0], pytest.approx(1.0)),
            ("ddp", 2, batches[1], pytest.approx(10 / 8 / 2)),
            ("ddp", 4, batches[2], pytest.approx(10 / 5 / 4)),
        ]


def test_without_one_device_each_strategy_is_its_own_measure(small, tmp_path):
    plan = plan_of(small, devices=[2, 4], scaling="strong")
    outcome, *_ = swept(plan, tmp_path, lambda case: 30.0 if "fsdp" in case.name else 10.0)
    assert {(row.strategy, row.devices): row.efficiency for row in outcome.rows} == {
        ("ddp", 2): 1.0,
        ("ddp", 4): 0.5,
        ("fsdp", 2): 1.0,
        ("fsdp", 4): 0.5,
    }


def test_a_strategy_that_computes_something_else_fails_the_sweep(small, tmp_path, capsys):
    plan = plan_of(small, devices=[1, 2], scaling="weak")
    outcome, *_ = swept(plan, tmp_path, wrong=("torch-manual.fsdp.2",))
    assert not outcome.passed
    assert [row.passed for row in outcome.rows] == [True, True, False]
    assert outcome.verdict.startswith("batch-16: torch-manual.fsdp.2 against reference: FAIL at loss")
    print_findings(Sweep.findings(outcome, tmp_path), as_json=False)
    assert "FAIL at loss" in " ".join(capsys.readouterr().out.split())


def test_what_did_not_finish_is_named_and_ends_nothing(small, tmp_path, capsys):
    plan = plan_of(small)
    _, comparisons, records = swept(plan, tmp_path)
    (name,) = comparisons
    kept = {record.folder.name: record for record in records[name][:2]}
    failed = msgspec.structs.replace(comparisons[name], failures={"torch-manual.fsdp.2": "rank 1 [/x] died"})
    save(judged(failed, kept), tmp_path / name)
    outcome, _ = Sweep.judged_again(plan, tmp_path)
    assert [row.strategy for row in outcome.rows] == ["single", "ddp"]
    assert not outcome.passed
    assert outcome.verdict.startswith("INCOMPLETE: the losses of torch-manual.ddp.2 agree with those of")
    found = Sweep.findings(outcome, tmp_path)
    print_findings(found, as_json=False)
    assert "torch-manual.fsdp.2 did not finish: rank 1 [/x] died" in capsys.readouterr().out
    page = write_page(tmp_path / "sweep.html", found)
    assert "rank 1 [/x] died" in page.read_text()
    assert f"shardpair sweep --continue {tmp_path}" in page.read_text()


def test_an_outcome_is_read_back_as_it_was(small, tmp_path):
    outcome, *_ = swept(plan_of(small, devices=[1, 2], scaling="strong"), tmp_path)
    save(outcome, tmp_path)
    assert read_outcome(tmp_path, SweepOutcome) == outcome


def test_a_reference_that_runs_alone_is_held_to_its_request(small, tmp_path):
    plan = plan_of(small, strategies=["single"])
    assert swept(plan, tmp_path / "whole")[0].passed
    outcome, *_ = swept(plan, tmp_path / "short", steps_left=1)
    assert not outcome.passed
    assert outcome.rows[0].verdict == "FAIL at request: it has 2 of 3 steps: it ends there"
    assert not outcome.rows[0].passed
