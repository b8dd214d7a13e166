"""Memory estimates against what was measured; and that only what cannot fit is refused."""

import statistics
from pathlib import Path

import msgspec

from compare.execute import this_machine
from compare.numerics.parameters import parameter_count
from compare.setup import fitting
from compare.setup.fitting import require_memory
from compare.spec.experiment import (
    Experiment,
    ExperimentError,
    Layout,
    Precision,
    Train,
    load,
    revalidate,
)
from compare.theory.peak import LEAST, MOST, peak_per_device

GPT2 = load("gpt2-124m")
PEAKS = Path(__file__).parents[1] / "data" / "peaks.json"
"""The fullest device at the peak of a step: jax 0.10.2 and torch 2.13.0 on a CPU. 70 runs in float32; then
ranks of PyTorch alone and XLA's plans, in bfloat16, accumulated passes, few tokens, cp, experts."""
UNDER = "torch-compiler", "experts fsdp_ep none"
"""Its checkpoint, which leaves out gathered weights, keeps the result of every other operator of dispatch."""
S, V = 1024, 50304
B = 8


class MeasuredPeak(msgspec.Struct, frozen=True):
    """Bytes of a run; `layout` is a preset, or the settings that save memory."""

    engine: str
    layout: str
    experiment: Experiment
    device: int
    total: int


def spread(experiment=GPT2, *, batch_size=B, dtype="float32", **fields):
    """The experiment under a layout of these fields and no other."""
    return revalidate(
        msgspec.structs.replace(
            experiment,
            train=Train(batch_size=batch_size),
            precision=Precision(dtype=dtype),
            layout=Layout(**fields),
        )
    )


def test_estimate_is_near_the_measured_peak():
    ratios, in_16_bits = {}, []
    for row in msgspec.json.decode(PEAKS.read_bytes(), type=list[MeasuredPeak]):
        estimate = peak_per_device(row.engine, row.experiment)[row.device]
        ratios[row.engine, row.layout] = estimate / row.total
        if row.experiment.precision.dtype == "bfloat16":
            in_16_bits.append(estimate / row.total)
    assert len(ratios) == 171
    assert 0.65 < ratios.pop(UNDER) < LEAST
    assert LEAST < min(ratios.values()) < max(ratios.values()) < MOST
    assert 1.0 < statistics.median(ratios.values()) < 1.25
    assert 1.0 < statistics.median(in_16_bits) < 1.25, "by the same mechanism as in float32"
    of_torch = [ratio for (engine, _), ratio in ratios.items() if engine.startswith("torch")]
    assert min(of_torch) > 0.9


def refused(monkeypatch, experiment: Experiment, has: int, **options) -> str:
    """The refusal on a machine with `has` bytes; '' if there is none."""
    monkeypatch.setattr(fitting, "memory_bytes", lambda: has)
    try:
        require_memory("torch-manual", experiment, **({"platform": "cpu"} | options))
    except ExperimentError as error:
        return str(error)
    return ""


def test_devices_of_a_cpu_share_its_memory(monkeypatch):
    experiment = spread(dp_replicate=2)
    weights = 4 * parameter_count(GPT2.model)
    logits = 4 * B / 2 * S * V  # of one of two shares: this is more than the batch
    bound = 2 * (weights + 2 * weights) + logits
    assert not refused(monkeypatch, experiment, int(bound))
    message = refused(monkeypatch, experiment, int(bound) - 1)
    assert (
        "would need 3.81 GB (995 MB of parameters + 1.99 GB of optimizer state + 824 MB of logits)" in message
    )
    assert "this machine has 3.81 GB" in message
    assert not refused(monkeypatch, spread(dp_shard=2, zero=3), int(bound) - 1)


def test_gpu_has_memory_of_its_own(monkeypatch):
    experiment = spread(dp_replicate=2)
    state = 3 * 4 * parameter_count(GPT2.model)
    monkeypatch.setattr(fitting, "gpu_memories", lambda: [state])
    assert not refused(monkeypatch, experiment, state, platform="gpu")
    monkeypatch.setattr(fitting, "gpu_memories", lambda: [state - 1])
    assert "and a GPU here has" in refused(monkeypatch, experiment, state, platform="gpu")
    assert "initial weights" in refused(monkeypatch, experiment, state // 3 - 1, platform="gpu")
    monkeypatch.setattr(fitting, "gpu_memories", lambda: [0])  # unknown to nvidia-smi
    assert not refused(monkeypatch, experiment, state, platform="gpu")


def test_gpu_memory_of_nvidia_smi(monkeypatch, tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 81559\necho 40960\necho '[N/A]'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    gpu_memories = this_machine.gpu_memories.__wrapped__  # without its cache
    assert gpu_memories() == (81559 * 2**20, 40960 * 2**20, 0)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert gpu_memories() == ()
