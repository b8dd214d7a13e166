"""A survey, on the example of `shardpair savings`: parts kept as they come, Ctrl-C, failures, --continue."""

import json

import msgspec
import pytest
from records import CORPUS, make_record

from compare.cli import main
from compare.contract.request import REQUEST
from compare.execute.launch import EngineError, Prepared
from compare.host.json_files import write_json
from compare.judge.outcome import read_outcome
from compare.spec.experiment import to_toml
from compare.studies import paired_run
from compare.studies.registry import read_study
from compare.studies.savings import SETTINGS, Savings

ASKED = ("savings", "tiny.toml", "--engines", "torch-manual", "jax-manual", "--quiet")


@pytest.fixture
def failing_at(tmp_path, monkeypatch, tiny):
    """What the n-th engine that is started raises; the others leave records by hand."""
    errors: dict[int, BaseException] = {}
    started = []

    def launch(request, folder, *, pythons, hosts, on_step):
        started.append(request.engine)
        if error := errors.get(len(started)):
            folder.mkdir()
            raise error
        record = make_record(folder, request.experiment, engine=request.engine, tensors={}, ladder=False)
        write_json(folder / REQUEST, request)
        return msgspec.structs.replace(record, request=request)

    monkeypatch.setattr(paired_run, "launch", launch)
    monkeypatch.setattr(
        paired_run,
        "prepare",
        lambda one, folder: Prepared(experiment=one, folder=folder, corpus_sha256=CORPUS),
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(to_toml(tiny))
    return errors


def test_what_is_finished_is_kept_and_the_rest_goes_on(failing_at, tmp_path, capsys):
    failing_at[4] = KeyboardInterrupt()
    assert main([*ASKED, "--run_dir", "s"]) == 130
    said = capsys.readouterr()
    assert "Kept: 1 of 5 parts. `shardpair savings --continue s` runs the rest" in " ".join(said.err.split())
    assert "layout.remat = none" in said.out
    assert "was not measured" in said.out
    assert main(["savings", "--continue", "s", "--engines", "torch-manual"]) == 2
    assert "leave out --engines" in capsys.readouterr().err
    assert main(["memory", "--continue", "s"]) == 2
    assert "`shardpair savings` goes on" in capsys.readouterr().err
    assert main(["savings", "--continue", "s", "--quiet", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert list(rows) == list(SETTINGS)
    assert all(held.keys() == {"torch-manual", "jax-manual"} for held in rows.values())
    assert [path.name for path in (tmp_path / "s").iterdir() if path.is_dir()] == []


def test_a_part_that_fails_ends_no_other_and_fails_the_study(failing_at, tmp_path, capsys):
    failing_at[3] = EngineError("torch-manual: no luck", exit_code=1)
    assert main([*ASKED, "--run_dir", "s"]) == 1
    assert "did not finish" in capsys.readouterr().out
    outcome = read_outcome(tmp_path / "s", Savings.kept)
    assert outcome.missing == ["layout.remat = dots"]
    assert "no luck" in outcome.failures["layout.remat = dots"]
    assert main(["report", "s"]) == 1
    assert (tmp_path / "s" / "savings.html").is_file()
    assert main(["savings", "--continue", "s", "--quiet"]) == 0
    assert main(["report", "s", "--markdown"]) == 0
    assert (
        "| setting | torch-manual: peak | torch-manual: at rest | jax-manual: peak |"
        in capsys.readouterr().out
    )


def test_a_folder_says_which_study_it_is_of(failing_at, tmp_path, capsys):
    assert main([*ASKED, "--run_dir", "s"]) == 0
    assert read_study(tmp_path / "s")[0] is Savings
    assert Savings.again(read_outcome(tmp_path / "s", Savings.kept)).engines == ("torch-manual", "jax-manual")
    path = tmp_path / "s" / "outcome.json"
    path.write_text(path.read_text().replace('"study": "savings"', '"study": "nothing"'))
    assert main(["report", "s"]) == 2
    assert "this version has no study nothing" in capsys.readouterr().err
