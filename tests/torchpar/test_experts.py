"""A GPT with experts: compared with NumPy, and on four gloo ranks with one device."""

from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn

from compare.formats.gpt2_names import from_gpt2
from compare.numerics.parameters import initial_parameters
from compare.spec.axes import DATA
from compare.spec.engines import registry
from compare.spec.experiment import Experiment, ExperimentError, Layout, Model, Precision
from tests.support.gpt_steps import ADAM, CONFIG, assert_same, backward, batches, make_gpt, make_parallel
from tests.support.numpy_gpt import numpy_loss
from tests.support.ranks import on_ranks
from torchpar import compiler, library, manual, mlp
from torchpar.measure.watch import Watch
from torchpar.measure.work import WorkSink
from torchpar.model import GPT
from torchpar.remat import apply_remat
from torchpar.weights import load_weights, to_arrays

SPEC = Model(n_layer=2, n_head=2, n_embd=8, block_size=6, vocab_size=11, bias=True, n_experts=4, balance=0.5)


def values(config: Model, *, ties: bool = False) -> dict[str, np.ndarray]:
    """Canonical weights of size about 0.3. With ties the router's are equal for experts after the first."""
    drawn, generator = (
        Experiment(model=config, precision=Precision(dtype="float64")),
        np.random.default_rng(0),
    )
    weights = {n: w + generator.normal(0, 0.3, w.shape) for n, w in initial_parameters(drawn).items()}
    for router in (w for name, w in weights.items() if ties and ".router." in name):
        router[:, 1:] = router[:, 1:2]
    return weights


def gradients(config: Model, weights, tokens, *, remat: str = "none", chunks: int = 1):
    """The loss, the gradients by canonical name, and how often each expert was chosen."""
    model = GPT(config, loss_chunks=chunks).double()
    load_weights(model, weights)
    apply_remat(model.blocks, remat)
    _, loss = model(*map(torch.from_numpy, tokens))
    loss.backward()
    named = {name: p.grad for name, p in model.named_parameters()}
    return loss.item(), to_arrays(named, config), model.balance.tokens_LE


@pytest.mark.parametrize(
    ("k", "activation", "ties"),
    [(1, "gelu", False), (2, "gelu_tanh", False), (3, "gelu", True), (4, "gelu", False)],
)
def test_experts_equal_numpy(k, activation, ties):
    """The loss, and by finite differences the largest gradient of each weight of the experts."""
    tokens = np.random.default_rng(1).integers(0, 11, (2, 3, 6))
    config = replace(SPEC, experts_per_token=k, activation=activation)
    weights = values(config, ties=ties)
    loss, found, counts = gradients(config, weights, tokens)
    assert loss == pytest.approx(numpy_loss(config, weights, *tokens), rel=1e-13)
    assert counts.sum(1).tolist() == [18 * k] * 2
    if ties:  # of equal logits the first are chosen: the second expert always, the fourth last
        assert (counts[:, 1] == 18).all()
        return
    for name in (f"blocks.{layer}.mlp.{of}.weight" for layer in (0, 1) for of in ("router", "up", "down")):
        place, nudged_losses = np.unravel_index(np.abs(found[name]).argmax(), found[name].shape), []
        for step in (1e-5, -1e-5):
            nudged = {**weights, name: weights[name].copy()}
            nudged[name][place] += step
            nudged_losses.append(numpy_loss(config, nudged, *tokens))
        slope = (nudged_losses[0] - nudged_losses[1]) / 2e-5
        assert found[name][place] == pytest.approx(slope, rel=1e-6), name


def test_experts_recomputed_or_in_chunks():
    weights, tokens = values(SPEC), np.random.default_rng(1).integers(0, 11, (2, 3, 6))
    loss, expected, _ = gradients(SPEC, weights, tokens)
    for options in ({"remat": "full"}, {"remat": "dots"}, {"chunks": 3}):
        again, found, _ = gradients(SPEC, weights, tokens, **options)
        assert again == pytest.approx(loss, rel=1e-14), options
        for name, gradient in expected.items():
            np.testing.assert_allclose(
                found[name], gradient, rtol=1e-12, atol=1e-14, err_msg=f"{options} {name}"
            )


