"""The closed form at the peak, against sums by hand; the sums over lifetimes that profiles are made of."""

import msgspec
import numpy as np
import pytest

from compare.contract.memory_profile import (
    CLASSES,
    MEMORY,
    POINTS,
    DeviceMemory,
    Lifetime,
    MemoryProfile,
    Peak,
    PhaseStart,
    changes_of,
    curve_of,
    peak_of,
    usage,
)
from compare.host.json_files import read_json, write_json
from compare.judge.closed_forms.memory import closed_form
from compare.judge.closed_forms.peak_memory import peak_form
from compare.present.memory import place_of
from compare.spec.experiment import Experiment, Layout, Model, Precision, Train

C, H, T, V, L, B = 32, 4, 16, 100, 4, 8
N = B * T
MODEL = Model(n_layer=L, n_head=H, n_embd=C, block_size=T, vocab_size=V, bias=True)
PLAIN = Experiment(
    model=MODEL,
    train=Train(batch_size=B, gradient_accumulation_steps=1),
    precision=Precision(dtype="float64"),
    layout=Layout(remat="none"),
)


def form(engine="torch-manual", device=0, **fields):
    layout = msgspec.structs.replace(PLAIN.layout, **fields)
    return peak_form(engine, msgspec.structs.replace(PLAIN, layout=layout), device=device)


def test_one_device_keeps_what_autograd_saves():
    held = form().bytes
    assert held["activations"] == 8 * N * (L * (16 * C + H + 4) + 2 * C + 2)
    assert held["logits"] == 8 * N * V * 4
    assert held["gradients"] == held["gathered parameters"] == 0
    assert held["parameters"] == closed_form("torch-manual", PLAIN)["parameters"][0]


def test_float32_halves_everything():
    narrow = msgspec.structs.replace(PLAIN, precision=Precision(dtype="float32"))
    halves = {kind: size / 2 for kind, size in form().bytes.items()}
    assert peak_form("torch-manual", narrow).bytes == halves


def test_recomputation_keeps_the_input_of_each_block():
    assert form(remat="full").bytes["activations"] == 8 * N * (L * C + 2 * C + 2)


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallelism_repeats_what_enters_its_regions(tp):
    plain = L * (4 * C + 4 + (12 * C + H) / tp) + 2 * C + 2
    assert form(tp=tp).bytes["activations"] == 8 * N * plain
    split = L * (2 * C + (14 * C + H + 4) / tp) + C + (C + 2) / tp
    assert form(tp=tp, sequence_parallel=True).bytes["activations"] == pytest.approx(8 * N * split)


def test_data_parallelism_divides_activations_and_not_state():
    ddp, single = form(dp_replicate=2).bytes, form().bytes
    assert ddp["activations"] == single["activations"] / 2
    assert ddp["parameters"] == single["parameters"]
    assert form("torch-library", dp_replicate=2).bytes["gradients"] == single["parameters"]  # DDP's buckets


def test_zero_3_gathers_the_ends_and_without_resharding_all():
    ends = 8 * (V * C + T * C + 2 * C)
    assert form(dp_shard=2, zero=3).bytes["gathered parameters"] == ends
    whole = form().bytes["parameters"]
    assert form(dp_shard=2, zero=3, reshard_after_forward=False).bytes["gathered parameters"] == whole
    assert form(dp_shard=2, zero=2).bytes["gathered parameters"] == 0
    assert form("torch-library", dp_shard=2, zero=2).bytes["gathered parameters"] == whole


def test_replicas_of_split_layers_are_whole_copies_in_fsdp2():
    """Under tensor parallelism torch-library's replicas are FSDP2's: gathered copies, and no buckets."""
    held = form("torch-library", dp_replicate=2, tp=2).bytes
    assert held["gradients"] == 0
    assert held["gathered parameters"] == held["parameters"]
    assert form("torch-manual", dp_replicate=2, tp=2).bytes["gathered parameters"] == 0


def test_gradients_that_add_up_before_they_are_scattered_have_no_form():
    train = msgspec.structs.replace(PLAIN.train, gradient_accumulation_steps=2)
    layout = msgspec.structs.replace(PLAIN.layout, dp_shard=2, zero=3)
    passes = msgspec.structs.replace(PLAIN, train=train, layout=layout)
    assert "gradients" not in peak_form("torch-manual", passes).bytes
    assert peak_form("torch-manual", PLAIN).bytes["gradients"] == 0


