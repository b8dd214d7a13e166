"""`shardpair sweep`: what it writes, keeps and refuses; one for real."""

import json
from pathlib import Path

import msgspec
import pytest
from records import make_record

from compare.cli import main
from compare.execute.launch import EngineError
from compare.judge.outcome import OUTCOME, read_outcome
from compare.studies import paired_run
from compare.studies.sweep_outcome import FIRST, SweepOutcome

PAGE = "sweep.html"


def launched(monkeypatch, failing=(), interrupted=""):
    """Engines that leave records without running, and some that do not; the list of what was started."""
    started = []

    def launch(request, folder, *, pythons, hosts, on_step):
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


FLAGS = "--engines torch-manual --presets ddp fsdp --no_ladder --quiet --run_dir run --train.max_iters 3"


def test_a_sweep_writes_its_page_and_its_json(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    started = launched(monkeypatch, failing=("torch-manual.ddp.2",))
    assert main(["sweep", "check", *FLAGS.split(), "--json"]) == 1
    outcome = json.loads(capsys.readouterr().out)
    assert started == [FIRST, "torch-manual.ddp.2", "torch-manual.fsdp.2"]
    assert [row["strategy"] for row in outcome["rows"]] == ["single", "fsdp"]
    assert outcome["failures"] == {"torch-manual.ddp.2": "it died"}
    assert Path("run", PAGE).is_file()
    assert read_outcome(Path("run"), SweepOutcome).verdict == outcome["verdict"]
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
    outcome = json.loads(capsys.readouterr().out)
    assert len(outcome["rows"]) == 5
    Path("run", PAGE).unlink()
    assert main(["report", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == outcome
    assert Path("run", PAGE).is_file()
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
        ("--layout.dp_replicate 4", "has no effect: --presets say how it is spread"),
        ("--presets hsdp", "no strategy is left"),
        ("--scaling strong --presets ddp --devices 2 128 --train.batch_size 128", "needs 128 devices"),
        ("--data.source nosuch.txt", "nosuch.txt does not exist"),
        ("--continue .", f"has no {OUTCOME}: it is not the folder of a"),
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
    assert "agree with reference on 14 rungs" in outcome.verdict
    one, zero1, _ = outcome.rows
    assert one.comm_bytes == 0 < zero1.comm_bytes
    assert (shardpair.folder / "run" / PAGE).is_file()
