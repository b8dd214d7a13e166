"""The closed form at the peak, against sums by hand; the sums over lifetimes that profiles are made of."""

import msgspec
import numpy as np
import pytest
from memory import read_memory, spec_of

from compare.contract.memory_profile import (
    CLASSES,
    POINTS,
    Lifetime,
    Mark,
    Peak,
    changes_of,
    curve_of,
    peak_of,
    usage,
)
from compare.judge.closed_forms.memory import closed_form
from compare.judge.closed_forms.peak_memory import PeakForm, peak_form
from compare.judge.closed_forms.xla_memory import PATTERNS
from compare.present.memory_tables import AtPeak
from compare.present.report.pictures import peak_words
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


def test_jax_keeps_residuals_of_norms_gelu_and_scores():
    none, dots = (form("jax-manual", remat=remat).bytes["activations"] for remat in ("none", "dots"))
    ends = 4 * C + 2
    assert none == 8 * N * (L * (21 * C + H * T + 4) + ends)
    assert dots == 8 * N * (L * (10 * C + H * T) + ends)
    assert form("jax-manual", remat="auto").bytes["activations"] == dots
    assert "logits" not in form("jax-manual").bytes


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


def test_what_xla_does_instead_is_named_only_where_it_gives_the_bytes():
    table, block = 8 * V * C, 8 * (12 * C * C + 13 * C)
    ddp = form("jax-compiler", dp_replicate=2)
    assert ddp.bytes["gradients"] == table + L * block
    assert ddp.why("gradients", 1.02 * (table + L * block)) == ""
    assert ddp.why("gradients", 2 * table + L * block) == "tied gradient twice"
    assert ddp.why("gradients", L * block) == "before the table's gradient"
    assert ddp.why("gradients", 1.5 * (table + L * block)) is None
    assert ddp.why("activations", 1.09 * ddp.bytes["activations"]) == ""
    assert ddp.why("activations", 1.11 * ddp.bytes["activations"]) is None
    by_hand = form("jax-manual", dp_replicate=2)
    assert by_hand.why("gradients", 2 * table + L * block) is None  # only the compiler keeps both
    zero2 = form("jax-compiler", dp_shard=2, zero=2)
    assert zero2.why("gradients", L * block / 2) == "shards are added up, before the table's gradient"
    fsdp = form("jax-manual", dp_shard=2, zero=3)
    assert fsdp.why("gathered parameters", table) == "the table alone"
    assert fsdp.why("gathered parameters", 8 * C) == "gathered again later"
    assert fsdp.why("gathered parameters", 0.0) is None
    kept = form("jax-manual", dp_shard=2, zero=3, reshard_after_forward=False)
    assert kept.why("activations", kept.bytes["activations"] + L * block) == "gathered weights are residuals"
    split = form("jax-manual", tp=2, sequence_parallel=True)
    blocks = split.bytes["gradients"] - table / 2
    assert split.otherwise["gradients"] == {
        "before the table's gradient": blocks,
        "before the table's gradient, positions' gradient": blocks + 8 * T * C,
    }
    by_parts = form("jax-manual", tp=2, dp_replicate=2).otherwise["gradients"]
    assert by_parts["before the table's gradient, a gradient before its sum"] == blocks + 8 * N / 2 * C
    assert set(", ".join(name for known in zero2.otherwise.values() for name in known).split(", ")) <= set(
        PATTERNS
    )
    assert not form("torch-manual", dp_shard=2, zero=3).otherwise


def test_lifetimes_add_up():
    lifetimes = [
        Lifetime("parameters", 10, 0, 100),
        Lifetime("activations", 5, 20, 60),
        Lifetime("logits", 7, 50, 51),
    ]
    in_use = usage(lifetimes, 100)
    marks = [Mark(0, "forward"), Mark(50, "backward")]
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
        Mark(0, "forward"),
        Mark(2, "backward"),
        Mark(3, "forward"),
    ]


def test_every_measured_figure_is_explained_and_hardly_one_half_as_large_again():
    """docs/memory.json: what a device held, of every class that has a form."""
    figures = [
        (preset, engine, kind, form, held.peak.bytes[kind])
        for preset, engines in read_memory().items()
        for engine, held in engines.items()
        if (form := peak_form(engine, spec_of(preset), device=held.device))
        for kind in form.bytes
    ]
    assert len(figures) >= 250
    assert [one[:3] for one in figures if one[3].why(one[2], one[4]) is None] == []
    spoiled = [one[:3] for one in figures if one[4] and one[3].why(one[2], 1.5 * one[4]) is not None]
    assert spoiled == [("fsdp_tp_sp", "jax-manual", "gradients")]  # the closed form is half as large again


def test_a_report_says_of_whom_there_is_which_form():
    held = Peak(position=0, phase="backward", bytes=dict.fromkeys(CLASSES, 0), operation="", place="")
    state = PeakForm(moment="at any moment", bytes={"parameters": 1.0, "optimizer": 2.0})
    forms = {"torch-manual": form(), "jax-manual": state, "plain-jit": None}
    peaks = [AtPeak(device=0, peak=held, form=one) for one in forms.values()]
    assert peak_words(list(forms), peaks) == (
        "The closed forms are those where the gradient of the logits is made. Of jax-manual there is one of "
        "parameters and optimizer alone. There is none for plain-jit."
    )
