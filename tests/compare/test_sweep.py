"""Sweeps: what runs, what is left out by name, how figures become rows and pictures, and one for real."""

import json
from pathlib import Path

import msgspec
import pytest
from records import make_record
from sweeps import plan_of, swept
from test_report import Outline

from compare.cli import main, parse
from compare.commands import sweep as command
from compare.contract.engines.registry import STUDIED
from compare.contract.experiment import ExperimentError, edited, load
from compare.contract.record import read_json
from compare.execute.launch import EngineError
from compare.judge.comparison import judged
from compare.present.report.sweep_page import repeat_command, write_page
from compare.present.sweep_tables import PAGE, columns, headline, print_sweep, worth
from compare.studies import memory_estimate, paired_run
from compare.studies.sweep import FIRST, SweepPlan, sweep_batches
from compare.studies.sweep_outcome import SWEEP, SweepOutcome, outcome_of, read_outcome, save_outcome

FOUR = {"model": {"n_layer": 2, "n_head": 4}, "train": {"batch_size": 8, "max_iters": 3}}


@pytest.fixture
def small(tiny):
    """An experiment that four devices can share in every way."""
    return edited(tiny, FOUR)


def names(plan: SweepPlan) -> dict[str, list[str]]:
    return {batch.name: [case.name for case in batch.cases] for batch in sweep_batches(plan)}


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
    (batch,) = sweep_batches(plan)
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
    for batch in sweep_batches(weak):
        assert {case.experiment.train.batch_size for case in batch.cases} == {
            batch.experiment.train.batch_size
        }


def test_what_cannot_be_is_left_out_by_name(small):
    plan = plan_of(
        small, engines=list(STUDIED), strategies=["ddp", "ddp_flat", "pp_zero_bubble", "hsdp"], devices=[2]
    )
    (batch,) = sweep_batches(plan)
    left_out = batch.left_out
    assert left_out.keys() == {
        *("jax-compiler.ddp_flat.2", "torch-library.ddp_flat.2"),
        *("jax-compiler.pp_zero_bubble.2", "jax-manual.pp_zero_bubble.2"),
        *(f"{engine}.hsdp.2" for engine in STUDIED),
    }
    assert left_out["torch-library.ddp_flat.2"] == "the same as ddp: torch-library chooses for itself"
    assert "jax-manual has" in left_out["jax-manual.pp_zero_bubble.2"]
    assert "--devices 2: this preset needs a multiple" in left_out["jax-manual.hsdp.2"]
    with pytest.raises(ExperimentError, match="no strategy is left: --devices 2: this preset"):
        sweep_batches(plan_of(small, strategies=["hsdp"]))


def test_a_model_too_large_for_one_device_has_no_reference(small, monkeypatch):
    def require(engine, experiment, *, platform):
        if experiment.layout.devices == 1:
            raise ExperimentError("too large for one")

    monkeypatch.setattr("compare.studies.sweep.require_memory", require)
    (batch,) = sweep_batches(plan_of(small))
    assert [case.name for case in batch.cases] == ["torch-manual.ddp.2", "torch-manual.fsdp.2"]
    assert batch.left_out == {FIRST: "too large for one"}


def test_a_strategy_too_large_for_this_machine_does_not_end_the_others(small, monkeypatch):
    monkeypatch.setattr(memory_estimate, "memory_bytes", lambda: 10**6)
    large = edited(small, {"model": {"n_embd": 512}})
    with pytest.raises(ExperimentError, match="no strategy is left: torch-manual would need"):
        sweep_batches(plan_of(large))


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
    assert (ddp.comm_calls, ddp.comm_bytes, ddp.comm_wire_bytes, ddp.peak_mem_bytes) == (3, 4004, 6006, 2000)
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
    assert outcome.sentence.startswith("batch-16: torch-manual.fsdp.2 against reference: FAIL at loss")
    print_sweep(outcome, tmp_path, as_json=False)
    assert "FAIL at loss" in " ".join(capsys.readouterr().out.split())


def test_what_did_not_finish_is_named_and_ends_nothing(small, tmp_path, capsys):
    plan = plan_of(small)
    _, comparisons, records = swept(plan, tmp_path)
    (name,) = comparisons
    kept = {record.folder.name: record for record in records[name][:2]}
    failed = msgspec.structs.replace(comparisons[name], failures={"torch-manual.fsdp.2": "rank 1 [/x] died"})
    outcome = outcome_of(plan, {name: judged(failed, kept)}, {name: list(kept.values())})
    assert [row.strategy for row in outcome.rows] == ["single", "ddp"]
    assert not outcome.passed
    assert outcome.sentence.startswith("INCOMPLETE: the losses of torch-manual.ddp.2 agree with those of")
    print_sweep(outcome, tmp_path, as_json=False)
    assert "torch-manual.fsdp.2 did not finish: rank 1 [/x] died" in capsys.readouterr().out
    page = write_page(outcome, {name: judged(failed, kept)}, {name: list(kept.values())}, tmp_path)
    assert "rank 1 [/x] died" in page.read_text()
    assert f"shardpair sweep --continue {tmp_path}" in page.read_text()


