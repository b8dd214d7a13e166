"""The command that makes a sweep again, and the experiment that it reads."""

import shlex

import msgspec

from compare.present.report.repeat import EXPERIMENT
from compare.spec.experiment import Experiment, ExperimentError, edited, revalidate
from compare.studies.presets import SETTINGS, Said, layout_flag, settings_in, spread
from compare.studies.sweep import SINGLE, SweepPlan, sweep_batches


def own_experiment(plan: SweepPlan) -> Experiment:
    """The experiment as a file: on one device if its own layout, which the strategies replace, cannot be."""
    try:
        return revalidate(plan.experiment)
    except ExperimentError:
        return spread(plan.experiment, SINGLE)


def repeat_command(plan: SweepPlan) -> str:
    """The command that makes this sweep again, in the folder of its page; '' if none does, which is tried."""
    base = own_experiment(plan)
    flags = {key: getattr(plan.experiment.layout, key) for key in sorted(plan.said.flags & set(SETTINGS))}
    again = msgspec.structs.replace(
        plan,
        experiment=edited(base, {"layout": flags}),
        said=Said(flags=frozenset(flags), file=settings_in(base.layout)),
    )
    if [batch.cases for batch in sweep_batches(again)] != [batch.cases for batch in sweep_batches(plan)]:
        return ""
    options = ["--presets", *plan.strategies, "--engines", *plan.engines]
    options += [word for key, value in flags.items() for word in layout_flag(key, value).split()]
    options += ["--devices", *map(str, plan.devices)]
    if plan.scaling != "none":
        options += ["--scaling", plan.scaling]
    if plan.platform != "cpu":
        options += ["--platform", plan.platform]
    if not plan.ladder:
        options.append("--no_ladder")
    if plan.init_from:
        options += ["--init_from", plan.init_from]
    return shlex.join(["shardpair", "sweep", EXPERIMENT, *options])
