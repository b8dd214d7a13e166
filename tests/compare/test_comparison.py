"""A comparison outlives what ends it: saved as it grows, continued, and judged again from its records."""

import json
import shutil
from dataclasses import dataclass, field

import msgspec
import pytest
from records import CORPUS, comparison_of, make_record, make_steps

from compare.cli import main
from compare.contract.record import LEDGER, MANIFEST, STEPS, Step
from compare.contract.request import REQUEST
from compare.contract.run_lock import FolderInUse, lock_folder
from compare.execute import source
from compare.execute.launch import EngineError, Prepared
from compare.execute.progress import Reporter
from compare.host.json_files import write_json
from compare.host.tensors import RecordError
from compare.judge.comparison import COMPARISON, judged, read_saved
from compare.spec.experiment import ExperimentError, edited
from compare.studies import paired_run
from compare.studies.cases import Interrupted, Settings, engine_cases
from compare.studies.paired_run import compare_cases, continue_cases

NAMES = ["torch-manual", "jax-manual", "torch-library"]


@dataclass
class Engines:
    """Stand-ins for engines: what they are told to do, and what they did."""

    failing: dict[str, BaseException] = field(default_factory=dict)
    steps: list[Step] | None = None
    started: list[str] = field(default_factory=list)


@pytest.fixture
def engines(monkeypatch):
    """Engines that leave records by hand, or fail as they are told to."""
    told = Engines()

    def launch(request, folder, *, pythons, hosts, on_step):
        told.started.append(request.engine)
        if error := told.failing.get(request.engine):
            folder.mkdir()
            raise error
        tensors = None if request.ladder else {}
        record = make_record(
            folder, request.experiment, engine=request.engine, steps=told.steps, tensors=tensors
        )
        write_json(folder / REQUEST, request)
        return msgspec.structs.replace(record, request=request)

    def prepare(experiment, folder):
        return Prepared(experiment=experiment, folder=folder, corpus_sha256=CORPUS)

    monkeypatch.setattr(paired_run, "launch", launch)
    monkeypatch.setattr(paired_run, "prepare", prepare)
    return told


def run(folder, experiment, *, ladder=True, needs_first=False):
    return compare_cases(
        "test",
        experiment,
        engine_cases(experiment, NAMES),
        command="run",
        run_dir=str(folder),
        settings=Settings(ladder=ladder),
        reporter=Reporter(quiet=True),
        needs_first=needs_first,
    )[0]


def go_on(folder):
    return continue_cases(folder, settings=Settings(), reporter=Reporter(quiet=True), needs_first=False)


def test_an_engine_that_fails_loses_nothing(tmp_path, tiny, engines, capsys):
    engines.failing = {"jax-manual": EngineError("jax-manual: no luck [/x]", exit_code=1)}
    comparison = run(tmp_path / "run", tiny)
    assert engines.started == NAMES
    assert comparison.cases == ["torch-manual", "torch-library"]
    assert not comparison.passed
    assert comparison.sentence().startswith("INCOMPLETE: torch-library agrees with torch-manual on 14 rungs")
    assert "jax-manual did not finish (jax-manual: no luck [/x])" in comparison.sentence()
    assert main(["report", str(tmp_path / "run")]) == 1
    assert "jax-manual did not finish" in capsys.readouterr().out
    assert "INCOMPLETE" in (tmp_path / "run" / "report.html").read_text()


def test_the_rest_is_run_later_and_only_the_rest(tmp_path, tiny, engines):
    engines.failing = {"jax-manual": KeyboardInterrupt()}
    with pytest.raises(Interrupted, match=r"Finished and kept: torch-manual.*shardpair run --continue"):
        run(tmp_path / "run", tiny)
    saved = read_saved(tmp_path / "run")
    assert (saved.cases, saved.not_run) == (["torch-manual"], ["jax-manual", "torch-library"])
    assert saved.sentence() == (
        "INCOMPLETE: only torch-manual has finished; jax-manual, torch-library did not run"
    )

    engines.failing, engines.started[:] = {}, []
    comparison = go_on(tmp_path / "run")
    assert engines.started == ["jax-manual", "torch-library"]
    assert comparison.passed
    assert [verdict.reference for verdict in comparison.verdicts] == ["torch-manual"] * 2
    assert comparison.sentence() == "PASS: jax-manual, torch-library agree with torch-manual on 14 rungs"
    assert (tmp_path / "run" / "jax-manual.unfinished-1").is_dir()  # what it left is kept
    assert read_saved(tmp_path / "run") == comparison


