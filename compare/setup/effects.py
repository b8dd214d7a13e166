"""Flags that have an effect only together with others: a flag without effect is rejected."""

from collections.abc import Callable, Collection, Iterable

from compare.judge.outcome import Case
from compare.numerics.optimizer import moment_names
from compare.setup.presets import edits_of
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import ExperimentError

Condition = Callable[[Case], bool]


def _reduces_buckets(case: Case) -> bool:
    """Whether an engine reduces gradients over replicas in buckets, or inductor buckets all messages."""
    engine, layout = ENGINES[case.engine], case.experiment.layout
    chosen = engine.offers_choice and layout.gradient_sync == "bucketed"
    by_inductor = engine.sends_by == "dtensor" and layout.compile == "inductor" and layout.devices > 1
    return by_inductor or (layout.replicas > 1 and (chosen or "ddp" in engine.gradient_sync))


def _compiles(case: Case) -> bool:
    """Whether the engine can carry out `layout.compile`."""
    compiles, value = ENGINES[case.engine].layouts.compiles, case.experiment.layout.compile
    return bool(compiles) and (value in ("auto", "none") or value in compiles)


EFFECTS: dict[str, tuple[str, Condition]] = {
    "model.rope_base": ("with --model.position rope", lambda case: case.experiment.model.position == "rope"),
    **dict.fromkeys(
        ("model.experts_per_token", "model.balance"),
        ("with --model.n_experts", lambda case: case.experiment.model.n_experts > 0),
    ),
    "layout.context": ("with --layout.cp", lambda case: case.experiment.layout.cp > 1),
    "layout.schedule": ("with --layout.pp", lambda case: case.experiment.layout.pp > 1),
    "layout.gradient_sync": (
        "with several replicas, and not where the framework chooses",
        lambda case: case.experiment.layout.replicas > 1 and ENGINES[case.engine].offers_choice,
    ),
    "layout.bucket_mb": (
        "with several replicas, for DDP or --layout.gradient_sync bucketed, with --layout.zero 1, or for "
        "torch-compiler with --layout.compile inductor",
        lambda case: case.experiment.layout.zero == 1 or _reduces_buckets(case),
    ),
    "layout.offload": (
        "with an optimizer that has moments: adamw, or sgd with --optimizer.momentum",
        lambda case: bool(moment_names(case.experiment.optimizer)),
    ),
    "layout.xla": (
        "for JAX with --platform gpu",
        lambda case: ENGINES[case.engine].is_jax and case.request.platform == "gpu",
    ),
    "layout.compile": (
        "for torch-compiler and nanogpt-loop, and block for torch-manual and torch-library",
        _compiles,
    ),
    **dict.fromkeys(
        ("optimizer.min_lr", "optimizer.warmup_iters", "optimizer.lr_decay_iters"),
        ("with --optimizer.decay_lr", lambda case: case.experiment.optimizer.decay_lr),
    ),
    "optimizer.decay": (
        "with --optimizer.weight_decay",
        lambda case: case.experiment.optimizer.weight_decay > 0,
    ),
    "optimizer.momentum": ("with --optimizer.name sgd", lambda case: case.experiment.optimizer.name == "sgd"),
    **dict.fromkeys(
        ("optimizer.beta1", "optimizer.beta2", "optimizer.eps"),
        ("with --optimizer.name adamw", lambda case: case.experiment.optimizer.name == "adamw"),
    ),
    "precision.gather": (
        "for PyTorch engines with --layout.zero 3 and 16 bits, such as --precision.dtype bfloat16",
        lambda case: (
            case.experiment.layout.zero == 3
            and case.experiment.precision.dtype in ("bfloat16", "float16")
            and not ENGINES[case.engine].is_jax
        ),
    ),
    "precision.tf32": ("with --platform gpu", lambda case: case.request.platform == "gpu"),
    "train.eval_iters": ("with --train.eval_interval", lambda case: case.experiment.train.eval_interval > 0),
}
"""By flag: when it has an effect, in words and as a condition."""


def like_plain(cases: Iterable[Case]) -> dict[str, str]:
    """The cases, by name, that their variant does not change, with the reason, if it changes other cases."""
    found: dict[str, dict[str, str]] = {}
    has_effect = set[str]()
    for case in cases:
        variant = case.coordinates.get("variant", "")
        dead = [field for field in fields_of(variant) if field in EFFECTS and not EFFECTS[field][1](case)]
        if variant and len(dead) == len(fields_of(variant)):
            words = "; ".join(f"{field} has an effect only {EFFECTS[field][0]}" for field in dead)
            found.setdefault(variant, {})[case.name] = words
        else:
            has_effect.add(variant)
    return {name: why for variant in has_effect for name, why in found.get(variant, {}).items()}


def fields_of(variant: str) -> list[str]:
    """The fields that a variant sets, such as `layout.remat`. Raises ExperimentError: as `edits_of`."""
    return [f"{section}.{field}" for section, edits in edits_of(variant).items() for field in edits]


def require_effects(given: Collection[str], cases: Iterable[Case]) -> None:
    """Reject a given flag that changes no case, or a field of a variant that changes none of its cases.

    Raises ExperimentError.
    """
    of_variant: dict[str, list[Case]] = {}
    for case in (cases := list(cases)):
        of_variant.setdefault(case.coordinates.get("variant", ""), []).append(case)
    asked = [("--", given, cases)]
    for variant, own in of_variant.items():
        asked.append((f"--variants {variant}: ", fields_of(variant), own))
    for flag, fields, own in asked:
        for field in sorted(EFFECTS.keys() & fields):
            words, has_effect = EFFECTS[field]
            if own and not any(map(has_effect, own)):
                raise ExperimentError(f"{flag}{field} has an effect only {words}: give both, or neither")
