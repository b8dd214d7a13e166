"""nanoGPT's forward pass in so many words of NumPy, from canonical parameters."""

from collections.abc import Mapping

import numpy as np
from scipy.special import erf

from compare.spec.experiment import Model


def numpy_loss(model: Model, w: Mapping[str, np.ndarray], inputs: np.ndarray, targets: np.ndarray) -> float:
    """Mean cross-entropy of tokens (B, T); without biases as well, and with either GELU."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + model.norm_eps)
        return x * w[f"{name}.scale"] + w.get(f"{name}.bias", 0)

    def gelu(x: np.ndarray) -> np.ndarray:
        if model.activation == "gelu":
            return x * (1 + erf(x / np.sqrt(2))) / 2
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    length = inputs.shape[1]
    x = w["embedding.token"][inputs] + w["embedding.position"][:length]
    for at in (f"blocks.{layer}" for layer in range(model.n_layer)):
        qkv = np.einsum("btc,cihd->ibhtd", norm(x, f"{at}.norm1"), w[f"{at}.attention.qkv.weight"])
        if model.bias:
            qkv = qkv + w[f"{at}.attention.qkv.bias"][:, None, :, None]
        scores = np.einsum("bhtd,bhsd->bhts", qkv[0], qkv[1]) / np.sqrt(model.n_embd // model.n_head)
        scores = np.exp(np.where(np.tri(length, dtype=bool), scores, -np.inf))
        mixed = np.einsum("bhts,bhsd->bthd", scores / scores.sum(-1, keepdims=True), qkv[2])
        x = x + np.einsum("bthd,hdc->btc", mixed, w[f"{at}.attention.out.weight"])
        x = x + w.get(f"{at}.attention.out.bias", 0)
        up = norm(x, f"{at}.norm2") @ w[f"{at}.mlp.up.weight"] + w.get(f"{at}.mlp.up.bias", 0)
        x = x + gelu(up) @ w[f"{at}.mlp.down.weight"] + w.get(f"{at}.mlp.down.bias", 0)
    logits = norm(x, "norm") @ w["embedding.token"].T
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -float(np.take_along_axis(log_probabilities, targets[..., None], -1).mean())