def test_what_another_version_began_is_not_gone_on_with(tmp_path, tiny, engines, monkeypatch):
    engines.failing = {"jax-manual": KeyboardInterrupt()}
    with pytest.raises(Interrupted):
        run(tmp_path / "run", tiny)
    engines.failing, engines.started[:] = {}, []
    monkeypatch.setattr(source, "git_state", lambda: ("f" * 40, True))
    with pytest.raises(ExperimentError, match=r"begun with .*, and this is f{12} and changes"):
        go_on(tmp_path / "run")
    assert engines.started == []


def test_a_damaged_record_is_run_again(tmp_path, tiny, engines):
    run(tmp_path / "run", tiny)
    (tmp_path / "run" / "jax-manual" / STEPS).write_bytes(b"")
    engines.started.clear()
    assert go_on(tmp_path / "run").passed
    assert engines.started == ["jax-manual"]


def test_an_engine_that_leaves_garbage_loses_nothing(tmp_path, tiny, engines):
    engines.failing = {"jax-manual": RecordError("gradients.safetensors cannot be read")}
    comparison = run(tmp_path / "run", tiny)
    assert comparison.cases == ["torch-manual", "torch-library"]
    assert "jax-manual: it left a record that cannot be read" in comparison.sentence()


def test_a_folder_is_gone_on_with_by_one_at_a_time(tmp_path, tiny, engines):
    engines.failing = {"jax-manual": EngineError("jax-manual: lost", exit_code=1)}
    run(tmp_path / "run", tiny)
    with lock_folder(tmp_path / "run"), pytest.raises(FolderInUse, match="in use by another run"):
        go_on(tmp_path / "run")


def test_what_failed_for_good_is_told_by_its_exit_code(tmp_path, tiny, engines):
    engines.failing = {name: EngineError(f"{name}: lost", exit_code=3) for name in NAMES}
    with pytest.raises(EngineError, match="torch-manual: lost"):
        run(tmp_path / "run", tiny)
    assert engines.started == NAMES
    assert main(["report", str(tmp_path / "run")]) == 2


def test_nothing_runs_on_without_the_reference_where_it_is_needed(tmp_path, tiny, engines):
    engines.failing = {"torch-manual": EngineError("torch-manual: lost", exit_code=1)}
    with pytest.raises(EngineError):
        run(tmp_path / "run", tiny, needs_first=True)
    assert engines.started == ["torch-manual"]


def test_continue_refuses_what_it_would_ignore(tmp_path, capsys):
    assert main(["run", "--continue", str(tmp_path), "--train.max_iters", "3"]) == 2
    assert "leave out --train.max_iters" in capsys.readouterr().err
    assert main(["run", "--continue", str(tmp_path), "--engines", "jax-manual"]) == 2
    assert "leave out --engines" in capsys.readouterr().err
    assert main(["run", "--continue", str(tmp_path)]) == 2
    assert "has no outcome.json" in capsys.readouterr().err


def test_losses_alone_are_said_to_be_losses_alone(tmp_path, tiny, engines):
    for folder in ("one", "two"):
        comparison = run(tmp_path / folder, tiny, ladder=False)
    assert comparison.passed
    assert comparison.sentence() == (
        "PASS: the losses of jax-manual, torch-library agree with those of torch-manual; gradients and "
        "weights were not compared"
    )


