"""Layouts of a plan: all that are legal, what they hold, and which fit."""

import itertools

import pytest
from machines import machine_of

from compare.plan.compute import Variant, shape_of
from compare.plan.machine import read_machine
from compare.plan.predict import predict, ways_of
from compare.plan.search import LONG, USABLE, candidates, divisors, folded, memory_of, search
from compare.spec.engines.registry import ENGINES, STUDIED
from compare.spec.experiment import Experiment, ExperimentError, Model, Precision, check, edited
from compare.theory.peak import peak_per_device

NONE = frozenset()
DEGREES = ("tp", "pp", "dp_shard", "dp_replicate")


@pytest.mark.parametrize("engine", STUDIED)
def test_every_legal_layout_is_found(tiny, engine):
    """Against all values of all fields, tried by the checks alone, for as many rows as there can be."""
    found = search(engine, tiny, machine_of(4), fixed=NONE)
    seen = {(*_degrees(one.layout), one.layout.zero, one.layout.remat) for one in found.fitting}
    legal = set()
    for degrees in itertools.product((1, 2, 4), repeat=4):
        layout = dict(zip(DEGREES, degrees, strict=True))
        for zero, remat, microbatches in itertools.product(range(4), ("none", "dots", "full"), (1, 2, 4)):
            for schedule in ("gpipe", "1f1b", "zero_bubble"):
                fields = {"zero": zero, "remat": remat, "microbatches": microbatches, "schedule": schedule}
                try:
                    spec = check(edited(tiny, {"layout": {**layout, **fields}}))
                    ENGINES[engine].require_experiment(spec)
                except ExperimentError:
                    continue
                if spec.layout.devices == 4:
                    legal.add((*degrees, zero, remat))
    assert seen == legal


def test_the_step_keeps_its_sequences_and_each_candidate_is_checked(tiny):
    machine = machine_of(8)
    experiment = edited(tiny, {"train": {"batch_size": 8, "gradient_accumulation_steps": 2}})
    found = search("torch-manual", experiment, machine, fixed=NONE)
    assert len({one.name for one in found.fitting}) == len(found.fitting)
    for one in found.fitting:
        spec = check(one.of(experiment))
        assert spec.sequences_per_step == 16
        assert spec.layout.devices == 8
        ENGINES["torch-manual"].require_experiment(spec)
    assert {one.layout.schedule for one in found.fitting if one.layout.pp > 1} >= {"gpipe", "1f1b"}
    order = [one.seconds for one in found.fitting]
    assert order == sorted(order)
    assert found.refused


def test_memory_is_that_of_the_fullest_device(tiny):
    for engine in STUDIED:
        for one in search(engine, tiny, machine_of(4), fixed=NONE).fitting:
            spec = one.of(tiny)
            assert one.bytes == pytest.approx(max(peak_per_device(engine, spec))), one.name
            assert memory_of(engine, spec) == one.memory


def test_a_model_of_today_has_its_own_weights_and_work():
    """Llama 3 8B has 8,030,261,248 weights: norms, 65 vectors, are not products; positions it has none."""
    sizes = {"n_layer": 32, "n_head": 32, "n_embd": 4096, "block_size": 8192, "vocab_size": 128256}
    plain = Experiment(model=Model(**sizes), precision=Precision(dtype="bfloat16"))
    gpt = edited(plain, {"layout": {"dp_shard": 8, "zero": 3}, "train": {"batch_size": 8}})
    asked = edited(gpt, {"model": {"n_kv_head": 8, "position": "rope"}})
    llama = Variant(mlp=14336, gated=True, untied=True)
    weights = 8_030_261_248 - 65 * 4096
    held, of_gpt = memory_of("torch-manual", asked, llama), memory_of("torch-manual", gpt)
    for kind, copies in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
        assert held[kind] == pytest.approx(copies * 4 * weights / 8)
    assert held["activations"] > 1.2 * of_gpt["activations"]
    assert held["logits"] == of_gpt["logits"]
    shape = shape_of(asked.model, llama)
    looked_up = 128256 * 4096
    assert shape.flops_per_token == 6 * (weights - looked_up) + 12 * 32 * 8192 * 4096
    machine = read_machine("h100x8")
    ways = ways_of("torch-manual", asked, llama)
    assert predict("torch-manual", asked, machine, **ways).seconds > 1.05 * (
        predict("torch-manual", gpt, machine).seconds
    )


