"""The commands of `shardpair` as functions, for scripts and notebooks.

    from compare.api import experiment, run

    tiny = experiment("check", train={"max_iters": 5}, model={"n_layer": 2})
    result = run(tiny, engines=["jax-manual", "torch-manual"], preset="fsdp", devices=2)
    result                                                         # in a notebook: the tables
    result.figure("loss")                                          # in a notebook: the curves
    result["jax-manual"].loss                                      # an array, a number for each step
    result["torch-manual"].tensors("gradients")["embedding.token"]  # an array (V, C)

Each engine runs in its own processes, as from the command line. Neither JAX nor PyTorch is imported here.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from compare.api.options import flags_as_options, plain, shown, study_of
from compare.api.results import Comparison, Output, Result, Training, result_of
from compare.commands.diff import findings_of_pair
from compare.commands.diff.difference import Difference
from compare.commands.registry import read_study
from compare.formats.nanogpt import load_experiment
from compare.run.study import Study, write_page_of
from compare.spec.experiment import Experiment, ExperimentError, checked

__all__ = [
    "Comparison",
    "Difference",
    "Output",
    "Result",
    "Training",
    "check",
    "continue_study",
    "diff",
    "dry_run",
    "experiment",
    "read",
    "run",
    "study",
]


def experiment(base: Experiment | str | Path = "demo", /, **sections: Mapping[str, object]) -> Experiment:
    """An experiment with other values in some fields.

        small = experiment("demo", model={"n_layer": 2})
        slow = experiment(small, optimizer={"learning_rate": 1e-4})

    Args:
        base: a name, a TOML file, one of nanoGPT's config files, or another experiment.
        sections: fields by section. Values may be numbers of NumPy, and paths.

    Raises:
        ExperimentError: no such experiment or field, or a value that cannot work.
    """
    known = base if isinstance(base, Experiment) else load_experiment(str(base))
    fields = msgspec.to_builtins(known)
    for section, values in sections.items():
        if not isinstance(values, Mapping):
            raise ExperimentError(f"{section} = {shown(values)}: give fields, such as {section}={{...}}")
        fields[section] = {**fields.get(section, {}), **plain(values)}
    return checked(fields)


def run(experiment: Experiment | str | Path = "demo", **options: Any) -> Result:
    """`shardpair run` with a report. Tensors are kept unless keep_tensors=False. Raises as `study`."""
    return study("run", experiment, **{"keep_tensors": options.get("ladder", True), **options})


def check(experiment: Experiment | str | Path = "check", **options: Any) -> Result:
    """`shardpair check`. Raises as `study`."""
    return study("check", experiment, **options)


def study(name: str, experiment: Experiment | str | Path = "demo", **options: Any) -> Result:
    """`shardpair NAME`, such as "bench", with a page.

        study("bench", "demo", presets=["ddp"], devices=[2], rounds=2).sentence()

    Args:
        name: a key of `compare.commands.registry.STUDIES`.
        experiment: a name, a TOML file, or the result of `experiment`.
        options: the command's flags by name: see `shardpair NAME --help`.

    Raises:
        ExperimentError, EnvironmentMissing: before anything starts.
        EngineError: no case finished. If some did, `result.outcome.failures` has the causes.
        KeyboardInterrupt: the study was interrupted. `continue_study` runs the rest.
    """
    with flags_as_options():
        return _run(study_of(name, experiment, options))


def continue_study(folder: str | Path, **options: Any) -> Result:
    """`--continue`: run the cases of a study that have not finished, in its folder.

    Args:
        folder: `Result.folder`, or the folder that an interrupted study names.
        options: flags allowed with --continue, such as timeout_s and quiet.

    Raises:
        RecordError: there is no study, or it is damaged.
        ExperimentError, EnvironmentMissing, EngineError, KeyboardInterrupt: as `study`.
    """
    command, outcome = read_study(Path(folder))
    with flags_as_options():
        own = study_of(outcome.study, command.default, options)
        return _run(msgspec.structs.replace(own, continue_=str(folder)))


def dry_run(name: str, experiment: Experiment | str | Path = "demo", **options: Any) -> Output:
    """`--dry_run`: the plan of a study, with memory for each device and what is refused. Starts nothing.

        dry_run("run", "gpt2-124m", preset="fsdp", devices=8, platform="gpu").passed

    The arguments are the same as for `study`. Raises ExperimentError: the study works on no machine.
    """
    with flags_as_options():
        return Output(findings=study_of(name, experiment, options).preview()[0])


def diff(a: str | Path | Result, b: str | Path | Result) -> Comparison:
    """`shardpair diff`: compare two finished runs, relative to the first.

    Args:
        a: a result, the folder of a run, or of one engine's run.
        b: the other.

    Raises RecordError: there is nothing to compare.
    """
    found = findings_of_pair(*(one.folder if isinstance(one, Result) else Path(one) for one in (a, b)))
    return Comparison(findings=found, differences=found.values["pairs"])


def read(folder: str | Path) -> Result:
    """The result of an earlier study. Raises RecordError: there is none, or it is damaged."""
    command, outcome = read_study(Path(folder))
    return result_of(command, outcome, Path(folder))


def _run(command: Study) -> Result:
    outcome, folder = command.run()
    with suppress(OSError):  # the result stands without its page
        write_page_of(type(command), outcome, folder)
    return result_of(type(command), outcome, folder)
