"""`shardpair faults`: plant the mistakes that people make, and show which rung of the ladder catches each.

Many are a wrong value in the spec, given to one engine only; others are in a side's own `faults`.
"""

import itertools
from pathlib import Path
from typing import ClassVar

from msgspec import Struct

from compare.contract.request import Request
from compare.flags import StudiedName, chosen_engines
from compare.judge.ladder import Verdict
from compare.judge.outcome import Case, Grid, Outcome
from compare.run.study import OF_LAYOUTS, Study
from compare.setup.presets import PRESETS, check_names, edits_of, spread
from compare.show.findings import Column, Findings, table_of, verdict_findings
from compare.spec.engines.registry import ENGINES, REFERENCE
from compare.spec.experiment import Experiment, ExperimentError, edited, revalidate
from compare.terminal import error_text


class Fault(Struct, frozen=True):
    """One mistake."""

    name: str
    rung: str
    """The first rung that it must turn red."""
    description: str
    """What went wrong, in a few words."""
    edit: str = ""
    """Fields with the wrong value, as in `edits_of`; '' if the side plants it in its code."""
    preset: str = ""
    """The layout in which it shows; empty for data parallelism over the devices asked for."""
    asks: str = ""
    """Fields that the case is asked for, beyond that layout; buckets of 0.02 MB are several here."""


SIXTEEN_BITS, UNDROPPED = "precision.dtype=bfloat16", "model.dropout=0.0"
EXPERTS = "model.n_experts=8"
REFERENCES = {
    SIXTEEN_BITS: "reference-16-bits",
    UNDROPPED: "reference-undropped",
    EXPERTS: "reference-experts",
}
"""Of faults that are asked for with numbers of their own."""
PLANTED = (
    Fault("different_seed", "batch", "one engine draws other rows", edit="train.seed=1338"),
    Fault("moved_weight", "initial_weights", "one weight starts 1e-3 away"),
    Fault("gelu_tanh", "loss", "the tanh approximation of JAX's GELU", edit="model.activation=gelu_tanh"),
    Fault("norm_eps_1e-6", "loss", "flax's default LayerNorm epsilon", edit="model.norm_eps=1e-06"),
    Fault("dropped_all_reduce", "gradients", "each replica keeps its own gradients"),
    Fault("sum_for_mean", "gradients", "gradients are summed over replicas, not averaged"),
    Fault("no_clip", "first_weights", "gradients are not clipped", edit="optimizer.grad_clip=0.0"),
    Fault("decay_on_vectors", "first_weights", "norms and biases decay too", edit="optimizer.decay=all"),
    Fault("warmup_off_by_one", "first_weights", "one step too few", edit="optimizer.warmup_iters=-1"),
    Fault("wrong_beta2", "first_moments", "PyTorch's default beta2", edit="optimizer.beta2=0.999"),
    Fault("kept_gradients", "final_weights", "gradients are not cleared between steps"),
    Fault("dropped_tp_all_reduce", "loss", "a row-parallel product stays one rank's part", preset="tp"),
    Fault("doubled_row_bias", "gradients", "a row-parallel bias is added once a rank", preset="tp_sp"),
    Fault("missing_norm_psum", "gradients", "LayerNorm gradients are not summed over tp", preset="tp_sp"),
    Fault("norm_counts_replicas_twice", "grad_norm", "the norm counts copies once a rank", preset="tp"),
    Fault("wrong_optimizer_shard", "first_weights", "another rank's gradients update a shard", preset="fsdp"),
    Fault("overwritten_microbatch", "gradients", "a microbatch's gradient replaces the last", preset="pp"),
    Fault("stale_tied_copy", "gradients", "a pipeline's ends do not add the tied gradients", preset="pp"),
    Fault("shifted_targets", "request", "each device of cp makes targets of its own positions", preset="cp"),
    Fault("local_positions", "loss", "each device of cp counts positions from 0", preset="cp"),
    Fault(
        "forgotten_hop", "loss", "a ring leaves out one device's K and V", preset="cp_ring", asks=UNDROPPED
    ),
    Fault("stopped_maximum", "gradients", "a ring's sum has no derivative", preset="cp_ring", asks=UNDROPPED),
    Fault("next_expert", "routing", "each token goes to the experts after its own", asks=EXPERTS),
    Fault("unrenormalised_weights", "routing", "experts weighed by a softmax over all of them", asks=EXPERTS),
    Fault("local_balance", "loss", "the load-balance loss is of each device's own shares", asks=EXPERTS),
    Fault("averaged_experts", "gradients", "a mean over ranks with others", preset="fsdp_ep", asks=EXPERTS),
    Fault("unscaled_dropout", "loss", "what dropout keeps is not scaled up"),
    Fault("same_dropout_on_every_rank", "loss", "all ranks of tp drop as the first does", preset="tp"),
    Fault("reversed_update", "first_weights", "every update goes the other way", asks=SIXTEEN_BITS),
    Fault("rounded_weights", "updates", "the optimizer's weights are rounded, too", asks=SIXTEEN_BITS),
    Fault("skipped_last_update", "updates", "the last step updates nothing"),
    Fault(
        "ignored_gradient_sync",
        "strategy",
        "one flat all-reduce instead of buckets",
        asks="layout.gradient_sync=bucketed,layout.bucket_mb=0.02",
    ),
    Fault("ignored_bucket_mb", "strategy", "buckets of 25 MB", asks="layout.bucket_mb=0.02"),
    Fault("ignored_schedule", "strategy", "GPipe instead of 1F1B", preset="pp"),
    Fault("ignored_remat", "strategy", "blocks are kept instead of recomputed", asks="layout.remat=full"),
    Fault("ignored_loss_chunks", "strategy", "all logits at once, not a quarter", asks="train.loss_chunks=4"),
    Fault("ignored_offload", "strategy", "moments stay on the device", asks="layout.offload=optimizer"),
    Fault("ignored_sequence_parallel", "strategy", "sequences stay whole under tp", preset="tp_sp"),
    Fault("ignored_zero", "strategy", "ZeRO-2 instead of 3: parameters stay whole", preset="fsdp"),
    Fault("ignored_reshard", "strategy", "gathered blocks are kept for backward", preset="fsdp"),
    Fault("ignored_dtype", "strategy", "float32 instead of 16 bits", asks=SIXTEEN_BITS),
)
FAULTS = {fault.name: fault for fault in PLANTED}
DROPOUT = 0.2  # with which everything is run, unless the experiment has its own
DEVICES = 4


