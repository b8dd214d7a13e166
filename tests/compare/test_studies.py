"""Common behaviour of studies: saving, interruption, --continue, refusals, reports."""

import json
import os
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from compare.cli import main
from compare.commands.registry import STUDIES
from compare.contract.record import LEDGER, MANIFEST, STEPS
from compare.execute import this_machine
from compare.execute.launch import EngineError
from compare.judge.outcome import OUTCOME, read_outcome, read_run
from compare.run import study
from compare.side.run_lock import lock_folder
from compare.system.tensors import RecordError
from tests.support.records import make_steps

NAMES = ["torch-manual", "jax-manual", "torch-library"]
RUN = ["run", "tiny.toml", "--engines", *NAMES, "--keep_tensors", "--quiet", "--run_dir", "r"]
ASKED = {
    "run": RUN,
    "check": ["check", "tiny.toml", "--presets", "fsdp", "--devices", "2", "--engines", *NAMES[:2]],
    "sweep": ["sweep", "tiny.toml", "--presets", "fsdp", "--engines", *NAMES[:2]],
    "memory": ["memory", "tiny.toml", "--presets", "single", "fsdp", "--engines", *NAMES[:1]],
    "ledger": ["ledger", "tiny.toml", "--engines", *NAMES[:2]],
}


@pytest.mark.parametrize("word", ASKED)
def test_study_continues_after_interrupt(engines, capsys, word):
    arguments = [*ASKED[word], *(() if word == "run" else ("--quiet", "--run_dir", "r"))]
    main([*arguments, "--dry_run", "--json"])
    cases = [case["name"] for case in json.loads(capsys.readouterr().out)["values"]["cases"]]
    assert engines.started == []
    engines.failing = {cases[-1]: KeyboardInterrupt()}
    assert main(arguments) == 130
    errors = " ".join(capsys.readouterr().err.split())
    assert f"Kept: {len(cases) - 1} of {len(cases)} cases" in errors
    assert f"`shardpair {word} --continue r` runs the rest" in errors
    engines.failing, engines.started = {}, []
    assert main([word, "--continue", "r", "--quiet"]) == 0, capsys.readouterr()
    assert engines.started == cases[-1:]
    assert main([word, "--continue", "r", "--quiet"]) == 0
    assert main(["report", "r"]) == 0
    assert main([word, "--continue", "r", "--timeout_s", "9", "--run_dir", "x"]) == 2
    assert "leave out --run_dir" in capsys.readouterr().err


def test_sweep_is_no_other_study(engines, capsys):
    assert main([*ASKED["sweep"], "--quiet", "--run_dir", "r"]) == 0
    assert main(["memory", "--continue", "r"]) == 2
    assert "`shardpair sweep` continues it" in capsys.readouterr().err


def test_check_has_no_figures(engines, capsys):
    assert main([*ASKED["check"], "--quiet", "--run_dir", "r"]) == 0
    assert main(["report", "r", "--picture", "s.png"]) == 2
    assert "a check has no figures" in capsys.readouterr().err


def test_failed_case_keeps_the_others(engines, tmp_path, capsys):
    engines.failing = {"jax-manual": EngineError("jax-manual: no luck [/x]", exit_code=1)}
    assert main(RUN) == 1
    assert engines.started == NAMES
    outcome = read_outcome(tmp_path / "r")
    assert (outcome.finished, outcome.passed) == (["torch-manual", "torch-library"], False)
    same = "INCOMPLETE: torch-manual and torch-library compute the same "
    assert outcome.sentence().startswith(f"{same}(loss, gradients, weights, optimizer: 14 checks)")
    assert "did not finish: jax-manual: no luck [/x]" in outcome.sentence()
    assert outcome.line == shlex.join(["shardpair", *RUN])
    capsys.readouterr()
    assert main(["report", "r"]) == 1
    assert "jax-manual did not finish" in capsys.readouterr().out
    assert "INCOMPLETE" in (tmp_path / "r" / "report.html").read_text()
    engines.failing = {"jax-manual": RecordError("gradients.safetensors cannot be read")}
    assert main(["run", "--continue", "r", "--quiet"]) == 1
    assert "jax-manual: gradients.safetensors cannot be read" in read_outcome(tmp_path / "r").sentence()


def test_next_case_is_reference_if_first_failed(engines, tmp_path, capsys):
    engines.failing = {"torch-manual": EngineError("torch-manual: lost", exit_code=1)}
    assert main(RUN) == 1
    (verdict,) = read_outcome(tmp_path / "r").verdicts
    assert (verdict.candidate, verdict.reference, verdict.passed) == ("torch-library", "jax-manual", True)
    engines.failing = {"reference": EngineError("reference: lost", exit_code=3)}
    engines.started = []
    assert main([*ASKED["check"], "--quiet"]) == 3
    assert engines.started == ["reference"]  # where it is needed, nothing runs on without it


