"""Sampling of text, in NumPy, so that both frameworks draw the same tokens from the same weights.

A side computes the logits of the last position. Temperature, top-k and the draw follow here, in float64. The
uniform number of a token is a function of the seed, the sample and the token's place. The texts differ
only if rounding moves the border of two tokens across a uniform number.
"""

from collections.abc import Callable
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from compare.spec.experiment import ExperimentError

MAX_TOKENS, MAX_SAMPLES = 1_000_000, 1_000
Logits = Callable[[np.ndarray], np.ndarray]
"""Token ids (N, t), t at most T, int32 -> logits of the last position (N, V), of any float dtype."""


class SampleRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for samples of a checkpoint's model."""

    checkpoint: str
    """Folder of the checkpoint, an absolute path."""
    prompt: list[int]
    """First token ids, one or more."""
    samples: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] = 1
    tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 200
    """Tokens of each sample, without the prompt."""
    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 0.8
    """Divisor of the logits; 0 takes the likeliest token every time."""
    top_k: Annotated[int, Meta(ge=0)] = 200
    """Number of the likeliest tokens to draw from; 0 for all."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 1337


def generate(request: SampleRequest, logits_of: Logits, *, block_size: int) -> list[list[int]]:
    """Draw every sample, token by token. Returns token ids, each sample after its prompt.

    The model reads the last `block_size` tokens, T.
    """
    drawn = np.tile(np.array(request.prompt, np.int32), (request.samples, 1))
    for place in range(request.tokens):
        logits_NV = np.asarray(logits_of(drawn[:, -block_size:]), np.float64)
        if not np.isfinite(logits_NV.max(axis=1)).all():
            raise ExperimentError(f"{request.checkpoint}: its weights give logits that are not numbers")
        uniform_N = uniform(request.seed, place, request.samples)
        drawn = np.concatenate([drawn, next_tokens(logits_NV, uniform_N, request)[:, None]], axis=1)
    return drawn.tolist()


def next_tokens(logits_NV: np.ndarray, uniform_N: np.ndarray, request: SampleRequest) -> np.ndarray:
    """The next token of each sample, int32 (N,): its share of [0, 1) contains the uniform number."""
    if not request.temperature:
        return logits_NV.argmax(axis=1).astype(np.int32)
    # Subtract the maximum first: a small temperature could otherwise overflow.
    with np.errstate(over="ignore"):
        scaled_NV = (logits_NV - logits_NV.max(axis=1, keepdims=True)) / request.temperature
    if 0 < request.top_k < logits_NV.shape[1]:
        least_N1 = np.partition(scaled_NV, -request.top_k, axis=1)[:, -request.top_k, None]
        scaled_NV = np.where(scaled_NV < least_N1, -np.inf, scaled_NV)
    share_NV = np.exp(scaled_NV)
    ends_NV = share_NV.cumsum(axis=1)
    found_N = (ends_NV <= uniform_N[:, None] * ends_NV[:, -1:]).sum(axis=1)
    return np.minimum(found_N, logits_NV.shape[1] - 1).astype(np.int32)


def uniform(seed: int, place: int, samples: int) -> np.ndarray:
    """Uniform numbers in [0, 1) for one place of every sample, float64 (N,), of 53 random bits each."""
    words = np.random.Philox(key=seed, counter=[0, 0, place, 2]).random_raw(samples)
    return (words >> np.uint64(11)) * 2.0**-53
