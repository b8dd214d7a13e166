"""Plan of a command, which starts nothing: `--dry_run`."""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from compare.execute.hosts import HERE, Hosts
from compare.execute.launch import EnvironmentMissing
from compare.judge.closed_forms.memory import KINDS
from compare.judge.outcome import Case, Outcome
from compare.numerics.data import open_corpus
from compare.present.hosts import crossing_words, host_table
from compare.show.findings import Column, table_of
from compare.show.terminal import terminal_table
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, Layout, to_toml
from compare.studies.fitting import require_case
from compare.studies.memory_estimate import estimate_memory, may_not_fit
from compare.studies.own_weights import objection_to
from compare.studies.resuming import objection_to_resume
from compare.terminal import human_bytes, layout_in_words, print_json, results_console

ESTIMATED = ("activations", "logits")
UNREAD = "-"  # in place of a digest: the data is opened, and not read to its end


class PlannedCase(Struct, frozen=True, kw_only=True):
    """One case, before anything is allocated."""

    name: str
    engine: str
    layout: str
    """In words, with its devices."""
    degrees: Layout
    devices: int
    steps: int
    gradient_sync: str
    """What would run; empty if the case is refused."""
    memory: dict[str, float]
    """Bytes of the fullest device by kind: parameters, gradients and optimizer at rest, in closed form;
    at most: activations, with gathered parameters, buffers and temporaries, and logits."""
    on_host: float
    """Bytes of the same device that `layout.offload` keeps in the host's memory."""
    refusal: str
    """Why it cannot run here; empty if it can."""
    doubt: str
    """Why it may not fit, by what it holds at most; empty if it fits."""


class Plan(Struct, frozen=True, kw_only=True):
    """The runs that a command would make."""

    experiment: Experiment
    """As the user gave it, every field spelled out."""
    platform: str
    training_tokens: int
    """0 if the data is refused."""
    init_from: str
    """Initial weights that are not the seed's."""
    resume: str
    """Where checkpoints are that would be gone on from."""
    input_refusals: list[str]
    """What is wrong with data and initial weights, as far as it shows without reading all of the data."""
    cases: list[PlannedCase]
    """The first is the reference."""
    hosts: int = 1
    """Number of hosts that the devices of each case are spread over."""
    left_out: dict[str, str]
    """What an engine cannot express, by name, and why."""

    @property
    def refusal(self) -> str:
        """Reason why nothing would run: one case that is refused is enough. Empty if all can."""
        reasons = [*(case.refusal for case in self.cases), *self.input_refusals]
        return next((reason for reason in reasons if reason), "")


def plan(outcome: Outcome, *, hosts: Hosts = HERE, init_from: str = "", resume: str = "") -> Plan:
    """Look at every case: what it is, what its devices would hold, what is refused.

    Args:
        outcome: of a study of which nothing has run.
        hosts: where it would run.
        init_from: a user's own initial weights.
        resume: where checkpoints are to go on from.
    """
    experiment, platform = outcome.experiment, outcome.platform
    refusals = [objection_to(init_from, experiment) if init_from else ""]
    refusals += [objection_to_resume(resume, outcome.cases, experiment) if resume else ""]
    tokens = 0
    try:
        tokens = len(open_corpus(experiment, validated_sha256=UNREAD).train)
    except ExperimentError as error:
        refusals.insert(0, str(error))
    return Plan(
        experiment=experiment,
        platform=platform,
        training_tokens=tokens,
        init_from=init_from,
        resume=resume,
        input_refusals=list(filter(None, refusals)),
        cases=[_planned(name, case, platform, hosts) for name, case in outcome.cases.items()],
        hosts=hosts.count,
        left_out=outcome.left_out,
    )