@pytest.mark.parametrize(
    ("given", "drawn"),
    [
        ({"engines": ["torch-manual", "jax-manual"]}, ["Loss of jax-manual", "Loss of torch-manual"]),
        (
            {"engines": ["jax-manual"], "strategies": ["ddp", "ddp_flat"]},
            ["Loss of jax-manual"],
        ),
        ({"devices": [1, 2, 4], "scaling": "weak"}, []),
    ],
)
def test_the_page_stands_alone_and_can_be_read_by_all(small, tmp_path, given, drawn):
    outcome, comparisons, records = swept(plan_of(small, **given), tmp_path)
    page = write_page(outcome, comparisons, records, tmp_path).read_text()
    outline = Outline(page)
    others = ["Efficiency against one device", "Throughput over devices"]
    if drawn:
        others = ["Peak memory of each strategy", "Step time of each strategy"]
    assert sorted(outline.pictures) == [*(f"{name} over steps" for name in drawn), *others]
    assert (outline.headers_without_scope, outline.boxes_without_name) == (0, 0)
    assert "" not in outline.cells
    assert not [name for name, times in outline.ids.items() if times > 1]
    assert not [word for word in ("<script", "src=", "<link", "@import", "url(http") if word in page]
    assert worth(outcome) in page
    assert "torch-manual, torch-manual" not in page
    assert "PASS" in page
    again = swept(plan_of(small, **given), tmp_path / "again")
    assert write_page(*again, tmp_path).read_text() == page


def test_the_page_says_what_its_times_are_worth(small, tmp_path):
    plain, *_ = swept(plan_of(small), tmp_path / "plain")
    assert "an order of magnitude" in worth(plain)
    assert f"share the {plain.cores} cores of one machine" in worth(plain)
    scaled, *_ = swept(plan_of(small, devices=[1, 2], scaling="strong"), tmp_path / "scaled")
    assert "what splitting the work costs, and not what more machines would bring" in worth(scaled)
    on_gpus = msgspec.structs.replace(scaled, plan=msgspec.structs.replace(scaled.plan, platform="gpu"))
    assert "cores" not in worth(on_gpus)
    assert headline(plain.plan) == "Strategies on 2 CPU devices"


def test_mfu_is_a_column_where_a_chip_has_a_peak(small, tmp_path):
    outcome, *_ = swept(plan_of(small), tmp_path)
    assert "MFU" not in columns(outcome)
    known = [msgspec.structs.replace(row, mfu=0.4) for row in outcome.rows]
    cell = columns(msgspec.structs.replace(outcome, rows=known))["MFU"]
    assert cell(known[0]) == "40.0%"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"engines": ["jax-manual", "torch-manual"], "devices": [1, 2, 4], "scaling": "weak", "ladder": True},
        {"platform": "gpu", "strategies": ["fsdp_tp"], "devices": [4]},
    ],
)
def test_the_command_on_the_page_asks_for_the_same(small, tmp_path, monkeypatch, given):
    plan = plan_of(small, **given)
    monkeypatch.chdir(tmp_path)
    outcome, comparisons, records = swept(plan, tmp_path / "run")
    write_page(outcome, comparisons, records, tmp_path)
    words = repeat_command(plan).split()
    parsed, name = parse(words[1:])
    assert isinstance(parsed, command.Sweep)
    again = parsed._planned(load(name))
    assert msgspec.structs.replace(again, name=plan.name) == plan


def test_files_are_found_from_the_folder_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parsed, name = parse(["sweep", "demo", "--data.source", "mine.txt", "--init_from", "w.safetensors"])
    plan = parsed._planned(load(name))
    assert plan.experiment.data.source == str(tmp_path / "mine.txt")
    assert f"--init_from {tmp_path}/w.safetensors" in repeat_command(plan)


def test_an_outcome_is_read_back_as_it_was(small, tmp_path):
    outcome, *_ = swept(plan_of(small, devices=[1, 2], scaling="strong"), tmp_path)
    save_outcome(outcome, tmp_path)
    assert read_outcome(tmp_path) == outcome


