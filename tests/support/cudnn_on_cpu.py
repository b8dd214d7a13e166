"""cuDNN's attention without a GPU: its primitives get a lowering for CPUs, of the same numbers in 16 bits.

JAX traces as it does for a GPU: abstract evaluation, types, batching, partitioning, the derivative. Only
the kernel is another.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import mlir

fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")


def lower_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `jax.nn.dot_product_attention(implementation="cudnn")` run on a CPU, until the process ends."""
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91002)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(fused, "is_cuda_compute_capability_equal", lambda capability: False)
    for primitive, compute in (
        (fused._dot_product_attention_fwd_p, forward),
        (fused._dot_product_attention_bwd_p, backward),
    ):
        mlir.register_lowering(primitive, mlir.lower_fun(compute, multiple_results=True), platform="cpu")


def weights(q_BTND: jax.Array, k_BSKD: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """Causal weights (B, N, T, S), and the logarithm of the sum of exponentials (B, N, T)."""
    k_BSND = jnp.repeat(k_BSKD, q_BTND.shape[2] // k_BSKD.shape[2], 2)
    scores = jnp.einsum("BTND,BSND->BNTS", q_BTND, k_BSND, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, -1)
    return jnp.exp(scores - lse[..., None]), lse


def forward(q: Any, k: Any, v: Any, *_: Any, scale: float, is_training: bool, **__: Any) -> Any:
    w, lse = weights(q, k, scale)
    y = jnp.einsum("BNTS,BSND->BTND", w.astype(v.dtype), jnp.repeat(v, q.shape[2] // v.shape[2], 2))
    return (y, lse) if is_training else (y,)


def backward(q: Any, k: Any, v: Any, *others: Any, scale: float, **_: Any) -> Any:
    *_, y, g = others
    group, (w, _) = q.shape[2] // k.shape[2], weights(q, k, scale)
    dw = jnp.einsum("BTND,BSND->BNTS", g, jnp.repeat(v, group, 2), preferred_element_type=jnp.float32)
    dot = (g.astype(jnp.float32) * y.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    ds = (w * (dw - dot[..., None]) * scale).astype(q.dtype)

    def of_keys(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3)

    dq = jnp.einsum("BNTS,BSND->BTND", ds, jnp.repeat(k, group, 2))
    dk = jnp.einsum("BNTS,BTND->BSND", ds, q)
    return dq, of_keys(dk), of_keys(jnp.einsum("BNTS,BTND->BSND", w.astype(g.dtype), g))
