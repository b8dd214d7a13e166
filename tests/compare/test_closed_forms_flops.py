"""Model FLOPs of a token, against a count by hand and nanoGPT's estimate; peaks of chips, never guessed."""

import pytest

from compare.numerics.parameters import parameter_count
from compare.spec.experiment import edited, load
from compare.theory.flops import PEAKS, flops_utilization, model_flops_per_token, peak_flops

GPT2 = load("gpt2-124m")
H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("name", ["gpt2-124m", "demo", "check"])
def test_nanogpt_estimates_the_same(name):
    experiment = load(name)
    model = experiment.model
    n, layers, h, q, t = (  # nanoGPT's names
        parameter_count(model) - model.block_size * model.n_embd,  # get_num_params(non_embedding=True)
        model.n_layer,
        model.n_head,
        model.n_embd // model.n_head,
        model.block_size,
    )
    assert model_flops_per_token(experiment) == 6 * n + 12 * layers * h * q * t


def test_peaks_are_without_sparsity():
    assert peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16") is None  # unknown
    assert peak_flops(H100, "bfloat16") == 989.5e12
    assert peak_flops(H100, "tf32") == 494.5e12
    assert peak_flops(H100, "float32") == 67e12
    assert peak_flops("TPU v5 lite", "bfloat16") == 197e12
    assert peak_flops("TPU v5 lite", "float32") is None
    for chip, peaks in PEAKS.items():
        by_dtype = [peaks[dtype] for dtype in ("bfloat16", "tf32", "float32") if dtype in peaks]
        assert by_dtype == sorted(by_dtype, reverse=True), chip
        if "tf32" in peaks:
            assert peaks["tf32"] == pytest.approx(peaks["bfloat16"] / 2, rel=0.02), chip


def test_mfu_is_of_all_devices():
    def mfu(devices: int, device_kind: str = H100, **precision: object) -> float | None:
        spread = {"layout": {"dp_replicate": devices}, "precision": precision}
        return flops_utilization(edited(GPT2, spread), device_kind, rate)

    rate = 8 * 989.5e12 / model_flops_per_token(GPT2)
    assert mfu(8) == pytest.approx(1.0)
    assert mfu(16) == pytest.approx(0.5)
    assert mfu(8, dtype="float32", tf32=False) == pytest.approx(989.5 / 67)
    assert mfu(8, dtype="float32", tf32=True) == pytest.approx(989.5 / 494.5)
    assert mfu(8, "a CPU") is None
