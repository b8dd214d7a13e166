"""The cases of a bench: engines x layouts x sizes x variants, and what is left out, with the reason."""

import itertools
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from compare.contract.request import Request
from compare.contract.timing import Timing
from compare.judge.outcome import Case, Grid
from compare.spec.axes import AXES
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, Layout, edited, revalidate
from compare.studies.fitting import as_preset
from compare.studies.presets import NOTHING_SAID, PRESETS, Said, check_names, check_presets, preset_layout

SECTIONS = ("model", "optimizer", "train", "precision", "layout")
"""Sections whose fields a size or a variant may change; all train on the same data."""


def bench_cases(
    experiment: Experiment,
    *,
    engines: Sequence[str],
    presets: Sequence[str] = (),
    devices: Sequence[int] = (4,),
    sizes: Sequence[str] = (),
    variants: Sequence[str] = (),
    said: Said = NOTHING_SAID,
    timing: Timing,
) -> Grid:
    """Every case, block by block, and why others are none, by name.

    Args:
        experiment: with the user's overrides.
        engines: one that is named twice is held against itself.
        presets: layouts by name; the experiment's own if there are none.
        devices: of each preset.
        sizes: fields, as in `edits_of`: a block of the table each.
        variants: fields, as in `edits_of`: a row each, beside the engine as it is.
        said: fields of the experiment's layout that win over those of the presets.
        timing: of the steps of a process.

    Raises:
        ExperimentError: no such preset or field, a variant that works in no layout, or nothing is left.
    """
    check_names("--presets", "preset", presets, PRESETS)
    for flag, texts in (("--sizes", sizes), ("--variants", variants)):
        check_names(flag, "setting", texts, texts)
        for text in texts:
            edits = edits_of(text)
            degrees = edits.get("layout", {}).keys() & set(AXES) if presets else ()
            if degrees:
                why = f"layout.{min(degrees)} contradicts --presets {presets[0]}, which gives the degrees"
                raise ExperimentError(f"{flag} {text}: {why}: leave one of them out")
            if "max_iters" in edits.get("train", {}):
                raise ExperimentError(f"{flag} {text}: the steps of a bench are those of --window")
    layouts, left_out = _layouts(experiment.layout, presets, devices, said)
    cases: dict[str, Case] = {}
    possible = set()
    for (name, layout), size, variant in itertools.product(layouts.items(), sizes or ("",), ("", *variants)):
        try:
            short = edited(replace(experiment, layout=layout), {"train": {"max_iters": timing.steps}})
            plain = revalidate(edited(short, edits_of(size)))
            spec = revalidate(edited(plain, edits_of(variant)))
        except ExperimentError as error:
            left_out[" ".join(filter(None, (name, size, variant)))] = str(error)
            continue
        possible.add(variant)
        for place, engine in enumerate(engines, 1):
            request = Request(engine=engine, experiment=spec, timing=timing)
            copy = engines[:place].count(engine)
            case = Case(request=request, layout=name, size=size, variant=variant, copy=copy)
            if why := _refusal(case, plain, is_preset=bool(presets)):
                left_out[case.name] = why
            else:
                cases[case.name] = case
    if not cases:
        raise ExperimentError(f"nothing can be timed: {'; '.join(dict.fromkeys(left_out.values()))}")
    for variant in variants:
        if variant not in possible:
            reasons = dict.fromkeys(why for name, why in left_out.items() if name.endswith(variant))
            raise ExperimentError(f"--variants {variant}: {'; '.join(reasons)}")
    return cases, left_out


def edits_of(text: str) -> dict[str, dict[str, object]]:
    """Fields and their values: `train.batch_size=8,layout.remat=full`, by section; {} of ''.

    Raises:
        ExperimentError: not of that form, or no such field.
    """
    edits: dict[str, dict[str, object]] = {}
    for part in text.split(",") if text else ():
        key, equals, value = part.strip().partition("=")
        section, _, field = key.partition(".")
        fields = type(getattr(Experiment(), section)).__struct_fields__ if section in SECTIONS else ()
        if not equals or field not in fields:
            raise ExperimentError(
                f"{text}: give fields and values such as train.batch_size=8 or layout.remat=full, with a "
                f"comma between two (sections: {', '.join(SECTIONS)})"
            )
        edits.setdefault(section, {})[field] = _value(value)
    return edits


def _value(text: str) -> object:
    """A value as TOML writes it, or else the text itself: `full` needs no quotes."""
    try:
        read: Mapping[str, object] = msgspec.toml.decode(f"value = {text}")
    except msgspec.DecodeError:
        return text
    return read["value"] if read.keys() == {"value"} else text


def _layouts(
    own: Layout, presets: Sequence[str], devices: Sequence[int], said: Said
) -> tuple[dict[str, Layout], dict[str, str]]:
    """Layouts by name; and presets that cannot spread over so many devices, with the reason."""
    if not presets:
        degrees = [f"{axis}{own.axes[axis]}" for axis in AXES if own.axes[axis] > 1]
        return {"-".join(degrees) or "single": own}, {}
    layouts, left_out, possible = {}, {}, []
    for preset, count in itertools.product(presets, devices):
        try:
            layout = preset_layout(own, preset, count, said)
        except ExperimentError as error:
            left_out[f"{preset}-{count}"] = str(error)
        else:
            layouts[f"{preset}-{layout.devices}" if layout.devices > 1 else preset] = layout
            possible.append((preset, count))
    check_presets("--presets", own, possible, said)
    return layouts, left_out


def _refusal(case: Case, plain: Experiment, *, is_preset: bool) -> str:
    """Why an engine cannot do a case, or does it as it does another one; '' if it can."""
    engine, spec = ENGINES[case.engine], case.experiment
    try:
        if is_preset and not case.variant:
            as_preset(case.engine, spec)
        engine.require_experiment(spec)
    except ExperimentError as error:
        return str(error)
    chosen = {"layout": {"gradient_sync": plain.layout.gradient_sync}}
    if case.variant and not engine.offers_choice and edited(spec, chosen) == plain:
        return f"it has no effect: {case.engine} chooses its gradient synchronisation itself"
    return ""
