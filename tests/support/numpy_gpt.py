"""nanoGPT's forward pass in plain NumPy, from canonical parameters, with or without experts."""

from collections.abc import Mapping

import numpy as np
from scipy.special import erf

from compare.spec.experiment import Model


def numpy_loss(
    model: Model,
    w: Mapping[str, np.ndarray],
    inputs: np.ndarray,
    targets: np.ndarray,
    seen: dict[str, np.ndarray] | None = None,
) -> float:
    """Mean cross-entropy of tokens (B, T), with every option of the model. With experts their load-balance
    loss is added: each expert computes every token, and weighs 0 where it is not chosen. `seen` gets the
    outputs (B, T, ..) of the places of a trace (`compare.contract.trace`)."""
    group = model.n_head // (model.n_kv_head or model.n_head)

    def see(name: str, x: np.ndarray) -> np.ndarray:
        if seen is not None:
            seen[name] = x
        return x

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        if model.norm == "layernorm":
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + model.norm_eps)
        return see(name, x * w[f"{name}.scale"] + w.get(f"{name}.bias", 0))

    def activation(x: np.ndarray) -> np.ndarray:
        if model.activation == "relu_squared":
            return np.maximum(x, 0) ** 2
        if model.activation == "gelu":
            return x * (1 + erf(x / np.sqrt(2))) / 2
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def as_three(w: np.ndarray) -> np.ndarray:
        """(.., K, G + 2, D) -> (.., 3, H, D), keys and values again for each head of their group."""
        if group == 1:
            return w
        each = [w[..., :group, :], *(w[..., [i] * group, :] for i in (group, group + 1))]
        return np.stack([part.reshape(*w.shape[:-3], -1, w.shape[-1]) for part in each], axis=-3)

    def softmax(x: np.ndarray) -> np.ndarray:
        return np.exp(x) / np.exp(x).sum(-1, keepdims=True)

    def experts(x: np.ndarray, at: str) -> tuple[np.ndarray, float]:
        """The outputs (B, T, C), and the load-balance loss of the layer."""
        router, up, down = (w[f"{at}.mlp.{name}.weight"] for name in ("router", "up", "down"))
        logits, k = x @ router, model.experts_per_token
        place = np.argsort(np.argsort(-logits, -1, kind="stable"), -1)  # of equal logits the first is first
        is_chosen = place < k
        weights = see(f"{at}.mlp.router", softmax(np.where(is_chosen, logits, -np.inf)))
        outputs = [activation(x @ up[e]) @ down[e] * weights[..., e, None] for e in range(model.n_experts)]
        shares, probabilities = is_chosen.mean((0, 1)) / k, softmax(logits).mean((0, 1))
        return see(f"{at}.mlp.experts", sum(outputs)), model.balance * model.n_experts * float(
            shares @ probabilities
        )

    def turn(x: np.ndarray) -> np.ndarray:
        """RoPE of (.., t, d), in complex numbers."""
        half = x.shape[-1] // 2
        if model.position == "learned":
            return x
        angle = np.arange(length)[:, None] / model.rope_base ** (np.arange(half) / half)
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    length, balance = inputs.shape[1], 0.0
    x = w["embedding.token"][inputs]
    if model.position == "learned":
        x = x + w["embedding.position"][:length]
    see("embedding", x)
    for at in (f"blocks.{layer}" for layer in range(model.n_layer)):
        qkv = np.einsum("btc,c...->bt...", norm(x, f"{at}.norm1"), w[f"{at}.attention.qkv.weight"])
        qkv = see(f"{at}.attention.qkv", qkv + w.get(f"{at}.attention.qkv.bias", 0))
        qkv = as_three(qkv).transpose(2, 0, 3, 1, 4)
        scores = np.einsum("bhtd,bhsd->bhts", turn(qkv[0]), turn(qkv[1])) / np.sqrt(
            model.n_embd // model.n_head
        )
        scores = np.exp(np.where(np.tri(length, dtype=bool), scores, -np.inf))
        mixed = np.einsum("bhts,bhsd->bthd", scores / scores.sum(-1, keepdims=True), qkv[2])
        see(f"{at}.attention.core", mixed)
        out = np.einsum("bthd,hdc->btc", mixed, w[f"{at}.attention.out.weight"])
        x = x + see(f"{at}.attention.out", out + w.get(f"{at}.attention.out.bias", 0))
        if model.n_experts:
            added, of_layer = experts(norm(x, f"{at}.norm2"), at)
            x, balance = see(f"{at}.residual", x + added), balance + of_layer
            continue
        up = norm(x, f"{at}.norm2") @ w[f"{at}.mlp.up.weight"] + w.get(f"{at}.mlp.up.bias", 0)
        down = activation(see(f"{at}.mlp.up", up)) @ w[f"{at}.mlp.down.weight"]
        x = x + see(f"{at}.mlp.down", down + w.get(f"{at}.mlp.down.bias", 0))
        see(f"{at}.residual", x)
    logits = norm(x, "norm") @ w["embedding.token"].T
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return balance - float(np.take_along_axis(log_probabilities, targets[..., None], -1).mean())
