"""The command on a report's page makes the same cases again, or there is none."""

import shlex

import msgspec
import pytest
from records import comparison_of

from compare.cli import main
from compare.contract.request import Request
from compare.flags import arguments
from compare.judge.comparison import Comparison
from compare.present.report.repeat import EXPERIMENT, repeat_command
from compare.spec.experiment import Experiment, edited, load, to_toml
from compare.spec.sections import Data
from compare.studies.cases import Case, engine_cases, ladder_cases
from compare.studies.faults import fault_cases
from compare.studies.matrix_cells import matrix_cases, study
from compare.studies.presets import spread


class Asked(Exception):
    """The runs that a command asked for."""


def planned(command: str, name: str, experiment: Experiment, cases: list[Case], folder, **more) -> Comparison:
    """A comparison as it is saved before anything runs; the data frozen as a run freezes them."""
    frozen = Data(source=str(folder / "stdlib.txt"))
    return comparison_of(
        experiment,
        study=command,
        name=name,
        requests={
            case.name: Request(
                engine=case.engine,
                experiment=msgspec.structs.replace(case.experiment, data=frozen),
                fault=case.fault,
                **{"ladder": True} | more,
            )
            for case in cases
        },
    )


def pipeline_run():
    experiment = spread(edited(load("check"), {"train": {"max_iters": 7}}), "fsdp_tp_pp", 8)
    return "run", "demo", experiment, engine_cases(experiment, ["torch-manual", "jax-manual"])


def half_a_check():
    experiment = load("check")
    return "check", "check-2", experiment, ladder_cases(experiment, ["torch-library", "jax-manual"], 2)


def unsharded_check():
    return "check", "check-1", load("check"), ladder_cases(load("check"), ["jax-manual"], 1)


def some_faults():
    names = ["no_clip", "doubled_row_bias", "warmup_off_by_one"]
    cases = fault_cases(load("check"), ["jax-manual", "torch-manual"], names=names, devices=2)
    return "faults", "faults", load("check"), cases


def a_study():
    experiment = study(load("check"), "float64, SGD")
    cases, _ = matrix_cases(experiment, ["jax-compiler", "torch-manual"], ["fsdp", "pp_gpipe"])
    return "matrix", "matrix-float64-SGD", experiment, cases


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Runs a command in a folder up to where it would run its cases; gives these."""

    def instead(name, experiment, cases, **more):
        raise Asked(cases, more["settings"].ladder)

    monkeypatch.setattr(arguments, "compare_cases", instead)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stdlib.txt").write_text("text")

    def ask(command: str, experiment: Experiment):
        (tmp_path / EXPERIMENT).write_text(to_toml(experiment))
        program, *options = shlex.split(command)
        assert program == "shardpair"
        with pytest.raises(Asked) as found:
            main(options)
        return found.value.args

    return ask


@pytest.mark.parametrize("made", [pipeline_run, half_a_check, unsharded_check, some_faults, a_study])
def test_command_makes_the_same_cases_again(tmp_path, asked, made):
    command, name, experiment, cases = made()
    comparison = planned(command, name, experiment, cases, tmp_path)
    again, _ = asked(repeat_command(comparison), experiment)
    data = Data(source="stdlib.txt")  # the run's own copy: another Python has another library
    assert again == [
        msgspec.structs.replace(case, experiment=msgspec.structs.replace(case.experiment, data=data))
        for case in cases
    ]


def test_command_says_what_else_was_asked(tmp_path, asked):
    command, name, experiment, cases = pipeline_run()
    comparison = planned(command, name, experiment, cases, tmp_path, ladder=False)
    _, ladder = asked(repeat_command(comparison), experiment)
    assert ladder is False
    on_gpus = msgspec.structs.replace(comparison, platform="gpu")
    assert "--platform gpu" in repeat_command(on_gpus)


def test_data_of_ones_own_keep_their_path(tmp_path):
    command, name, experiment, cases = pipeline_run()
    own = msgspec.structs.replace(experiment, data=Data(source="my data.txt"))
    comparison = planned(command, name, own, cases, tmp_path)
    assert shlex.quote(str(tmp_path / "stdlib.txt")) in repeat_command(comparison)
    synthetic = msgspec.structs.replace(experiment, data=Data(source=str(tmp_path / "stdlib.txt")))
    assert "--data.source" not in repeat_command(planned(command, name, synthetic, cases, tmp_path))


def test_cases_that_no_command_makes_have_none(tmp_path):
    command, name, experiment, cases = pipeline_run()
    odd = [
        *cases[:1],
        msgspec.structs.replace(cases[1], experiment=edited(experiment, {"train": {"seed": 1}})),
    ]
    assert repeat_command(planned(command, name, experiment, odd, tmp_path)) == ""
    renamed = [*cases[:1], msgspec.structs.replace(cases[1], name="mine")]
    assert repeat_command(planned(command, name, experiment, renamed, tmp_path)) == ""
    assert repeat_command(planned("notebook", name, experiment, cases, tmp_path)) == ""
    assert repeat_command(planned("matrix", "matrix-of-mine", experiment, cases, tmp_path)) == ""
