"""Predicted steps, against sums by hand: FLOPs, bytes on a link, bubbles; each with all else made free."""

import msgspec
import pytest
from machines import FREE, machine_of

from compare.numerics.parameters import parameter_count
from compare.plan.compute import shape_of
from compare.plan.machine import LinkSpeed, Machine, read_machine
from compare.plan.predict import (
    Traffic,
    makespan_s,
    predict,
    setting_of,
    slowdown_by,
    traffic_of,
    transfer_s,
)
from compare.spec.experiment import Experiment, ExperimentError, edited, revalidate
from compare.theory.flops import model_flops_per_token


def traffic_in(engine: str, experiment: Experiment, machine: Machine, **ways) -> list[Traffic]:
    return traffic_of(setting_of(engine, experiment, machine, **ways))


def under(experiment: Experiment, train: dict | None = None, **layout) -> Experiment:
    return revalidate(edited(experiment, {"layout": layout, "train": train or {}}))


def test_a_step_on_one_device_is_its_flops(tiny):
    """JAX's attention skips nothing, so that MFU's count is the work: but for norms' and biases' weights."""
    machine = machine_of(1, peak={"float64": 1e12}, sustained={"float64": 5e11})
    found = predict("jax-manual", under(tiny, remat="none"), machine)
    shape = shape_of(tiny.model)
    flops = shape.flops_per_token * tiny.tokens_per_step
    assert found.seconds == pytest.approx(flops / 5e11, rel=1e-6)
    assert found.mfu == pytest.approx(0.5, rel=1e-6)
    assert shape.flops_per_token == pytest.approx(
        model_flops_per_token(edited(tiny, {"model": {"bias": False}})), rel=0.03
    )


def test_a_fused_attention_skips_what_is_masked_and_recomputation_is_one_forward_more(tiny):
    machine = machine_of(1, peak={"float64": 1e12}, sustained={"float64": 1e12}, attention=0.5)
    shape, tokens = shape_of(tiny.model), tiny.tokens_per_step
    whole = shape.layers * shape.attention_flops(tokens, 1)
    plain = predict("torch-manual", under(tiny, remat="none"), machine)
    assert plain.of_part("attention") == pytest.approx(whole / 2 / 0.5e12 * 3.5)
    for layout, share in (
        ({"context": "ring"}, 3 / 4),
        ({"zigzag": True}, 1 / 2),
        ({"context": "ulysses"}, 1 / 2),
    ):
        split = predict("torch-manual", under(tiny, cp=2, remat="none", **layout), machine)
        assert split.of_part("attention") == pytest.approx(share * plain.of_part("attention")), layout
    full = predict("torch-manual", under(tiny, remat="full"), machine)
    blocks = 2 * shape.layers * shape.block_parameters * tokens
    assert full.seconds - plain.seconds == pytest.approx(blocks / 1e12 + whole / 2 / 0.5e12)


def test_products_take_the_slower_of_flops_and_bytes_and_small_ones_are_less_efficient(tiny):
    slow = machine_of(1, memory_bytes_per_s=1e9)
    assert predict("jax-manual", tiny, slow).of_part("products") > 0.99 * 1e-9  # bytes alone
    shares = [(1e3, 0.1), (1e12, 1.0)]
    whole = predict("jax-manual", tiny, machine_of(1, peak={"float64": 1e12}))
    small = predict("jax-manual", tiny, machine_of(1, peak={"float64": 1e12}, products=shares))
    assert 1.5 * whole.of_part("products") < small.of_part("products") < 10 * whole.of_part("products")


@pytest.mark.parametrize(
    ("layout", "wire"),
    [
        ({"dp_replicate": 2}, lambda parameters, stream: parameters),
        ({"dp_shard": 2, "zero": 1}, lambda parameters, stream: parameters),
        ({"dp_shard": 2, "zero": 3}, lambda parameters, stream: 1.5 * parameters),
        ({"tp": 2}, lambda parameters, stream: 2 * (2 * 2 + 1) * stream),
        ({"cp": 2}, lambda parameters, stream: parameters + 2 * 2 * stream),
        ({"cp": 2, "context": "ring"}, lambda parameters, stream: parameters + 2 * (2 + 6) / 2 * stream),
        ({"cp": 2, "context": "ulysses"}, lambda parameters, stream: parameters + 2 * 2 * stream),
    ],
)
def test_collectives_alone_are_their_bytes_on_a_ring(tiny, layout, wire):
    """Two devices: an all-reduce sends S, a gather or scatter S / 2; tp four streams a layer and two."""
    machine = machine_of(2, inside=LinkSpeed(bytes_per_s=1e6), platform="cpu")
    experiment = under(tiny, **layout)
    found = predict("torch-manual", experiment, machine)
    model = tiny.model
    sent = sum(one.bytes for one in traffic_in("torch-manual", experiment, machine) if one.purpose == "loss")
    stream = 8 * 4 * model.block_size * model.n_embd
    expected = wire(8 * parameter_count(model), stream) + sent / 2
    assert found.seconds == pytest.approx(expected / 1e6, rel=1e-6)