class Faults(Study, frozen=True, kw_only=True):
    """Check the checker: plant each known mistake in each engine; the ladder must turn red at the right rung.

    Try:
      shardpair faults
      shardpair faults --engines torch-manual --names dropped_all_reduce sum_for_mean
    """

    engines: tuple[StudiedName, ...] = ()
    """Engines to plant faults in. Default: all of the grid."""
    names: tuple[str, ...] = ()
    """Which faults. Default: all."""
    devices: int = DEVICES
    """Devices of data parallelism; faults of other layouts have devices of their own."""

    brief = "plant each known mistake: every check must turn red"
    group = "Prove"
    default = "check"
    fixed: ClassVar = {**OF_LAYOUTS, "init_from": None}
    needs_reference = True
    keeps_records = True

    def cases(self, experiment: Experiment) -> Grid:
        """The reference, and a case for each fault in each engine."""
        engines = chosen_engines(self.engines)
        return fault_cases(experiment, engines, names=list(self.names), devices=self.devices), {}

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """Every planted fault, and the rung that caught it."""
        total = sum(bool(case.against) for case in outcome.cases.values())
        caught = sum(is_right(verdict) for verdict in outcome.verdicts)
        return verdict_findings(
            outcome,
            title="Planted faults",
            sentence=f"{caught} of {total} faults caught at the right rung",
            tables=[table_of("Planted faults, and the rung that caught each", COLUMNS, outcome.verdicts)],
            passed=caught_as_expected(outcome),
        )


