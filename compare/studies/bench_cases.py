"""The cases of a bench: engines x layouts x sizes x variants, and what is left out, with the reason."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from compare.contract.request import Request
from compare.contract.timing import Timing
from compare.judge.outcome import Case
from compare.spec.axes import AXES
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, Layout, edited, revalidate
from compare.studies.fitting import as_preset
from compare.studies.presets import NOTHING_SAID, PRESETS, Said, check_names, check_presets, preset_layout

SECTIONS = ("model", "optimizer", "train", "precision", "layout")
"""Sections whose fields a size or a variant may change; all train on the same data."""


class Choice(Struct, frozen=True, kw_only=True):
    """What a bench was asked to time."""

    engines: tuple[str, ...]
    """An engine that is named twice is held against itself."""
    presets: tuple[str, ...] = ()
    """Layouts by name; the experiment's own if there are none."""
    devices: tuple[int, ...] = (4,)
    """Devices of each preset."""
    sizes: tuple[str, ...] = ()
    """Fields, as in `edits_of`: a block of the table each."""
    variants: tuple[str, ...] = ()
    """Fields, as in `edits_of`: a row each, beside the engine as it is."""
    said: Said = NOTHING_SAID
    """Fields of the experiment's layout that win over those of the presets."""


def bench_cases(
    experiment: Experiment, choice: Choice, *, timing: Timing
) -> tuple[list[Case], dict[str, str]]:
    """Every case, block by block, and why others are none, by name.

    Args:
        experiment: with the user's overrides.
        choice: what to time.
        timing: of the steps of a process.

    Raises:
        ExperimentError: no such preset or field, a variant that cannot work in any layout, or
            nothing is left.
    """
    check_names("--presets", "preset", choice.presets, PRESETS)
    for flag, given in (("--sizes", choice.sizes), ("--variants", choice.variants)):
        _require_different(flag, given)
        _refuse_degrees(flag, given, choice.presets)
    layouts, left_out = _layouts(experiment.layout, choice)
    cases: list[Case] = []
    could_be: set[str] = set()
    for layout_name, layout in layouts.items():
        spread = msgspec.structs.replace(experiment, layout=layout)
        for size in choice.sizes or ("",):
            try:
                plain = _resolved(spread, size, "", steps=timing.steps)
            except ExperimentError as error:
                left_out[" ".join(filter(None, (layout_name, size)))] = str(error)
                continue
            for variant in ("", *choice.variants):
                try:
                    rows = _rows(choice.engines, layout_name, size, variant, plain, timing)
                except ExperimentError as error:
                    left_out[" ".join(filter(None, (layout_name, size, variant)))] = str(error)
                    continue
                could_be.add(variant)
                for case in rows:
                    if why := _refusal(case, plain, is_preset=bool(choice.presets)):
                        left_out[case.name] = why
                    else:
                        cases.append(case)
    if not cases:
        raise ExperimentError(f"nothing can be timed: {'; '.join(dict.fromkeys(left_out.values()))}")
    for variant in choice.variants:
        if variant not in could_be:
            whys = dict.fromkeys(why for name, why in left_out.items() if name.endswith(variant))
            raise ExperimentError(f"--variants {variant}: {'; '.join(whys)}")
    return _block_by_block(cases), left_out


def edits_of(text: str) -> dict[str, dict[str, object]]:
    """Fields and their values: `train.batch_size=8,layout.remat=full`, by section.

    Raises:
        ExperimentError: not of that form, or no such field.
    """
    edits: dict[str, dict[str, object]] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        section, _, field = key.partition(".")
        if not equals or section not in SECTIONS or field not in _fields(section):
            raise ExperimentError(
                f"{text}: give fields and values such as train.batch_size=8 or layout.remat=full, with a "
                f"comma between two (sections: {', '.join(SECTIONS)})"
            )
        edits.setdefault(section, {})[field] = _value(value)
    return edits


def layout_name(layout: Layout) -> str:
    """A layout's preset and devices, such as ddp-2; its degrees where no preset gives them.

    A composition with a pipeline has one name under every schedule.
    """
    any_schedule = Said(file=frozenset({"schedule", "chunks"}))
    for name, said in itertools.product(PRESETS, (NOTHING_SAID, any_schedule)):
        if said != NOTHING_SAID and layout.devices == layout.pp:
            continue
        try:
            if preset_layout(layout, name, layout.devices, said) == layout:
                return _with_devices(name, layout)
        except ExperimentError:  # a preset that cannot spread over so many
            continue
    return "-".join(f"{axis}{layout.axes[axis]}" for axis in AXES if layout.axes[axis] > 1)