def test_a_pipeline_keeps_what_is_in_flight():
    fields = {"pp": 4, "microbatches": 8}
    block, part = 16 * C + H + 4, 8 * N / 8
    first, second, *_, last = (form(device=device, **fields).bytes for device in range(4))
    assert first["activations"] == part * 4 * block
    assert second["activations"] == part * 3 * (block - C)  # its input came as a message
    assert last["activations"] == part * (block - C + 2 * C + 2)
    assert last["logits"] == part * V * 3
    assert "logits" not in first
    whole = closed_form("torch-manual", msgspec.structs.replace(PLAIN, layout=Layout(**fields)))
    assert last["gradients"] == whole["gradients"][3]  # of the microbatches before


def test_jax_makes_residuals_of_norms_gelu_and_scores_gradients_and_two_logits():
    none, dots = (form("jax-manual", remat=remat).bytes["XLA's temporaries"] for remat in ("none", "dots"))
    ends, gradients = 4 * C + 2, V * C + L * (12 * C * C + 13 * C)
    assert none == 8 * (N * (L * (21 * C + H * T + 4) + ends + 2 * V) + gradients)
    assert dots == 8 * (N * (L * (10 * C + H * T) + ends + 2 * V) + gradients)
    assert form("jax-manual", remat="auto").bytes["XLA's temporaries"] == dots
    by_hand, by_xla = (
        form(f"jax-{name}", tp=2).bytes["XLA's temporaries"] for name in ("manual", "compiler")
    )
    assert by_hand - by_xla == 8 * N * V / 2  # the exponentials


def test_what_peaks_elsewhere_has_the_form_of_its_state():
    pipeline = {"pp": 2, "microbatches": 2}
    for engine, fields in (
        ("jax-manual", pipeline),
        ("torch-manual", {"remat": "dots"}),
        ("torch-manual", pipeline | {"schedule": "gpipe"}),
        ("torch-manual", pipeline | {"dp_shard": 2, "zero": 3}),
    ):
        assert form(engine, **fields).bytes.keys() == {"parameters", "optimizer"}


def test_what_has_no_form_has_none():
    bfloat16 = msgspec.structs.replace(PLAIN, precision=Precision(dtype="bfloat16"))
    assert peak_form("torch-manual", bfloat16) is None
    assert peak_form("somebody-elses", PLAIN) is None


def test_a_class_fits_within_its_limit_and_no_further():
    held = form(dp_replicate=2)
    size = held.bytes["activations"]
    assert held.fits("activations", 1.09 * size)
    assert not held.fits("activations", 1.11 * size)
    assert not held.fits("parameters", 1.06 * held.bytes["parameters"])
    assert held.fits("temporaries", 1e9)  # which have no form


def test_a_plan_without_a_moment_is_read_as_it_was_written(tmp_path):
    peak = Peak(bytes={"parameters": 12, "XLA's temporaries": 5})
    profile = MemoryProfile(devices=[DeviceMemory(peak=peak)], method="XLA's plan")
    write_json(tmp_path / MEMORY, profile)
    assert read_json(tmp_path / MEMORY, MemoryProfile) == profile
    assert (peak.total, place_of(peak), profile.fullest) == (17, "", 0)


def test_lifetimes_add_up():
    lifetimes = [
        Lifetime("parameters", 10, 0, 100),
        Lifetime("activations", 5, 20, 60),
        Lifetime("logits", 7, 50, 51),
    ]
    in_use = usage(lifetimes, 100)
    marks = [PhaseStart(0, "forward"), PhaseStart(50, "backward")]
    peak = peak_of(in_use, marks, operation="op", place="here")
    assert (peak.position, peak.phase, peak.total) == (50, "backward", 22)
    assert {kind: size for kind, size in peak.bytes.items() if size} == {
        "parameters": 10,
        "activations": 5,
        "logits": 7,
    }
    assert in_use["activations"].sum() == 5 * 40


def test_a_thinned_curve_keeps_the_peak():
    length, at = 100_000, 77_777
    in_use = usage([Lifetime("parameters", 3, 0, length), Lifetime("temporaries", 9, at, at + 1)], length)
    curve = curve_of(in_use, [])
    assert len(curve.positions) <= POINTS + 1
    assert at in curve.positions
    assert max(np.sum([curve.bytes[kind] for kind in CLASSES], axis=0)) == 12
    assert curve.positions[-1] == length - 1


def test_marks_are_where_phases_change():
    assert changes_of(["forward", "forward", "backward", "forward"]) == [
        PhaseStart(0, "forward"),
        PhaseStart(2, "backward"),
        PhaseStart(3, "forward"),
    ]