LAYOUTS = {
    "ddp": Layout(dp_replicate=4),
    "hsdp": Layout(dp_replicate=2, dp_shard=2, zero=3),
    "tp": Layout(dp_replicate=2, tp=2),
    "tp_sp": Layout(dp_shard=2, zero=3, tp=2, sequence_parallel=True, remat="full"),
    "ep": Layout(dp_shard=4, ep=4),
    "fsdp_ep": Layout(dp_shard=4, zero=3, ep=4, remat="full"),
    "fsdp_ep_half": Layout(dp_shard=4, zero=3, ep=2),
    "zero1_ep": Layout(dp_replicate=2, dp_shard=2, zero=1, ep=2),
    "ep_tp": Layout(dp_shard=2, ep=2, tp=2),
}
ENGINES = {"manual": manual, "library": library, "compiler": compiler}


def is_supported(engine: str, name: str) -> bool:
    return not registry.ENGINES[f"torch-{engine}"].why_not(LAYOUTS[name])


CASES = [(engine, name) for engine in ENGINES for name in LAYOUTS if is_supported(engine, name)]


@pytest.mark.parametrize(("engine", "name"), CASES)
@on_ranks
def test_experts_on_ranks(rank: int, engine: str, name: str) -> None:
    """Gradients equal the gradients of one device. The load-balance loss needs the choices of all ranks."""
    config, layout = replace(CONFIG, n_experts=4, balance=0.5), LAYOUTS[name]
    experiment = replace(ADAM, model=config)
    whole = make_gpt(config)
    for inputs, targets in zip(*batches(0), strict=True):
        (whole(inputs, targets)[1] / 2).backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    model = make_gpt(config)
    parallel, mesh = make_parallel(ENGINES[engine].make_engine, layout, rank, experiment, model)
    data, router = mesh.joined(*DATA), "transformer.h.0.mlp.router.weight"
    if name == "ddp":  # with the choices of this rank only
        backward(parallel, mesh, 0, layout)
        wrong = parallel.gather(parallel.gradients())[router]
        assert (wrong - expected[router]).abs().max() > 1e-6
        parallel.optimizer.zero_grad(set_to_none=True)
    model.balance.total_counts = lambda counts: (data.all_reduce(counts), counts)[1]
    backward(parallel, mesh, 0, layout)
    found = {"gradients": parallel.gather(parallel.gradients())}
    assert_same(found, {"gradients": expected}, name)


def test_grouped_experts_equal_single_products():
    """In bfloat16 as on a GPU: one product of all experts, also if an expert has no row, or no one waits."""
    config, found = replace(SPEC, n_embd=16), list[list[torch.Tensor]]()
    weights = {name: weight.astype("float32") for name, weight in values(config, ties=True).items()}
    for is_grouped in (False, True):
        model, sink = GPT(config), WorkSink(nn.Module())
        load_weights(model, weights)
        apply_remat(model.blocks, "dots")
        no_waits = patch.object(torch.Tensor, "tolist", side_effect=AssertionError)
        with (
            patch.object(mlp, "can_group", lambda *_, said=is_grouped: said),
            no_waits if is_grouped else nullcontext(),
            Watch(sink),
            torch.autocast("cpu", dtype=torch.bfloat16),
        ):
            _, loss = model(*(torch.arange(24) % 11).view(2, 2, 6))
            loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
        assert sink.result().products["bfloat16"] > 0
        assert not sink.result().again.get("products")
    for single, grouped in zip(*found, strict=True):
        # bfloat16 has 8 bits, 4e-3, and a few roundings add up.
        torch.testing.assert_close(grouped, single, rtol=2e-2, atol=2e-2 * single.abs().max().item())


def test_rows_are_sent_in_product_dtype():
    """Rows and their gradients have 16 bits, while the stream has 32."""
    model, dtypes = GPT(SPEC), set()
    load_weights(model, {name: weight.astype("float32") for name, weight in values(SPEC).items()})

    def exchange(compute, rows_SC, counts_E):
        rows_SC.register_hook(lambda gradient: dtypes.add(gradient.dtype))
        y_SC = compute(rows_SC, counts_E)
        dtypes.update((rows_SC.dtype, y_SC.dtype))
        return y_SC

    for block in model.blocks:
        block.mlp.core.exchange.forward = exchange
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, loss = model(*(torch.arange(24) % 11).view(2, 2, 6))
    loss.backward()
    assert dtypes == {torch.bfloat16}


def test_gpt2_rejects_experts():
    with pytest.raises(ExperimentError, match=r"model.n_experts = 4: GPT-2 has no such option"):
        from_gpt2({}, SPEC, "a file")