def test_exit_code_without_any_result(engines, capsys):
    engines.failing = {name: EngineError(f"{name}: lost", exit_code=3) for name in NAMES}
    assert main(RUN) == 3
    assert engines.started == NAMES
    assert main(["report", "r"]) == 1
    assert "nothing was measured" in capsys.readouterr().out


def test_continue_needs_same_version_and_data(engines, monkeypatch, capsys):
    engines.failing = {"jax-manual": EngineError("jax-manual: lost", exit_code=1)}
    assert main(RUN) == 1
    with lock_folder(Path("r")):
        assert main(["run", "--continue", "r"]) == 2
        assert "in use by another run" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr(study, "open_corpus", lambda one: SimpleNamespace(sha256="ff"))
        assert main(["run", "--continue", "r"]) == 2
        assert "its data has changed since" in capsys.readouterr().err
    monkeypatch.setattr(this_machine, "git_state", lambda: ("f" * 40, True))
    assert main(["run", "--continue", "r"]) == 2
    assert "and this is ffffffffffff and changes" in " ".join(capsys.readouterr().err.split())


def test_continue_keeps_unfinished_checkpoints(engines, tmp_path):
    engines.failing = {"jax-manual": KeyboardInterrupt()}
    assert main(RUN) == 130
    (tmp_path / "r" / "jax-manual" / "checkpoints").mkdir()
    engines.failing = {}
    assert main(["run", "--continue", "r", "--quiet"]) == 0
    assert (tmp_path / "r" / "jax-manual.unfinished-1" / "checkpoints").is_dir()


def test_sentence_names_what_was_not_compared(engines, capsys):
    assert main([*(word for word in RUN if word != "--keep_tensors"), "--no_ladder"]) == 0
    assert "PASS: the losses of jax-manual, torch-library agree" in " ".join(capsys.readouterr().out.split())
    alone = ["run", "tiny.toml", "--engines", "torch-manual", "--quiet"]
    assert main(alone) == 0
    assert "torch-manual ran alone: there was nothing to compare it with" in capsys.readouterr().out
    engines.steps = lambda request: make_steps(request.experiment)[:2]
    assert main(alone) == 1
    assert "it has 2 of 3 steps; step 2 is missing" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", [OUTCOME, *(f"jax-manual/{file}" for file in (MANIFEST, STEPS, LEDGER))])
def test_garbled_file_is_one_line(engines, tmp_path, capsys, name):
    assert main(RUN) == 0
    assert len(read_run(tmp_path / "r")[1]) == 3
    for content in (b"", bytes(range(256)) * 4, b"[1, 2, 3]", b"[" * 10**5):
        (tmp_path / "r" / name).write_bytes(content)
        capsys.readouterr()
        assert main(["report", "r"]) == 2, content[:3]
        out, errors = capsys.readouterr()
        assert out == ""
        assert errors.count("\n") == 1, errors
        assert name in errors


def test_late_reference_judges_all(engines, tmp_path):
    engines.failing = {"torch-manual": EngineError("torch-manual: lost", exit_code=1)}
    assert main(RUN) == 1
    assert "jax-manual has no reference to compare with" in read_outcome(tmp_path / "r").sentence()
    engines.failing = {}
    assert main(["run", "--continue", "r", "--quiet"]) == 0
    held = {verdict.candidate: verdict.reference for verdict in read_outcome(tmp_path / "r").verdicts}
    assert held == {"jax-manual": "torch-manual", "torch-library": "torch-manual"}


def test_result_stands_if_nothing_can_be_written(engines, capsys, monkeypatch):
    assert main(RUN) == 0
    (Path("r") / "report.html").unlink()
    (Path("r") / "report.html").mkdir()
    monkeypatch.setattr("compare.judge.outcome.write_json", engines)  # fails: it takes other arguments
    for line in (["report", "r"], ["report", "r", "--json"], ["run", "--continue", "r", "--quiet"]):
        capsys.readouterr()
        assert main(line) == 0
        out, errors = capsys.readouterr()
        assert "torch-library" in out
        assert errors.endswith("no page was written into r (Is a directory); the result stands\n")


KEEPERS = [word for word, study in STUDIES.items() if study.keeps_records and word != "resume"]


