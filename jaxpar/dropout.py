"""Dropout by counters, as `compare.numerics.dropout` defines it: elementwise, so that it is split as x is.

Legend: B sequences, 2 the words of a key, R rows, N the last dim, G groups of four in it.
"""

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
from jaxpar.hooks import Indices


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

    def __init__(
        self, rate: float, site: DropoutSite, *, positions: Indices = jnp.arange, heads: Indices = jnp.arange
    ):
        self.rate, self.site, self.heads, self.positions = rate, site, heads, positions

    def __call__(self, x: jax.Array, noise: Noise | None) -> jax.Array:
        """x (B, ..., N) with some elements dropped and the others scaled."""
        return x if noise is None else x * self.factor(x.shape[1:], noise, dtype=x.dtype)

    def factor(self, shape: tuple[int, ...], noise: Noise, *, dtype: Any) -> jax.Array:
        """Factor of x (B, *shape), (T, C) or (H, T, S): 0, or one over the share that is kept."""
        *heads, length, last = shape
        rows = jnp.asarray(self.positions(length))
        if heads:  # S is all positions
            rows = jnp.asarray(self.heads(*heads))[:, None] * last + rows
        site = site_number(noise.layer, self.site)
        stays = is_kept(noise.keys_B2, site, shape, rate=self.rate, rows=rows)
        return jnp.where(stays, jnp.asarray(kept_scale(self.rate), dtype), jnp.zeros((), dtype))


def is_kept(
    keys_B2: jax.Array, site: jax.Array | int, shape: tuple[int, ...], *, rate: float, rows: jax.Array
) -> jax.Array:
    """Mask of the elements that stay: bool (B, *shape). `rows` (shape[:-1]) are the numbers of x's rows."""
    groups = -(-shape[-1] // LANES)
    counter = rows.astype(jnp.uint32)[..., None] * jnp.uint32(groups) + jnp.arange(groups, dtype=jnp.uint32)
    keys = keys_B2.reshape(-1, 2, *[1] * len(shape))
    words = threefry((keys[:, 0], keys[:, 1]), jnp.uint32(site), counter[None])
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
