"""torchpar's model on one device: names and shapes, recomputation, the norm, and options of the model."""

from functools import partial

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.nn import functional as F

from compare.formats.gpt2_names import gpt2_shape
from compare.numerics.parameters import initial_parameters, parameter_table
from compare.spec.experiment import Experiment, Model
from torchpar.dropout import Dropout
from torchpar.model import GPT
from torchpar.optimizer import ROW, norm_of_all
from torchpar.remat import apply_remat
from torchpar.weights import load_weights, nanogpt_name, to_arrays

SIZES = Model(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=61, bias=True)


def gpt(sizes: Model = SIZES) -> GPT:
    model = GPT(sizes).double()
    load_weights(model, initial_parameters(Experiment(model=sizes)))
    return model


def tokens(sizes: Model = SIZES, batch: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    both = torch.randint(sizes.vocab_size, (2, batch, sizes.block_size), generator=draw)
    return both[0], both[1]


NANOGPT = """
ln_1.weight 32, ln_1.bias 32, attn.c_attn.weight 96 32, attn.c_attn.bias 96, attn.c_proj.weight 32 32,
attn.c_proj.bias 32, ln_2.weight 32, ln_2.bias 32, mlp.c_fc.weight 128 32, mlp.c_fc.bias 128,
mlp.c_proj.weight 32 128, mlp.c_proj.bias 32"""
"""Names and shapes of the parameters of a block."""


def test_names_and_shapes_are_nanogpts():
    expected: dict[str, tuple[int, ...]] = {"wte.weight": (61, 32), "wpe.weight": (16, 32)}
    for layer in range(2):
        for name, *shape in (item.split() for item in NANOGPT.split(",")):
            expected[f"h.{layer}.{name}"] = tuple(map(int, shape))
    expected |= {"ln_f.weight": (32,), "ln_f.bias": (32,)}
    expected = {f"transformer.{name}": shape for name, shape in expected.items()}
    model = GPT(SIZES)
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert state == {**expected, "lm_head.weight": (61, 32)}
    rows = {nanogpt_name(row.name): row for row in parameter_table(SIZES)}
    assert {name: gpt2_shape(row, is_linear=True) for name, row in rows.items()} == expected
    assert list(rows) == [name for name, _ in model.named_parameters()]  # nanoGPT's optimizer counts so
    assert model.lm_head.weight is model.get_parameter("transformer.wte.weight")


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_recomputation_keeps_gradients_and_names(remat):
    plain, again = gpt(), gpt()
    runs = {"plain": 0, "again": 0}
    for key, model in (("plain", plain), ("again", again)):

        def count(*_, key=key):
            runs[key] += 1
            for _ in range(runs[key]):  # the second run has one more mark, as with FSDP2
                with torch.profiler.record_function("mark"):
                    pass

        model.blocks[0].mlp.register_forward_pre_hook(count)
    apply_remat(again.blocks, remat)
    assert list(plain.state_dict()) == list(again.state_dict())
    for model in (plain, again):
        model(*tokens())[1].backward()
    assert runs == {"plain": 1, "again": 2}  # the block really ran again
    for (name, parameter), other in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name


def test_norm_is_accurate_in_float32():
    """PyTorch's own norm of a large float32 tensor is off by 7e-5."""
    random, large = np.random.default_rng(0), 3_500_000
    for sizes in ((large,), (large, 7, ROW, ROW + 1), (0, 5), (1,)):
        arrays = [random.standard_normal(size, np.float32) for size in sizes]
        exact = np.sqrt(sum(np.sum(np.square(array, dtype=np.float64)) for array in arrays))
        norm = norm_of_all([torch.from_numpy(array) for array in arrays])
        assert abs(norm.item() / exact - 1) < 5e-7
    for bad in (float("inf"), float("nan")):
        spoiled = torch.ones(ROW + 3)
        spoiled[-1] = bad
        assert not norm_of_all([torch.ones(2), spoiled]).isfinite()


def loss_in_pytorch(sizes: Model, weights: dict[str, torch.Tensor], *batch: torch.Tensor) -> torch.Tensor:
    """The loss of nanochat's options, from canonical weights, in PyTorch's own functions."""
    group, (ids, targets) = sizes.n_head // sizes.n_kv_head, batch
    norm = partial(F.rms_norm, normalized_shape=(sizes.n_embd,), eps=sizes.norm_eps)
    pairs = sizes.n_embd // sizes.n_head // 2
    angle = np.outer(np.arange(sizes.block_size), sizes.rope_base ** -(np.arange(pairs) / pairs))
    cos, sin = (torch.tensor(np.tile(f(angle), 2)) for f in (np.cos, np.sin))
    turn = lambda x: x * cos + torch.cat([-x[..., pairs:], x[..., :pairs]], -1) * sin  # noqa: E731
    x = weights["embedding.token"][ids]
    for layer in range(sizes.n_layer):
        w = {name.removeprefix(f"blocks.{layer}."): tensor for name, tensor in weights.items()}
        qkv = torch.einsum("btc,ckgd->bkgtd", norm(x, weight=w["norm1.scale"]), w["attention.qkv.weight"])
        qkv = qkv + w["attention.qkv.bias"][:, :, None]
        q, k, v = qkv[:, :, :group].flatten(1, 2), qkv[:, :, group], qkv[:, :, group + 1]
        y = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True, enable_gqa=True)
        y = torch.einsum("bhtd,hdc->btc", y, w["attention.out.weight"])
        x = x + y + w["attention.out.bias"]
        up = norm(x, weight=w["norm2.scale"]) @ w["mlp.up.weight"] + w["mlp.up.bias"]
        x = x + up.clamp(min=0) ** 2 @ w["mlp.down.weight"] + w["mlp.down.bias"]
    logits = norm(x, weight=weights["norm.scale"]) @ weights["embedding.token"].T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_model_options_equal_pytorch():
    """RoPE, grouped queries, RMSNorm and squared ReLU: the loss and every gradient."""
    sizes = replace(SIZES, activation="relu_squared", norm="rmsnorm", n_kv_head=2, position="rope")
    random = np.random.default_rng(0)
    arrays = {row.name: random.normal(0, 0.3, row.shape) for row in parameter_table(sizes)}
    model, weights = GPT(sizes).double(), {name: torch.tensor(w) for name, w in arrays.items()}
    load_weights(model, arrays)
    leaves = {name: w.requires_grad_() for name, w in weights.items()}
    expected = loss_in_pytorch(sizes, leaves, *tokens())
    expected.backward()
    _, loss = model(*tokens())
    loss.backward()
    assert abs(loss.item() / expected.item() - 1) < 1e-14
    found = to_arrays({name: p.grad for name, p in model.named_parameters()}, sizes)
    for name, leaf in leaves.items():
        assert np.abs(found[name] - leaf.grad.numpy()).max() < 1e-13 * leaf.grad.abs().max(), name
    keys = torch.zeros(3, 2, dtype=torch.int32)
    for module in model.modules():
        if isinstance(module, Dropout):
            module.rate = 0.0  # explicit attention weights, without the fused kernel
    assert abs(model(*tokens(), keys)[1].item() / expected.item() - 1) < 1e-14
