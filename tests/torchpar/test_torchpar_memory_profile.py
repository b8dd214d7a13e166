"""The memory of a step by class, against counted bytes, and its curve."""

import pytest
import torch

from compare.contract.memory_profile import CLASSES, DeviceMemory
from compare.spec.experiment import Experiment, Layout, Model, Precision, Train
from tests.support.bounds import above_the_estimate
from torchpar.measure.memory import MemorySink
from torchpar.measure.watch import Watch
from torchpar.model import GPT
from torchpar.remat import apply_remat

BATCH = 4
MODEL = Model(n_layer=3, n_head=2, n_embd=16, block_size=32, vocab_size=256, bias=True)


def step_memory(
    *, dtype: torch.dtype = torch.float64, remat: str = "none", passes: int = 1, loss_chunks: int = 1
) -> DeviceMemory:
    """The second step of a model on one device. Several passes end with a copy of the gradients."""
    model = GPT(MODEL, loss_chunks=loss_chunks).to(dtype)
    apply_remat(model.blocks, remat)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.arange(BATCH * MODEL.block_size).view(BATCH, -1)

    def step(sink: MemorySink | None = None) -> None:
        for _ in range(passes):
            _logits, loss = model(tokens, tokens)
            loss.backward()
        for parameter in model.parameters() if passes > 1 else ():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.clone()
        if sink:
            sink.tag("gradients", [p.grad for p in model.parameters() if p.grad is not None])
            sink.watch.is_updating = True
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    sink = MemorySink({"parameters": model.parameters(), "optimizer": state}, module=model)
    with Watch(sink):
        step(sink)
    return sink.result()


def parameter_bytes(dtype: torch.dtype) -> int:
    return sum(p.nbytes for p in GPT(MODEL).to(dtype).parameters())


@pytest.mark.parametrize(("dtype", "remat"), [(torch.float32, "none"), (torch.float64, "full")])
def test_peak_classes_match_autograd(dtype, remat):
    memory = step_memory(dtype=dtype, remat=remat)
    found, name = memory.peak.bytes, str(dtype).removeprefix("torch.")
    experiment = Experiment(
        model=MODEL,
        train=Train(batch_size=BATCH),
        precision=Precision(dtype=name),
        layout=Layout(remat=remat),
    )
    width, heads, layers = MODEL.n_embd, MODEL.n_head, MODEL.n_layer
    block = {"none": 16 * width + heads + 4, "full": width}[remat]  # numbers that autograd saves for a token
    numbers = dtype.itemsize * BATCH * MODEL.block_size
    assert found["parameters"] == parameter_bytes(dtype)
    assert found["optimizer"] == pytest.approx(2 * parameter_bytes(dtype), rel=0.01)  # and step counts
    assert found["logits"] == 4 * numbers * MODEL.vocab_size
    positions = 8 * MODEL.block_size + 16  # of the embedding; and scalars
    assert 0 <= found["activations"] - numbers * (layers * block + 2 * width + 2) <= positions
    assert found["gradients"] == 0
    assert not above_the_estimate("torch-manual", experiment, device=0, peak=memory.peak.total)
    assert memory.peak.phase == "backward"
    assert "log_softmax_backward" in memory.peak.operation


def test_peak_has_accumulated_gradients():
    memory = step_memory(passes=2)
    assert memory.peak.bytes["gradients"] == parameter_bytes(torch.float64)


def test_loss_chunks_divide_logits():
    whole, parts = (max(step_memory(loss_chunks=chunks).curve.bytes["logits"]) for chunks in (1, 8))
    assert parts <= whole / 8


def test_curve_has_the_peak_and_ends_at_rest():
    memory = step_memory()
    curve, peak = memory.curve, memory.peak
    totals = [sum(sizes) for sizes in zip(*(curve.bytes[kind] for kind in CLASSES), strict=True)]
    assert max(totals) == peak.total == totals[curve.positions.index(peak.position)]
    assert [phase for _, phase in curve.marks] == ["forward", "backward", "update"]
    updating = next(position for position, phase in curve.marks if phase == "update")
    place = next(index for index, position in enumerate(curve.positions) if position >= updating)
    assert curve.bytes["gradients"][place] == parameter_bytes(torch.float64)
    assert curve.bytes["activations"][place] <= 32  # the loss
    assert curve.bytes["logits"][place] == BATCH * MODEL.block_size * MODEL.vocab_size * 8  # `_` of the step