@pytest.mark.parametrize("word", [word for word in ASKED if word in KEEPERS])
def test_verdict_is_true_after_a_folder_was_removed(engines, capsys, word):
    """Complete or with its last case missing: nothing passes without the records that it was compared on."""
    arguments = [*ASKED[word], *(() if word == "run" else ("--quiet", "--run_dir", "whole"))]
    arguments = ["whole" if word == "r" else word for word in arguments]
    assert main(arguments) == 0
    cases = list(read_outcome(Path("whole")).cases)
    engines.failing = {cases[-1]: EngineError("lost", exit_code=1)}
    assert main(["part" if word == "whole" else word for word in arguments]) == 1
    engines.failing = {}
    for folder, due in (("whole", []), ("part", cases[-1:])):
        for gone in ([], *([name] for name in cases if name not in due), cases):
            shutil.copytree(folder, "copy")
            for name in gone:
                shutil.rmtree(Path("copy", name))
            engines.started = []
            capsys.readouterr()
            code = main([word, "--continue", "copy", "--quiet"])
            said = capsys.readouterr()
            assert engines.started == ([] if gone else due), gone
            if gone:
                assert (code, said.out) == (2, ""), gone
                assert f"copy/{gone[0]} does not exist: put the folder back" in said.err
                assert main(["report", "copy"]) == 2
            else:
                assert code == 0, said
            shutil.rmtree("copy")


def test_studies_that_keep_records_are_tested():
    need_engines = {"faults", "profile"}  # patched copies of the tree, and timelines
    assert {*KEEPERS} == (ASKED.keys() & {*KEEPERS}) | need_engines


@pytest.mark.parametrize("word", [word for word in ASKED if word in KEEPERS])
def test_changed_record_is_rejected(engines, capsys, word):
    arguments = [*ASKED[word], *(() if word == "run" else ("--quiet", "--run_dir", "r"))]
    assert main(arguments) == 0
    for name in read_outcome(Path("r")).cases:
        path = Path("r", name, STEPS)
        before = path.read_bytes()
        path.write_bytes(before.replace(b"1.8", b"1.9"))
        for line in (["report", "r"], [word, "--continue", "r"]):
            assert main(line) == 2
            assert f"{path} has changed since it was judged" in capsys.readouterr().err
        path.write_bytes(before)
    assert main(["report", "r"]) == 0


def test_outcome_without_a_judgement_is_rejected(engines, capsys):
    assert main(RUN) == 0
    path = Path("r", OUTCOME)
    path.write_text(
        path.read_text().replace('"alone": {\n    "torch-manual"', '"alone": {\n    "uorch-manual"')
    )
    assert main(["report", "r"]) == 2
    assert "outcome.json is damaged: it has no judgement of torch-manual" in capsys.readouterr().err


def test_outcome_of_another_engine_or_many_rounds(engines, capsys):
    """A billion rounds are not counted one by one."""
    assert main(RUN) == 0
    path = Path("r", OUTCOME)
    content = path.read_text()
    for old, new, words in (
        ('"engine": "jax-manual"', '"engine": "jax-magic"', "is damaged: engine jax-magic is unknown"),
        ('"rounds": 1', '"rounds": 0', "Expected `int` >= 1 - at `$.rounds`"),
    ):
        path.write_text(content.replace(old, new))
        assert main(["report", "r"]) == 2
        assert words in capsys.readouterr().err
    path.write_text(content.replace('"rounds": 1', '"rounds": 1000000000'))
    assert main(["report", "r"]) == 1
    assert "INCOMPLETE" in capsys.readouterr().out


def test_link_in_place_of_a_case_is_rejected(engines, capsys):
    engines.failing = {"jax-manual": EngineError("lost", exit_code=1)}
    assert main(RUN) == 1
    elsewhere = Path("elsewhere").absolute()
    Path("r", "jax-manual").rename(elsewhere)
    (elsewhere / "checkpoints").mkdir()
    Path("r", "jax-manual").symlink_to(elsewhere)
    engines.failing, engines.started = {}, []
    assert main(["run", "--continue", "r"]) == 1
    assert "r/jax-manual is a link: remove it" in capsys.readouterr().err
    assert [path.name for path in elsewhere.iterdir()] == ["checkpoints"]
    assert engines.started == []


def test_folder_that_is_not_utf8_is_rejected(engines, capsys, tmp_path, monkeypatch):
    folder = tmp_path / os.fsdecode(b"odd\xff")
    folder.mkdir()
    shutil.copy("tiny.toml", folder)
    monkeypatch.chdir(folder)
    assert main(["run", "tiny.toml", "--engines", "torch-manual"]) == 2
    assert "this path is not UTF-8: give another folder, or --run_dir" in capsys.readouterr().err
    assert engines.started == []


@pytest.mark.parametrize("name", ["../victim", "/victim", "..", "."])
def test_case_outside_of_its_folder_is_rejected(engines, capsys, name):
    engines.failing = {"jax-manual": EngineError("lost", exit_code=1)}
    assert main(RUN) == 1
    Path("victim").mkdir()
    path = Path("r", OUTCOME)
    path.write_text(path.read_text().replace('"jax-manual": {', f'"{name}": {{', 1))
    for line in (["run", "--continue", "r"], ["report", "r"], ["resume", "r"], ["diff", "r", "r"]):
        assert main(line) == 2
        assert f"outcome.json is damaged: '{name}' is not the name of a folder" in capsys.readouterr().err
    assert Path("victim").is_dir()
