"""The estimate of a peak against sums by hand; the sums over lifetimes that profiles are made of."""

import numpy as np
import pytest

from compare.contract.memory_profile import (
    CLASSES,
    POINTS,
    device_memory,
)
from compare.pipeline.schedules import make_schedule
from compare.pipeline.simulator import peak_in_flight
from compare.spec.experiment import Experiment, Layout, Model, Precision, Train, edited
from compare.theory.peak import in_flight, peak_estimate

C, H, T, V, L, B = 32, 4, 16, 100, 4, 8
N = B * T
PLAIN = Experiment(
    model=Model(n_layer=L, n_head=H, n_embd=C, block_size=T, vocab_size=V, bias=True),
    train=Train(batch_size=B, gradient_accumulation_steps=1),
    precision=Precision(dtype="float64"),
    layout=Layout(remat="none"),
)


def estimate(engine: str = "torch-manual", **layout: object) -> dict[str, list[float]]:
    return peak_estimate(engine, edited(PLAIN, {"layout": layout}))


def test_blocks_and_logits_by_hand():
    """And of the block that backward computes all, once more; then both ends."""
    kept = {
        ("torch-manual", "none"): L * 16 * C + 16 * C + 5 * C,
        ("torch-manual", "dots"): L * 11 * C + 16 * C + 5 * C,
        ("torch-manual", "full"): L * C + 16 * C + 5 * C,
        ("jax-manual", "none"): L * (21 * C + H * T) + 21 * C + 4 * H * T + 7 * C,
        ("jax-manual", "dots"): L * (10 * C + H * T) + 21 * C + 4 * H * T + 7 * C,
    }
    for (engine, remat), numbers in kept.items():
        assert estimate(engine, remat=remat)["activations"] == [8 * N * numbers], (engine, remat)
    assert estimate("jax-manual", remat="auto") == estimate("jax-manual", remat="dots")
    assert estimate()["logits"] == [8 * N * V * 4]
    assert estimate("jax-manual")["logits"] == [8 * N * V * 2]
    assert peak_estimate("torch-manual", edited(PLAIN, {"train": {"loss_chunks": 8}}))["logits"] == [
        8 * N * V * 4 / 8
    ]


def test_axes_split_what_they_split():
    (alone,) = estimate()["activations"]
    assert estimate(dp_replicate=2)["activations"] == [alone / 2] * 2
    blocks = (L + 1) * (4 * C + 12 * C / 4) + 5 * C
    assert estimate(tp=4)["activations"] == [8 * N * blocks] * 4
    split = (L + 1) * (2 * C + 14 * C / 4) + C + 4 * C / 4
    assert estimate(tp=4, sequence_parallel=True)["activations"] == [pytest.approx(8 * N * split)] * 4
    assert estimate(tp=4)["logits"] == [8 * N * V] * 4
    assert estimate(cp=4)["logits"] == [8 * N * V] * 4
    for context, kept, running in (("allgather", 6, 12), ("ring", 0, 2), ("ulysses", 0, 2)):
        fetched = L * (16 + kept) * C + (16 + running + 5) * C
        assert estimate(cp=4, context=context)["activations"] == [8 * N / 4 * fetched] * 4
    (narrow,) = peak_estimate("torch-manual", edited(PLAIN, {"precision": {"dtype": "float32"}}))[
        "activations"
    ]
    assert narrow == alone / 2


def test_zero_gathers_a_unit_or_everything():
    (alone,) = estimate()["activations"]
    everything = estimate()["parameters"][0]
    unit = 8 * (V * C + T * C + 2 * C + 2 * (12 * C * C + 13 * C))
    kept = {"zero": 3, "reshard_after_forward": False}
    for fields, gathered in (({"zero": 1}, 0), ({"zero": 3}, unit), (kept, everything)):
        (first, _) = estimate(dp_shard=2, **fields)["activations"]
        scattered = unit if fields["zero"] == 3 else 0
        assert first == pytest.approx(alone / 2 + gathered + scattered), fields
    accumulated = edited(PLAIN, {"train": {"gradient_accumulation_steps": 4}})
    (first, _) = peak_estimate("torch-manual", edited(accumulated, {"layout": {"dp_shard": 2, "zero": 2}}))[
        "activations"
    ]
    assert first == pytest.approx(alone / 2 + everything), "gradients of four passes, whole until the last"


def test_pipeline_keeps_what_is_in_flight():
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zero_bubble", 1)):
        for microbatches in (4, 8):
            fields = {"pp": 4, "schedule": schedule, "chunks": chunks, "microbatches": microbatches}
            experiment = edited(PLAIN, {"layout": fields, "model": {"n_layer": 12}})
            tasks = make_schedule(schedule, ranks=4, microbatches=microbatches, chunks=chunks)
            counts = [peak_in_flight(rank) for rank in tasks]
            estimates = [in_flight("torch-manual", experiment, stage) for stage in range(4)]
            if schedule == "zero_bubble":  # weight gradients keep more than activations
                assert all(2 * count <= most == 8 for count, most in zip(counts, estimates, strict=True))
            else:
                assert estimates == counts
            assert {in_flight("jax-manual", experiment, stage) for stage in range(4)} == {max(estimates) + 1}
            logits = peak_estimate("torch-manual", experiment)["logits"]
            assert logits[:3] == [0, 0, 0]
            assert logits[3] >= 3 * 8 * N / microbatches * V


def test_lifetimes_add_up():
    lifetimes = [
        ("parameters", 10, 0, 100),
        ("activations", 5, 20, 60),
        ("logits", 7, 50, 51),
    ]
    phases = ["forward"] * 50 + ["backward"] * 40 + ["forward"] * 10
    memory = device_memory(lifetimes, phases, [("op", "here")] * 100)
    peak, curve = memory.peak, memory.curve
    assert (peak.position, peak.phase, peak.total, peak.place) == (50, "backward", 22, "here")
    starts = [(0, "forward"), (50, "backward"), (90, "forward")]
    assert (curve.marks, curve.length) == (starts, 100)
    assert {kind: size for kind, size in peak.bytes.items() if size} == {
        "parameters": 10,
        "activations": 5,
        "logits": 7,
    }
    assert sum(curve.bytes["activations"]) == 5 * 40


def test_a_thinned_curve_keeps_the_peak():
    length, at = 100_000, 77_777
    lifetimes = [("parameters", 3, 0, length), ("temporaries", 9, at, at + 1)]
    curve = device_memory(lifetimes, ["forward"] * length, [("op", "")] * length).curve
    assert len(curve.positions) <= POINTS + 1
    assert at in curve.positions
    assert max(np.sum([curve.bytes[kind] for kind in CLASSES], axis=0)) == 12
    assert curve.positions[-1] == length - 1
