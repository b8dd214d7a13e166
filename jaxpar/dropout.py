"""Dropout by counters, as `compare.numerics.dropout` defines it: elementwise, so that it is split as x is.

Legend: B sequences, 2 the words of a key, R rows, N the last dim, G groups of four in it.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from compare.numerics.dropout import (
    BITS,
    OUTSIDE,
    PARITY,
    ROTATIONS,
    ROUNDS,
    DropoutSite,
    kept_scale,
    site_number,
    threshold,
)
from compare.spec.checks import LANES

Part = Callable[[], ArrayLike]
"""Number of this device's part, of the equal parts of x's rows."""


class Noise(NamedTuple):
    """Source of dropout in a layer: keys of the sequences, uint32 (B, 2), and the layer's number from 1."""

    keys_B2: jax.Array
    layer: jax.Array

    @classmethod
    def of(cls, keys_B2: jax.Array | None, layer: ArrayLike = OUTSIDE) -> "Noise | None":
        """The noise in a layer, or `OUTSIDE` of all; None without keys."""
        return None if keys_B2 is None else cls(keys_B2, jnp.asarray(layer).astype(jnp.uint32))

    @property
    def next_layer(self) -> "Noise":
        """The noise of the following layer."""
        return self._replace(layer=self.layer + jnp.uint32(1))


class Dropout(nnx.Module):
    """Dropout at one site of the model, or of each layer."""

    def __init__(self, rate: float, site: DropoutSite):
        self.rate, self.site = rate, site
        self.part: Part = int  # 0, all rows; tensor parallelism by hand puts another there: `split_rows`

    def __call__(self, x: jax.Array, noise: Noise | None) -> jax.Array:
        """x (B, ..., N) with some elements dropped and the others scaled."""
        return x if noise is None else x * self.factor(x.shape[1:], noise, dtype=x.dtype)

    def factor(self, shape: tuple[int, ...], noise: Noise, *, dtype: Any) -> jax.Array:
        """Factor of x (B, *shape): 0, or one over the share that is kept."""
        first_row = jnp.asarray(self.part()).astype(jnp.uint32) * jnp.uint32(math.prod(shape[:-1]))
        site = site_number(noise.layer, self.site)
        stays = is_kept(noise.keys_B2, site, shape, rate=self.rate, first_row=first_row)
        return jnp.where(stays, jnp.asarray(kept_scale(self.rate), dtype), jnp.zeros((), dtype))


def split_rows(model: Any, part: Part, *, sequence_parallel: bool) -> None:
    """Say which rows are a device's: of some of the heads, or of the positions."""
    for _, module in nnx.iter_graph(model):
        if isinstance(module, Dropout) and (module.site == DropoutSite.ATTENTION or sequence_parallel):
            module.part = part


def is_kept(
    keys_B2: jax.Array,
    site: jax.Array | int,
    shape: tuple[int, ...],
    *,
    rate: float,
    first_row: jax.Array | int = 0,
) -> jax.Array:
    """Mask of the elements that stay: bool (B, *shape). Rows, from `first_row`, are all dims but the last."""
    groups, rows = -(-shape[-1] // LANES), math.prod(shape[:-1])
    row_R1 = (jnp.arange(rows, dtype=jnp.uint32) + jnp.uint32(first_row))[:, None]
    counter_RG = row_R1 * jnp.uint32(groups) + jnp.arange(groups, dtype=jnp.uint32)
    counter = counter_RG.reshape(1, *shape[:-1], groups)
    keys = keys_B2.reshape(-1, 2, *[1] * len(shape))
    words = threefry((keys[:, 0], keys[:, 1]), jnp.uint32(site), counter)
    lanes = [half for word in words for half in (word & 0xFFFF, word >> BITS)]
    bits = jnp.stack(lanes, axis=-1).reshape(-1, *shape[:-1], groups * LANES)
    return bits[..., : shape[-1]] >= threshold(rate)


def threefry(
    key: tuple[jax.Array, jax.Array], first: jax.Array, second: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 of each pair of counter words: uint32 of any shapes, broadcast against each other."""
    keys = [*key, key[0] ^ key[1] ^ jnp.uint32(PARITY)]
    x, y = first + keys[0], second + keys[1]
    for block in range(ROUNDS // 4):
        for rotation in ROTATIONS[block % 2]:
            x = x + y
            y = (y << rotation) | (y >> (32 - rotation))
            y = y ^ x
        x = x + keys[(block + 1) % 3]
        y = y + keys[(block + 2) % 3] + jnp.uint32(block + 1)
    return x, y
