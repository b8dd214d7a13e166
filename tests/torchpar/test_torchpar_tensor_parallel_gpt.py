"""A GPT made tensor-parallel from outside, on four gloo ranks, in float64: gradients, bytes, and mistakes."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from modules import normal
from ranks import RANKS, axis, on_ranks

from compare.judge.closed_forms import communication as closed_form
from compare.spec.experiment import Experiment, Layout, Model, Precision, Train
from torchpar.comm.counter import Call
from torchpar.manual.megatron import mappings
from torchpar.manual.megatron.gpt_parts import of_parts
from torchpar.manual.tensor_parallel import (
    TensorParallel,
    split_layers,
)
from torchpar.model import GPT
from torchpar.parallel_model import ParallelModel
from torchpar.remat import apply_remat

# Sums in another order than one device's: a few units in the last place, of numbers of order 1.
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)


CONFIG = Model(n_layer=2, n_head=4, n_embd=16, block_size=8, vocab_size=50, bias=True)


def make_gpt() -> GPT:
    model = GPT(CONFIG).double()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(normal(*p.shape, seed=i) / 4)  # biases too, so that a doubled one shows
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def parallel_of(model: GPT, tp: TensorParallel) -> ParallelModel:
    optimizer = torch.optim.SGD(model.parameters())
    alone = ParallelModel(module=model, optimizer=optimizer, parameters=dict(model.named_parameters()))
    return of_parts(alone, tp)


def gpt_gradients(*, sequence_parallel: bool, remat: str = "none") -> tuple[torch.Tensor, dict]:
    model = make_gpt()
    tp = split_layers(model, axis(), sequence_parallel=sequence_parallel)
    apply_remat(model.blocks, remat)
    parallel = parallel_of(model, tp)
    for _ in range(2):  # accumulated
        _, loss = model(*batch())
        (loss / 2).backward()
    parallel.finish_gradient_synchronization()
    return loss.detach(), dict(parallel.full(parallel.gradients()))


@on_ranks
def test_gpt_from_outside(rank: int) -> None:
    whole = make_gpt()
    _, loss = whole(*batch())
    loss.backward()
    for sequence_parallel in (False, True):
        for remat in ("none", "dots", "full"):
            got_loss, gradients = gpt_gradients(sequence_parallel=sequence_parallel, remat=remat)
            close(got_loss, loss.detach())
            assert list(gradients) == [name for name, _ in whole.named_parameters()]
            for name, expected in whole.named_parameters():
                close(gradients[name], expected.grad, msg=lambda text, name=name: f"{name}: {text}")


@on_ranks
def test_the_oracle_would_see_mistakes(rank: int) -> None:
    whole = make_gpt()
    _, loss = whole(*batch())
    loss.backward()
    with patch.object(mappings, "_all_reduce", mappings._same):
        wrong_loss, _ = gpt_gradients(sequence_parallel=False)
    assert abs(wrong_loss - loss).item() > 1e-3
    with patch("torchpar.manual.megatron.gpt_parts.synchronize_replicated_gradients"):
        right_loss, gradients = gpt_gradients(sequence_parallel=True)
    close(right_loss, loss.detach())
    name = "transformer.ln_f.weight"
    assert (gradients[name] - whole.get_parameter(name).grad).abs().max() > 1e-3


@on_ranks
def test_ledger_is_the_closed_form(rank: int) -> None:
    layers = CONFIG.n_layer
    for sequence_parallel in (False, True):
        model, line = make_gpt(), axis()
        tp = split_layers(model, line, sequence_parallel=sequence_parallel)
        line.traffic.clear()
        model(*batch())[1].backward()
        parallel_of(model, tp).finish_gradient_synchronization()
        calls, sent = line.traffic.calls, line.traffic.bytes
        experiment = Experiment(
            model=CONFIG,
            train=Train(batch_size=2),
            precision=Precision(dtype="float64"),
            layout=Layout(tp=RANKS, sequence_parallel=sequence_parallel, remat="none"),
        )
        expected = closed_form.tensor_parallel("torch-manual", experiment)
        assert sent == {Call(kind, "world", purpose): size for (kind, _, purpose), size in expected.items()}
        assert calls[Call("all_gather", "world", "loss")] == 1
        reduces, gathers = ("reduce_scatter", "all_gather") if sequence_parallel else ("all_reduce", None)
        for purpose in ("activations", "activation gradients"):
            # 2 a layer; forward also the embedding, backward also the head
            assert calls[Call(reduces, "world", purpose)] == 2 * layers + 1
            if gathers:
                assert calls[Call(gathers, "world", purpose)] == 2 * layers + 1
        assert calls[Call("all_reduce", "world", "replicated gradients")] == int(sequence_parallel)


@on_ranks
def test_gpt_without_targets_is_refused(rank: int) -> None:
    model = make_gpt()
    split_layers(model, axis())
    with pytest.raises(ValueError, match="needs targets"):
        model(batch()[0])