def test_a_disk_too_small_for_the_ladder_is_said_before_anything_runs(tmp_path, tiny, engines, monkeypatch):
    monkeypatch.setattr(
        paired_run.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1000, 990, 10)
    )
    with pytest.raises(Exception, match=r"need .* MB, and 10 B are free: .* or --no_ladder"):
        run(tmp_path / "run", tiny)
    assert engines.started == []
    assert not (tmp_path / "run").exists()


CORRUPTIONS = {
    "emptied": lambda content: b"",
    "torn": lambda content: content[: len(content) // 2],
    "binary": lambda content: bytes(range(256)) * 4,
    "another kind": lambda content: b"[1, 2, 3]",
    "nested": lambda content: b"[" * 100_000,
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
@pytest.mark.parametrize(
    "name",
    [
        COMPARISON,
        *(f"jax-manual/{file}" for file in (MANIFEST, STEPS, LEDGER, REQUEST, "gradients.safetensors")),
    ],
)
def test_a_garbled_file_is_one_line(tmp_path, tiny, engines, capsys, name, corruption):
    run(tmp_path / "run", tiny)
    path = tmp_path / "run" / name
    path.write_bytes(CORRUPTIONS[corruption](path.read_bytes()))
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run")]) != 0
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1, errors
    assert name in errors


@pytest.mark.parametrize("name", [MANIFEST, "gradients.safetensors"])
def test_a_file_that_is_gone_is_one_line(tmp_path, tiny, engines, capsys, name):
    run(tmp_path / "run", tiny)
    (tmp_path / "run" / "jax-manual" / name).unlink()
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run")]) != 0
    output = capsys.readouterr()
    assert "jax-manual" in output.err
    assert "Traceback" not in output.err


def test_records_that_no_longer_give_the_verdict_are_told(tmp_path, tiny, engines, capsys):
    run(tmp_path / "run", tiny)
    path = tmp_path / "run" / "jax-manual" / "gradients.safetensors"
    content = bytearray(path.read_bytes())
    content[-2] ^= 0x10  # the exponent of one number
    path.write_bytes(content)
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run")]) == 1
    output = capsys.readouterr()
    assert "FAIL at gradients" in output.out
    assert "the records no longer give the saved verdict: PASS was saved" in output.err


def test_a_verdict_that_was_edited_is_told(tmp_path, tiny, engines, capsys):
    engines.steps = make_steps(tiny)[:2]
    assert not run(tmp_path / "run", tiny).passed
    path = tmp_path / "run" / COMPARISON
    saved = json.loads(path.read_text())
    for verdict in saved["verdicts"]:
        for result in verdict["rungs"]:
            result.update(error=0.0, worst="")
    path.write_text(json.dumps(saved))
    assert main(["report", str(tmp_path / "run")]) == 1
    output = capsys.readouterr()
    assert "it has 2 of 3 steps" in output.out
    assert "no longer give the saved verdict" in output.err


def test_a_record_of_another_run_is_not_taken_for_this_one(tmp_path, tiny, engines, capsys):
    run(tmp_path / "run", tiny)
    run(tmp_path / "other", edited(tiny, {"train": {"seed": 2}}))
    shutil.rmtree(tmp_path / "run" / "jax-manual")
    shutil.copytree(tmp_path / "other" / "jax-manual", tmp_path / "run" / "jax-manual")
    assert main(["report", str(tmp_path / "run")]) == 2
    assert "holds another run than" in capsys.readouterr().err


def test_a_case_that_runs_alone_is_held_to_its_request(tmp_path, tiny):
    for steps, said in (
        (make_steps(tiny), "reference ran alone: there was nothing to compare it with"),
        (make_steps(tiny)[:2], "reference alone: FAIL at request: it has 2 of 3 steps: it ends there"),
    ):
        record = make_record(tmp_path / str(len(steps)), tiny, steps=steps)
        comparison = judged(
            comparison_of(tiny, requests={"reference": record.request}), {"reference": record}
        )
        assert comparison.sentence() == said
        assert comparison.passed == (len(steps) == 3)
