"""Dropout: Threefry's published numbers, and equal masks in NumPy, JAX and PyTorch."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from compare.numerics.context import order_of_positions
from compare.numerics.dropout import (
    BITS,
    DropoutSite,
    kept_scale,
    sequence_keys,
    site_number,
    threefry,
    threshold,
)
from compare.numerics.stream import keys_of_step
from compare.spec.checks import LANES
from compare.spec.experiment import Experiment
from compare.spec.sections import Layout, Model, Train
from jaxpar import dropout as in_jax
from torchpar import dropout as in_torch
from torchpar.model import GPT
from torchpar.positions import dropouts, set_dropout_rows, set_local_positions

KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]
"""Key, counter and bits of the known-answer tests of Random123."""


def is_kept(keys_B2: np.ndarray, site: int, shape: tuple[int, ...], rate: float) -> np.ndarray:
    """NumPy's mask of the kept elements of whole sequences: bool (B, *shape)."""
    groups, rows = -(-shape[-1] // LANES), math.prod(shape[:-1])
    words = threefry(keys_B2.T[..., None], np.uint32(site), np.arange(rows * groups, dtype=np.uint32)[None])
    lanes = [half for word in words for half in (word & 0xFFFF, word >> BITS)]
    bits = np.stack(lanes, axis=-1).reshape(len(keys_B2), *shape[:-1], groups * LANES)
    return bits[..., : shape[-1]] >= threshold(rate)


def signed(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(words.view(np.int32))


@pytest.mark.parametrize(("key", "counter", "bits"), KNOWN)
def test_threefry_published_numbers(key, counter, bits):
    key, counter = ([np.array([word], np.uint32) for word in words] for words in (key, counter))
    assert tuple(int(word[0]) for word in threefry(key, *counter)) == bits
    of_jax = in_jax.threefry(tuple(map(jnp.asarray, key)), *map(jnp.asarray, counter))
    assert tuple(int(word[0]) for word in of_jax) == bits
    of_torch = in_torch.threefry(tuple(map(signed, key)), *map(signed, counter))
    assert tuple(int(word[0]) % 2**32 for word in of_torch) == bits


def test_keys_differ_by_sequence_and_step():
    """A key is Threefry of the seed's two words and of (step, sequence of the step)."""
    seed = 2**32 + 5
    train = Train(seed=seed, batch_size=3, gradient_accumulation_steps=2)
    experiment = Experiment(model=Model(dropout=0.1), train=train)
    drawn = {step: keys_of_step(experiment, step)["keys"] for step in (0, 1, 7)}
    seen = {tuple(key) for keys_AB2 in drawn.values() for key in keys_AB2.reshape(-1, 2).tolist()}
    assert len(seen) == 3 * 6
    for step, keys_AB2 in drawn.items():
        counter = jnp.full(6, step, jnp.uint32), jnp.arange(6, dtype=jnp.uint32)
        expected = in_jax.threefry((jnp.uint32(5), jnp.uint32(1)), *counter)
        np.testing.assert_array_equal(keys_AB2.reshape(-1, 2), np.stack(expected, axis=-1))
    np.testing.assert_array_equal(drawn[0].reshape(-1, 2)[0], sequence_keys(seed, 0, 1, 1)[0, 0])


@pytest.mark.parametrize(("shape", "rate"), [((3, 8), 0.2), ((2, 5, 5), 0.5), ((1, 7), 0.2)])
def test_masks_are_equal_in_all_frameworks(shape, rate):
    keys, site = sequence_keys(2**40 + 7, 5, 2, 3)[1], site_number(3, DropoutSite.MLP_OUT)
    kept = is_kept(keys, site, shape, rate)
    assert kept.shape == (3, *shape)
    x = np.random.default_rng(0).standard_normal((3, *shape)).astype(np.float32)
    expected = np.where(kept, x * np.float32(kept_scale(rate)), 0)
    of_torch = in_torch.Dropout(rate, DropoutSite.MLP_OUT, 3)(torch.from_numpy(x), signed(keys))
    np.testing.assert_array_equal(of_torch.numpy(), expected)
    noise = in_jax.Noise.of(jnp.asarray(keys), 2).next_layer
    of_jax = in_jax.Dropout(rate, DropoutSite.MLP_OUT)(jnp.asarray(x), noise)
    np.testing.assert_array_equal(np.asarray(of_jax), expected)
    assert in_jax.Dropout(rate, DropoutSite.MLP_OUT)(x, None) is x
    assert in_torch.Dropout(rate, DropoutSite.MLP_OUT, 3)(x) is x


def test_mask_of_some_rows():
    keys, site = sequence_keys(1, 2, 1, 2)[0], site_number(1, DropoutSite.ATTENTION_OUT)
    whole = is_kept(keys, site, (6, 10), 0.3)
    part = in_torch.is_kept(signed(keys), site, (2, 10), rate=0.3, row_R=torch.tensor([4, 5]))
    np.testing.assert_array_equal(part.numpy(), whole[:, 4:])
    part = in_jax.is_kept(jnp.asarray(keys), site, (2, 10), rate=0.3, rows=jnp.arange(4, 6))
    np.testing.assert_array_equal(np.asarray(part), whole[:, 4:])
    np.testing.assert_array_equal(is_kept(keys[1:], site, (6, 10), 0.3), whole[1:])


def test_dropout_rows_of_tp():
    model = Model(n_layer=2, n_head=2, n_embd=8, block_size=8, vocab_size=16, dropout=0.5)
    gpt = GPT(model)
    for sequence_parallel, sites in ((False, {DropoutSite.ATTENTION}), (True, set(DropoutSite))):
        set_dropout_rows(gpt, 1, sequence_parallel=sequence_parallel)
        drops = dropouts(gpt)
        assert len(drops) == 1 + 3 * model.n_layer
        assert len({drop.number for drop in drops}) == len(drops)
        assert {drop.site for drop in drops if drop.rank == 1} == sites


def test_dropout_rows_of_cp():
    """With tp inside of cp: heads of attention weights (H, T, S), positions of the stream (T, C)."""
    model = Model(n_layer=1, n_head=4, n_embd=6, block_size=8, vocab_size=16, dropout=0.5)
    keys = sequence_keys(1, 2, 1, 2)[0]
    for layout in (Layout(cp=2, tp=2, zigzag=True), Layout(cp=2, tp=2, context="ulysses")):
        is_ulysses, gpt = layout.context == "ulysses", GPT(model)
        for cp, tp in itertools.product(range(2), range(2)):
            own = order_of_positions(8, layout).reshape(2, -1)[cp]
            set_local_positions(gpt, layout, rank=cp, device=torch.device("cpu"))
            set_dropout_rows(gpt, tp, sequence_parallel=True)
            for drop in dropouts(gpt):
                if drop.site == DropoutSite.ATTENTION:
                    kept = is_kept(keys, drop.number, (4, 8, 8), 0.5)[:, 2 * tp : 2 * tp + 2]
                    kept = kept[:, [cp]] if is_ulysses else kept[:, :, own]
                else:
                    kept = is_kept(keys, drop.number, (8, 6), 0.5)[:, own[2 * tp : 2 * tp + 2]]
                got = drop(torch.ones(kept.shape), signed(keys)) != 0
                np.testing.assert_array_equal(got.numpy(), kept)


def test_mask_rate_and_independence():
    numbers = {site_number(layer, site) for layer in range(5) for site in DropoutSite}
    assert len(numbers) == 5 * len(DropoutSite)
    kept = is_kept(sequence_keys(0, 0, 1, 50)[0], 0, (100, 64), 0.2)
    assert abs(kept.mean() - (1 - threshold(0.2) / 2**16)) < 2e-3
    assert abs(np.corrcoef(kept[:-1].ravel(), kept[1:].ravel())[0, 1]) < 5e-3
    assert abs(np.corrcoef(kept[..., :-1].ravel(), kept[..., 1:].ravel())[0, 1]) < 5e-3
    assert kept_scale(0.5) == 2.0