COLUMNS = (
    Column[Verdict]("fault", lambda verdict: planted(verdict.candidate)[0].name),
    Column[Verdict]("engine", lambda verdict: planted(verdict.candidate)[1]),
    Column[Verdict]("expected rung", lambda verdict: planted(verdict.candidate)[0].rung),
    Column[Verdict]("caught at", lambda verdict: verdict.failure.rung if verdict.failure else "nothing"),
    Column[Verdict]("where", lambda verdict: verdict.failure.worst if verdict.failure else ""),
    Column[Verdict]("error", lambda verdict: error_text(verdict.failure.error) if verdict.failure else ""),
    Column[Verdict](
        "",
        lambda verdict: "ok" if is_right(verdict) else "WRONG",
        news=lambda verdict: "pass" if is_right(verdict) else "fail",
    ),
)


def is_right(verdict: Verdict) -> bool:
    """True if a fault failed first at the rung that it belongs to."""
    return verdict.failure is not None and verdict.failure.rung == planted(verdict.candidate)[0].rung


def caught_as_expected(outcome: Outcome) -> bool:
    """True if every planted fault was run, at least one, and failed first at the rung that it belongs to."""
    return outcome.is_complete and bool(outcome.verdicts) and all(map(is_right, outcome.verdicts))


def fault_cases(
    experiment: Experiment, engines: list[str], *, names: list[str], devices: int
) -> dict[str, Case]:
    """The unsharded reference, those of `REFERENCES` for faults that show there alone, and one case for each
    fault in each engine that can make it.

    Two optimizer steps are enough: every rung up to the moments is climbed in the first. Without dropout some
    faults would change nothing. Raises ExperimentError.
    """
    check_names("--names", "fault", names, FAULTS)
    if devices < 2:
        raise ExperimentError(f"--devices {devices}: most faults show between devices only; give 2 or more")
    dropout = experiment.model.dropout or DROPOUT
    short = edited(experiment, {"train": {"max_iters": 2}, "model": {"dropout": dropout}})
    chosen = [FAULTS[name] for name in names or FAULTS]
    cases = {"reference": _case(REFERENCE, spread(short, "single"))}
    for asks, name in REFERENCES.items():
        if any(fault.asks == asks for fault in chosen):
            cases[name] = _case(REFERENCE, spread(edited(short, edits_of(asks)), "single"))
    whys = set()
    for fault, engine in itertools.product(chosen, engines):
        if why := ENGINES[engine].impossible_faults.get(fault.name):
            whys.add(f"{fault.name}: {engine}: {why}")
            continue
        over = PRESETS[fault.preset].devices if fault.preset else devices
        sharded = spread(edited(short, edits_of(fault.asks)), fault.preset or "ddp", over)
        ENGINES[engine].require_experiment(sharded)
        edit = edits_of(fault.edit)
        if fault.name == "warmup_off_by_one":  # relative to the experiment's own
            edit = {"optimizer": {"warmup_iters": sharded.optimizer.warmup_iters - 1}}
        cases[f"{fault.name}.{engine}"] = _case(
            engine,
            revalidate(edited(sharded, edit)),
            fault="" if fault.edit else fault.name,
            against=REFERENCES.get(fault.asks, "reference"),
        )
    if not any(case.against for case in cases.values()):
        raise ExperimentError(f"no fault is left to plant: {'; '.join(sorted(whys))}")
    return cases


def _case(engine: str, experiment: Experiment, *, fault: str = "", against: str = "") -> Case:
    request = Request(engine=engine, experiment=experiment, ladder=True, fault=fault)
    return Case(request=request, against=against, same_training=False)


def planted(case_name: str) -> tuple[Fault, str]:
    """The fault and the engine of a case made by `fault_cases`."""
    fault, _, engine = case_name.rpartition(".")
    return FAULTS[fault], engine
