"""The mistakes that people make, and the rung of the ladder that must catch each.

Most are a wrong value somewhere in the spec, given to one engine only. The others are rows of a table in a
side's own `faults` (`contract.faults`), because no spec can express them: a collective that is missing.
"""

from collections.abc import Mapping

from msgspec import Struct

from compare.spec.engines.registry import ENGINES, REFERENCE
from compare.spec.experiment import Experiment, ExperimentError, edited, revalidate
from compare.studies.cases import Case
from compare.studies.presets import PRESETS, check_names, spread


class Fault(Struct, frozen=True, kw_only=True):
    """One mistake."""

    name: str
    rung: str
    """The first rung that it must turn red."""
    description: str
    """What went wrong, in a few words."""
    edit: Mapping[str, Mapping[str, object]] | None = None
    """Sections and fields with the wrong value; None if the side plants it in its code."""
    preset: str = ""
    """The layout in which it shows; empty for data parallelism over the devices asked for."""
    asks: Mapping[str, Mapping[str, object]] | None = None
    """Sections and fields that the case is asked for, beyond that layout."""


SIXTEEN_BITS = {"precision": {"dtype": "bfloat16"}}
SMALL_BUCKETS = 0.02  # MB: several of them, in a model of a few ten thousand parameters

FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            name="different_seed",
            rung="batch",
            description="one engine draws other rows",
            edit={"train": {"seed": 1338}},
        ),
        Fault(name="moved_weight", rung="initial_weights", description="one weight starts 1e-3 away"),
        Fault(
            name="gelu_tanh",
            rung="loss",
            description="the tanh approximation, JAX's default GELU",
            edit={"model": {"activation": "gelu_tanh"}},
        ),
        Fault(
            name="norm_eps_1e-6",
            rung="loss",
            description="flax's default LayerNorm epsilon",
            edit={"model": {"norm_eps": 1e-6}},
        ),
        Fault(
            name="dropped_all_reduce",
            rung="gradients",
            description="each replica keeps its own gradients",
        ),
        Fault(
            name="sum_for_mean",
            rung="gradients",
            description="gradients are summed over replicas, not averaged",
        ),
        Fault(
            name="no_clip",
            rung="first_weights",
            description="gradients are not clipped",
            edit={"optimizer": {"grad_clip": 0.0}},
        ),
        Fault(
            name="decay_on_vectors",
            rung="first_weights",
            description="LayerNorm scales and biases decay too",
            edit={"optimizer": {"decay": "all"}},
        ),
        Fault(
            name="warmup_off_by_one",
            rung="first_weights",
            description="one warm-up step too few",
            edit={"optimizer": {"warmup_iters": -1}},
        ),
        Fault(
            name="wrong_beta2",
            rung="first_moments",
            description="PyTorch's default beta2 = 0.999",
            edit={"optimizer": {"beta2": 0.999}},
        ),
        Fault(
            name="kept_gradients",
            rung="final_weights",
            description="gradients are not cleared between steps",
        ),
        Fault(
            name="dropped_tp_all_reduce",
            rung="loss",
            description="a row-parallel product stays one rank's part",
            preset="tp",
        ),
        Fault(
            name="doubled_row_bias",
            rung="gradients",
            description="a row-parallel bias is added before the sum, once a rank",
            preset="tp_sp",
        ),
        Fault(
            name="missing_norm_psum",
            rung="gradients",
            description="LayerNorm gradients are not summed under sequence parallelism",
            preset="tp_sp",
        ),
        Fault(
            name="norm_counts_replicas_twice",
            rung="grad_norm",
            description="the global norm counts what every rank has once a rank",
            preset="tp",
        ),
        Fault(
            name="wrong_optimizer_shard",
            rung="first_weights",
            description="a shard is updated with another rank's gradients",
            preset="fsdp",
        ),
        Fault(
            name="overwritten_microbatch",
            rung="gradients",
            description="a microbatch's gradient replaces those before it",
            preset="pp",
        ),
        Fault(
            name="stale_tied_copy",
            rung="gradients",
            description="the two ends of a pipeline do not add their gradients of the tied embedding",
            preset="pp",
        ),
        Fault(
            name="unscaled_dropout",
            rung="loss",
            description="what dropout keeps is not scaled up",
        ),
        Fault(
            name="same_dropout_on_every_rank",
            rung="loss",
            description="each rank of tp drops in its heads what the first drops in its own",
            preset="tp",
        ),
        Fault(
            name="reversed_update",
            rung="first_weights",
            description="in 16 bits every update goes the other way",
            asks=SIXTEEN_BITS,
        ),
        Fault(
            name="rounded_weights",
            rung="first_update",
            description="in 16 bits the optimizer's own weights are rounded, too",
            asks=SIXTEEN_BITS,
        ),
        Fault(
            name="skipped_last_update",
            rung="final_weights",
            description="the last step updates nothing",
        ),
        Fault(
            name="ignored_gradient_sync",
            rung="strategy",
            description="one flat all-reduce instead of buckets",
            asks={"layout": {"gradient_sync": "bucketed", "bucket_mb": SMALL_BUCKETS}},
        ),
        Fault(
            name="ignored_bucket_mb",
            rung="strategy",
            description="buckets of 25 MB instead of small ones",
            asks={"layout": {"bucket_mb": SMALL_BUCKETS}},
        ),
        Fault(
            name="ignored_schedule",
            rung="strategy",
            description="GPipe instead of 1F1B",
            preset="pp",
        ),
        Fault(
            name="ignored_remat",
            rung="strategy",
            description="blocks are kept instead of recomputed",
            asks={"layout": {"remat": "full"}},
        ),
        Fault(
            name="ignored_loss_chunks",
            rung="strategy",
            description="all logits at once instead of a quarter",
            asks={"train": {"loss_chunks": 4}},
        ),
        Fault(
            name="ignored_offload",
            rung="strategy",
            description="moments stay on the device",
            asks={"layout": {"offload": "optimizer"}},
        ),
        Fault(
            name="ignored_sequence_parallel",
            rung="strategy",
            description="tensor parallelism with whole sequences",
            preset="tp_sp",
        ),
        Fault(
            name="ignored_zero",
            rung="strategy",
            description="ZeRO-2 instead of 3: parameters stay whole",
            preset="fsdp",
        ),
        Fault(
            name="ignored_reshard",
            rung="strategy",
            description="gathered blocks are kept for backward",
            preset="fsdp",
        ),
        Fault(
            name="ignored_dtype",
            rung="strategy",
            description="float32 instead of 16 bits",
            asks=SIXTEEN_BITS,
        ),
    )
}
DROPOUT = 0.2
"""With which everything is run, unless the experiment has its own."""