def _layouts(own: Layout, choice: Choice) -> tuple[dict[str, Layout], dict[str, str]]:
    """Layouts by name; and presets that cannot spread over so many devices, with the reason."""
    if not choice.presets:
        return {layout_name(own): own}, {}
    layouts, left_out = {}, {}
    possible = []
    for preset in choice.presets:
        for devices in choice.devices:
            try:
                layout = preset_layout(own, preset, devices, choice.said)
            except ExperimentError as error:
                left_out[f"{preset}-{devices}"] = str(error)
            else:
                layouts[_with_devices(preset, layout)] = layout
                possible.append((preset, devices))
    check_presets("--presets", own, possible, choice.said)
    return layouts, left_out


def _with_devices(preset: str, layout: Layout) -> str:
    return f"{preset}-{layout.devices}" if layout.devices > 1 else preset


def _rows(
    engines: Sequence[str], layout: str, size: str, variant: str, plain: Experiment, timing: Timing
) -> list[Case]:
    """A case for each engine. Raises ExperimentError for a variant that cannot work there."""
    whole = _resolved(plain, "", variant, steps=plain.train.max_iters)
    seen: Counter[str] = Counter()
    cases = []
    for engine in engines:
        seen[engine] += 1
        request = Request(engine=engine, experiment=whole, timing=timing)
        cases.append(Case(request=request, layout=layout, size=size, variant=variant, copy=seen[engine]))
    return cases


def _refusal(case: Case, plain: Experiment, *, is_preset: bool) -> str:
    """Why an engine cannot do a case, or does it as it does another one; '' if it can."""
    engine, whole = ENGINES[case.engine], case.experiment
    try:
        if is_preset and not case.variant:
            as_preset(case.engine, whole)
        engine.require_experiment(whole)
    except ExperimentError as error:
        return str(error)
    chosen = {"layout": {"gradient_sync": plain.layout.gradient_sync}}
    if case.variant and not engine.offers_choice and edited(whole, chosen) == plain:
        return f"it has no effect: {case.engine} chooses its gradient synchronisation itself"
    return ""


def _resolved(experiment: Experiment, size: str, variant: str, *, steps: int) -> Experiment:
    for text in filter(None, (size, variant)):
        experiment = edited(experiment, edits_of(text))
    return revalidate(edited(experiment, {"train": {"max_iters": steps}}))


def _require_different(flag: str, given: Sequence[str]) -> None:
    """Refuse texts that say nothing, or say it twice. Raises ExperimentError."""
    for text, times in Counter(given).items():
        edits = edits_of(text)
        if times > 1:
            raise ExperimentError(f"{flag} {text}: give each once")
        if "max_iters" in edits.get("train", {}):
            raise ExperimentError(f"{flag} {text}: the steps of a bench are those of --window and --windows")


def _refuse_degrees(flag: str, given: Sequence[str], presets: Sequence[str]) -> None:
    """Refuse degrees beside presets, which give them. Raises ExperimentError."""
    for text in given if presets else ():
        if degrees := edits_of(text).get("layout", {}).keys() & set(AXES):
            raise ExperimentError(
                f"{flag} {text}: layout.{min(degrees)} contradicts --presets {presets[0]}, which gives the "
                f"degrees: leave --presets out, and give the others as flags, such as --layout.{min(degrees)}"
            )


def _fields(section: str) -> tuple[str, ...]:
    return type(getattr(Experiment(), section)).__struct_fields__


def _value(text: str) -> object:
    """A value as TOML writes it, or else the text itself: `full` needs no quotes."""
    try:
        found: Mapping[str, object] = msgspec.toml.decode(f"value = {text}")
    except msgspec.DecodeError:
        return text
    return found["value"] if found.keys() == {"value"} else text


def _block_by_block(cases: list[Case]) -> list[Case]:
    order = list(dict.fromkeys(case.block for case in cases))
    return sorted(cases, key=lambda case: order.index(case.block))