def test_compute_hides_what_runs_beside_it_as_far_as_there_is_any(tiny):
    link = LinkSpeed(bytes_per_s=1e6)
    busy = {"peak": {"float64": 1e3}, "inside": link}
    experiment = under(tiny, dp_shard=2, zero=3)
    shown = predict("torch-manual", experiment, machine_of(2, **busy, platform="cpu"))
    hidden = predict("torch-manual", experiment, machine_of(2, **busy))
    traffic = traffic_in("torch-manual", experiment, machine_of(2, **busy))
    assert shown.of_part("dp") == pytest.approx(sum(one.seconds for one in traffic))
    assert hidden.of_part("dp") == 0
    rushed = predict("torch-manual", experiment, machine_of(2, inside=link))
    assert rushed.of_part("dp") == pytest.approx(shown.of_part("dp"))
    late = under(tiny, dp_replicate=2, gradient_sync="flat")  # it leaves after backward
    flat = predict("torch-manual", late, machine_of(2, **busy))
    assert flat.of_part("dp") == pytest.approx(
        traffic_in("torch-manual", late, machine_of(2, **busy))[0].seconds
    )


def test_slower_links_across_hosts_slow_the_outer_axes_alone(tiny):
    slow = LinkSpeed(bytes_per_s=1e6)
    machine = machine_of(4, devices_inside=2, across=slow, platform="cpu")
    inner = predict("torch-manual", under(tiny, tp=2, dp_replicate=2), machine)
    assert inner.of_part("tp") < 1e-9 < inner.of_part("dp")


def test_an_axis_that_lies_between_those_of_a_group_puts_its_members_apart(tiny):
    """Eight devices fill a host; with two stages between replicas and shards eight members lie on two."""
    machine = read_machine("h100x16")
    for pp, rate in ((1, 450e9 * 0.65), (2, 50e9 * 0.9 * 4)):
        spec = under(tiny, {"batch_size": 16}, dp_replicate=2, dp_shard=4, zero=3, pp=pp, microbatches=pp)
        setting = setting_of("torch-manual", spec, machine)
        found = transfer_s(setting, "all_reduce", "dp_replicate+dp_shard", size=1e9)
        assert found == pytest.approx(2 * 7 / 8 * 1e9 / rate, rel=1e-6)


def test_a_pipeline_takes_its_schedule_with_these_times():
    """GPipe: m (f + b) + (p - 1) (f + b + 2 d), d a message's time; a head makes the last stage slowest."""
    for schedule in ("gpipe", "1f1b"):
        args = {"forward": 1.0, "backward": 2.0, "last": 0.0, "message": 0.0}
        assert makespan_s(schedule, 4, 8, 1, **args) == pytest.approx(8 * 3 + 3 * 3)
    found = makespan_s("gpipe", 4, 8, 1, forward=1.0, backward=2.0, last=0.0, message=0.25)
    assert found == pytest.approx(8 * 3 + 3 * (3 + 0.5))
    assert makespan_s(
        "interleaved", 4, 8, 2, forward=0.5, backward=1.0, last=0.0, message=0.0
    ) == pytest.approx(24 + 4.5)
    head = makespan_s("1f1b", 2, 8, 1, forward=1.0, backward=2.0, last=3.0, message=0.0)
    assert head == pytest.approx(8 * 6 + 1 + 2)  # the first rank's forward before, its backward after


def test_one_measured_step_is_met_by_one_factor_on_compute(tiny):
    """What is sent keeps its time; a step that is shorter than that is none."""
    link = LinkSpeed(bytes_per_s=1e6)
    machine = machine_of(2, peak={"float64": 1e9}, memory_bytes_per_s=1e9, inside=link)
    one, other = under(tiny, tp=2), under(tiny, dp_replicate=2)
    before = predict("torch-manual", one, machine)
    slow = slowdown_by("torch-manual", one, machine, seconds=2 * before.seconds)
    after = msgspec.structs.replace(machine, slowdown=slow)
    found = predict("torch-manual", one, after)
    assert found.seconds == pytest.approx(2 * before.seconds)
    assert found.of_part("tp") == pytest.approx(before.of_part("tp"))
    for part in ("products", "attention", "vectors", "update"):
        assert found.of_part(part) == pytest.approx(slow * before.of_part(part)), part
    assert slow > 2
    assert predict("torch-manual", other, after).seconds > predict("torch-manual", other, machine).seconds
    assert found.mfu == pytest.approx(before.mfu / 2)
    with pytest.raises(ExperimentError, match="what it sends alone takes"):
        slowdown_by("torch-manual", one, machine, seconds=0.5 * before.of_part("tp"))


def test_a_machine_without_a_peak_for_the_dtype_is_no_guess(tiny):
    with pytest.raises(ExperimentError, match="no peak is known for float64"):
        predict("torch-manual", tiny, machine_of(1, peak={"bfloat16": 1e12}))


def test_weights_are_cast_in_16_bits_and_bytes_are_scaled_by_purpose(tiny):
    machine = machine_of(2, peak={"bfloat16": FREE, "float64": FREE})
    half = edited(tiny, {"precision": {"dtype": "bfloat16"}})
    assert setting_of("torch-manual", half, machine).casts
    assert not setting_of("torch-manual", tiny, machine).casts
    parallel = under(tiny, tp=2)
    plain, scaled = (
        {one.purpose: one.bytes for one in traffic_in("torch-manual", parallel, machine, scale=scale)}
        for scale in ({}, {"activations": 3.0})
    )
    assert scaled == {**plain, "activations": 3.0 * plain["activations"]}


def test_terms_are_all_there_is(tiny):
    experiment = under(tiny, train={"batch_size": 8}, pp=2, tp=2, dp_shard=2, zero=1, microbatches=2)
    found = predict("torch-manual", experiment, machine_of(8, inside=LinkSpeed(bytes_per_s=1e9)))
    assert found.seconds == pytest.approx(sum(term.seconds for term in found.terms))
    assert all(term.label and term.seconds > 0 for term in found.terms)
    assert {term.part for term in found.terms} >= {"tp", "pp", "dp"}
    assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found