def fault_cases(experiment: Experiment, engines: list[str], *, names: list[str], devices: int) -> list[Case]:
    """The unsharded reference (and one in 16 bits for faults that show there alone), then one case for each
    fault in each engine that can make it.

    Two optimizer steps are enough: every rung up to the moments is climbed in the first. Without dropout some
    faults would change nothing.

    Raises:
        ExperimentError: an unknown fault, none that these engines can make, or a batch that the devices do
            not divide.
    """
    check_names("--names", "fault", names, FAULTS)
    if devices < 2:
        raise ExperimentError(f"--devices {devices}: most faults show between devices only; give 2 or more")
    dropout = experiment.model.dropout or DROPOUT
    short = edited(experiment, {"train": {"max_iters": 2}, "model": {"dropout": dropout}})
    chosen = [FAULTS[name] for name in names or FAULTS]
    cases = [Case(name="reference", engine=REFERENCE, experiment=spread(short, "single"))]
    if any(fault.asks is SIXTEEN_BITS for fault in chosen):
        rounded = spread(edited(short, SIXTEEN_BITS), "single")
        cases.append(Case(name="reference-16-bits", engine=REFERENCE, experiment=rounded))
    for fault in chosen:
        preset, of_preset = (
            (fault.preset, PRESETS[fault.preset].devices) if fault.preset else ("ddp", devices)
        )
        sharded = revalidate(edited(spread(short, preset, of_preset), fault.asks or {}))
        for engine in engines:
            if fault.name not in ENGINES[engine].impossible_faults:
                ENGINES[engine].require_experiment(sharded)
                cases.append(_plant(fault, engine, sharded))
    if not any(case.name.rpartition(".")[0] for case in cases):
        whys = {
            f"{fault.name}: {e}: {ENGINES[e].impossible_faults[fault.name]}"
            for fault in chosen
            for e in engines
        }
        raise ExperimentError(f"no fault is left to plant: {'; '.join(sorted(whys))}")
    return cases


def _plant(fault: Fault, engine: str, experiment: Experiment) -> Case:
    name = f"{fault.name}.{engine}"
    if fault.edit is None:
        return Case(name=name, engine=engine, experiment=experiment, fault=fault.name)
    edit = fault.edit
    if fault.name == "warmup_off_by_one":  # relative to the experiment's own
        edit = {"optimizer": {"warmup_iters": experiment.optimizer.warmup_iters - 1}}
    return Case(name=name, engine=engine, experiment=revalidate(edited(experiment, edit)))


def planted(case_name: str) -> tuple[Fault, str]:
    """The fault and the engine of a case made by `fault_cases`."""
    fault, _, engine = case_name.rpartition(".")
    return FAULTS[fault], engine