def test_what_does_not_fit_is_set_aside(tiny):
    every = search("torch-manual", tiny, machine_of(4), fixed=NONE).fitting
    limit = 1.000001 * sorted(one.bytes for one in every)[len(every) // 2]
    machine = machine_of(4, memory_bytes=limit / USABLE)
    found = search("torch-manual", tiny, machine, fixed=NONE)
    assert {one.name for one in found.fitting} == {one.name for one in every if one.bytes <= limit}
    assert len(found.fitting) + len(found.too_large) == len(every)
    assert all(one.bytes > limit for one in found.too_large)
    nothing = search("torch-manual", tiny, machine_of(4, memory_bytes=1000), fixed=NONE)
    assert not nothing.fitting


def test_fields_that_are_given_stay(tiny):
    deep = edited(tiny, {"model": {"n_layer": 12}, "train": {"batch_size": 24}})
    for given in (
        {"tp": 2, "remat": "full"},
        {"microbatches": 4},
        {"schedule": "interleaved", "chunks": 3},
        {"chunks": 1},
    ):
        asked = edited(deep, {"layout": given})
        found = search("torch-manual", asked, machine_of(4), fixed=frozenset(given)).fitting
        stayed = {tuple(getattr(one.layout, field) for field in given) for one in found}
        assert stayed == {tuple(given.values())}
        assert {one.batch_size * one.gradient_accumulation_steps for one in found} == {24}
    accumulated = edited(deep, {"layout": {"microbatches": 4}})
    found = search("torch-manual", accumulated, machine_of(2), fixed=frozenset({"microbatches"})).fitting
    assert {one.gradient_accumulation_steps for one in found} == {1, 2, 3, 6}
    with pytest.raises(ExperimentError, match="microbatches = 5 "):
        search(
            "torch-manual",
            edited(deep, {"layout": {"microbatches": 5}}),
            machine_of(2),
            fixed=frozenset({"microbatches"}),
        )


def test_sequences_are_split_where_they_are_long_or_it_was_asked_for(tiny):
    machine = machine_of(4)
    found = search("torch-manual", edited(tiny, {"layout": {"cp": 2}}), machine, fixed=frozenset({"cp"}))
    assert {one.layout.cp for one in found.fitting} == {2}
    ways = {(one.layout.context, one.layout.zigzag) for one in found.fitting}
    assert ways == {("allgather", True), ("ring", True), ("ulysses", False)}
    assert any(one.name.startswith("fsdp2+cp2.ring.zigzag+rows") for one in found.fitting)
    assert {one.layout.cp for one in search("torch-manual", tiny, machine, fixed=NONE).fitting} == {1}
    endless = edited(tiny, {"model": {"block_size": LONG}})
    tried = {one.layout.cp for one in candidates("torch-manual", endless, machine, fixed=NONE)}
    assert tried == {1, 2, 4}


def test_no_other_step_is_planned_than_the_one_that_was_asked_for(tiny):
    """Sequences that do not divide are refused by their own number, fewer than devices too."""
    for sequences, devices in ((7, 7), (12, 8), (3, 4), (10, 4)):
        asked = edited(tiny, {"train": {"batch_size": sequences, "gradient_accumulation_steps": 1}})
        every = search("torch-manual", asked, machine_of(devices), fixed=NONE)
        assert {one.batch_size * one.gradient_accumulation_steps for one in every.fitting} == {sequences}
        assert all(sequences % one.layout.data_parallel == 0 for one in every.fitting)
        (why,) = [why for why in every.refused.values() if "sequences a step" in why] or [""]
        assert (f"{sequences} sequences" in why) == bool(sequences % devices)
    short = edited(tiny, {"train": {"batch_size": 3}})
    with pytest.raises(
        ExperimentError, match=r"3 sequences a step do not divide by .*: a multiple of 4 does"
    ):
        search("torch-manual", short, machine_of(4), fixed=frozenset({"tp", "pp"}))


def test_rows_are_more_than_powers_of_two_and_the_best_few_are_of_different_kinds(tiny):
    assert divisors(60, 1.5) == [1, 2, 3, 5, 10, 15, 30, 60]
    assert divisors(60) == [number for number in range(1, 61) if 60 % number == 0]
    assert divisors(6, 3) == [1, 3, 6]
    assert divisors(1, 1.5) == [1]
    asked = edited(tiny, {"train": {"batch_size": 24}})
    found = search("torch-manual", asked, machine_of(2, memory_bytes_per_s=1e9), fixed=NONE).fitting
    assert {f"dp2+rows{rows}+none" for rows in (1, 2, 3, 6, 12)} <= {one.name for one in found}
    kinds = folded(found)
    assert kinds[0].name == found[0].name
    assert len({one.kind for one in kinds}) == len(kinds) == len({one.kind for one in found})
    assert sum(1 + one.alike for one in kinds) == len(found)
    assert [one.seconds for one in kinds] == sorted(one.seconds for one in kinds)


def test_tp_stays_inside_of_a_host(tiny):
    wide = edited(tiny, {"model": {"n_head": 4}})
    found = search("torch-manual", wide, machine_of(4, devices_inside=2), fixed=NONE)
    assert {one.layout.tp for one in found.fitting} == {1, 2}


def _degrees(layout) -> tuple[int, ...]:
    return tuple(getattr(layout, name) for name in DEGREES)