def launched(monkeypatch, failing=(), interrupted=""):
    """Engines that leave records without running, and some that do not; the list of what was started."""
    started = []

    def launch(request, folder, *, pythons, on_step):
        started.append(folder.name)
        if folder.name == interrupted:
            raise KeyboardInterrupt
        if folder.name in failing:
            raise EngineError("it died", exit_code=1)
        experiment = request.experiment
        record = make_record(folder, experiment, engine=request.engine, ladder=False, tensors={})
        (folder / "request.json").write_bytes(msgspec.json.encode(request))
        manifest = msgspec.structs.replace(record.manifest, corpus_sha256=request.corpus_sha256)
        (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        return msgspec.structs.replace(record, request=request, manifest=manifest)

    monkeypatch.setattr(paired_run, "launch", launch)
    return started


FLAGS = "--engines torch-manual --presets ddp fsdp --no-ladder --quiet --run_dir run --train.max_iters 3"


def test_a_sweep_writes_its_page_and_its_json(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    started = launched(monkeypatch, failing=("torch-manual.ddp.2",))
    assert main(["sweep", "check", *FLAGS.split(), "--json"]) == 1
    outcome = json.loads(capsys.readouterr().out)
    assert started == [FIRST, "torch-manual.ddp.2", "torch-manual.fsdp.2"]
    assert [row["strategy"] for row in outcome["rows"]] == ["single", "fsdp"]
    assert outcome["failures"] == {"torch-manual.ddp.2": "it died"}
    assert Path("run", PAGE).is_file()
    assert read_json(Path("run", SWEEP), SweepOutcome).sentence == outcome["sentence"]
    assert main(["report", "run/batch-8"]) == 1  # each batch is a comparison like any other


def test_a_batch_of_which_nothing_finishes_does_not_end_the_others(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    everything = (FIRST, *(f"torch-manual.{strategy}.{n}" for strategy in ("ddp", "fsdp") for n in (2, 4)))
    started = launched(monkeypatch, failing=everything)
    assert main(["sweep", "check", *FLAGS.split(), "--scaling", "weak", "--devices", "2", "4"]) == 1
    assert len(started) == 6
    said = capsys.readouterr().out
    assert "batch-16: INCOMPLETE: nothing has finished" in said
    assert "batch-32: INCOMPLETE: nothing has finished" in said
    assert Path("run", PAGE).is_file()


def test_an_interrupted_sweep_goes_on_as_it_was_asked_for(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    launched(monkeypatch, interrupted="torch-manual.fsdp.2")
    assert main(["sweep", "check", *FLAGS.split(), "--scaling", "weak"]) == 130
    said = capsys.readouterr().err
    assert "`shardpair sweep --continue run` runs the rest" in said
    started = launched(monkeypatch)
    assert main(["sweep", "--continue", "run", "--quiet", "--json"]) == 0
    assert started == ["torch-manual.fsdp.2", FIRST, "torch-manual.ddp.4", "torch-manual.fsdp.4"]
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 5
    assert main(["sweep", "--continue", "run", "--presets", "ddp"]) == 2
    assert "leave out --presets" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--presets nosuch", "--presets nosuch: no such preset"),
        ("--presets ddp ddp", "--presets ddp: give each preset once"),
        ("--devices 0", "--devices 0 must be at least 1"),
        ("--devices 2 4", "give one number, or say what stays equal with --scaling strong"),
        ("--scaling weak --devices 2", "--scaling weak --devices 2: give two numbers or more"),
        ("--scaling weak --devices 2 1", "give each number once, rising"),
        ("--layout.dp_replicate 4", "a sweep has the layouts of its --presets"),
        ("--presets hsdp", "no strategy is left"),
        ("--scaling strong --presets ddp --devices 2 128 --train.batch_size 128", "needs 128 devices"),
        ("--data.source nosuch.txt", "nosuch.txt does not exist"),
        ("--continue .", f"has no {SWEEP}: it is not the folder of a `shardpair sweep`"),
    ],
)
def test_refused_in_one_line_and_nothing_is_left(monkeypatch, tmp_path, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert not launched(monkeypatch)
    assert main(["sweep", "demo", *arguments.split(), "--quiet"]) == 2
    output = capsys.readouterr()
    assert says in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""
    assert not [path for path in tmp_path.rglob("*") if path.name != "runs"]


def test_two_strategies_for_real(shardpair):
    flags = "--engines torch-manual --presets zero1 tp --train.max_iters 3 --model.n_layer 2 --json"
    done = shardpair("sweep", "check", *flags.split(), "--run_dir", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = msgspec.json.decode(done.stdout, type=SweepOutcome)
    assert [row.strategy for row in outcome.rows] == ["single", "zero1", "tp"]
    assert "agree with reference on 11 rungs" in outcome.sentence
    one, zero1, _ = outcome.rows
    assert one.comm_bytes == 0 < zero1.comm_bytes
    assert (shardpair.folder / "run" / PAGE).is_file()