def show(planned: Plan, *, as_json: bool) -> int:
    """Print a plan. Returns the exit code: 0, or 2 if the command would be refused."""
    if as_json:
        print_json(planned)
        return 2 if planned.refusal else 0
    console, cases = results_console(), planned.cases
    console.print(to_toml(planned.experiment))
    console.print(terminal_table(table_of(TITLE, COLUMNS, cases, words=2)))
    layouts = dict.fromkeys(case.degrees for case in cases if not case.refusal)
    for layout in layouts if planned.hosts > 1 else ():
        hosts = [f"host {device * planned.hosts // layout.devices}" for device in range(layout.devices)]
        console.print(terminal_table(host_table(layout, hosts)))
        console.print(crossing_words(layout, planned.hosts), soft_wrap=True)
    for line, style in _lines(planned):
        console.print(line, style=style, soft_wrap=True)
    return 2 if planned.refusal else 0


def _lines(planned: Plan) -> Iterator[tuple[str, str]]:
    """Sentences under the table, and how they are written."""
    cases, tokens = planned.cases, planned.training_tokens
    if host := max(case.on_host for case in cases):
        yield f"layout.offload: {human_bytes(host)} of a device's state are in the host's memory", ""
    yield from ((f"left out: {name}: {why}", "yellow") for name, why in planned.left_out.items())
    yield from ((f"refused: {case.name}: {case.refusal}", "red") for case in cases if case.refusal)
    doubts = [case.doubt for case in cases if case.doubt and not case.refusal]
    yield from ((doubt, "yellow") for doubt in doubts)
    yield from ((f"layout: {layout}", "") for layout in dict.fromkeys(case.layout for case in cases))
    if tokens:
        source = planned.experiment.data.source
        yield f"data: {source}: {tokens:,} tokens to train on, which are read when it runs", ""
    for name, value in (("initial weights", planned.init_from), ("resumed", planned.resume)):
        if value:
            yield f"{name}: {value}", ""
    yield from ((f"refused: {reason}", "red") for reason in planned.input_refusals)
    verdict, style = "all of it can run", "bold green"
    if doubts:
        verdict = f"nothing is refused, but {len(doubts)} of {len(cases)} cases may not fit"
        style = "bold yellow"
    if planned.refusal:
        verdict, style = f"this would be refused: {planned.refusal}", "bold red"
    count = f"{len(cases)} case{'s' if len(cases) > 1 else ''} of {cases[-1].steps} steps"
    yield f"dry run: {count}; nothing was started; {verdict}", style


def _planned(name: str, case: Case, platform: str, hosts: Hosts) -> PlannedCase:
    engine, experiment, refusal = ENGINES[case.engine], case.experiment, ""
    try:
        require_case(case.engine, case.experiment, platform=platform, hosts=hosts)
    except (ExperimentError, EnvironmentMissing) as error:
        refusal = str(error)
    estimate = estimate_memory(case.engine, experiment)
    sizes = estimate.per_device
    fullest = sizes.index(max(sizes))
    return PlannedCase(
        name=name,
        engine=case.engine,
        layout=layout_in_words(experiment, platform),
        degrees=experiment.layout,
        devices=experiment.layout.devices,
        steps=experiment.train.max_iters,
        gradient_sync="" if refusal else engine.gradient_sync_for(experiment.layout),
        memory={kind: by_device[fullest] for kind, by_device in estimate.by_kind.items()},
        on_host=estimate.on_host[fullest],
        refusal=refusal,
        doubt=may_not_fit(case.engine, experiment, platform=platform),
    )


def _bytes(kinds: Sequence[str], name: str = "") -> Column[PlannedCase]:
    return Column(
        name or kinds[0], lambda case: human_bytes(sum(case.memory.get(kind, 0.0) for kind in kinds))
    )


TITLE = (
    f"The fullest device: {', '.join(KINDS)} in closed form; at most {', '.join(ESTIMATED)}, with what is "
    f"gathered, buffers and temporaries"
)
COLUMNS = (
    Column[PlannedCase]("case", lambda case: case.name),
    Column[PlannedCase]("synchronisation", lambda case: case.gradient_sync or "refused"),
    Column[PlannedCase]("devices", lambda case: case.devices, "d"),
    *(_bytes([kind]) for kind in KINDS),
    _bytes(KINDS, "at rest"),
    *(_bytes([kind]) for kind in ESTIMATED),
    _bytes((*KINDS, *ESTIMATED), "all"),
)
