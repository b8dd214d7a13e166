"""nanoGPT's loss and its gradients in NumPy, written out by the chain rule.

B batch, T and S position, C embedding, H head, D head_dim, M mlp, V vocab; d_x is the gradient of x.
"""

import math

import numpy as np

erf = np.vectorize(math.erf)
EPS = 1e-5


def loss_and_gradients(w, ids_BT, targets_BT, *, layers):
    """Mean cross-entropy of (B, T) tokens, and its gradient for each of the weights by canonical name."""
    length = ids_BT.shape[1]
    x_BTC = w["embedding.token"][ids_BT] + w["embedding.position"][:length]
    tape = []  # backward of each part, last first
    for block in (f"blocks.{layer}." for layer in range(layers)):
        for norm, part in (("norm1", attention), ("norm2", mlp)):
            normed_BTC, norm_backward = layer_norm(w, block + norm, x_BTC)
            y_BTC, part_backward = part(w, block, normed_BTC)
            x_BTC = x_BTC + y_BTC
            tape.append((part_backward, norm_backward))
    out_BTC, norm_backward = layer_norm(w, "norm", x_BTC)
    logits_BTV = out_BTC @ w["embedding.token"].T
    loss, d_logits_BTV = cross_entropy(logits_BTV, targets_BT)

    g = {name: np.zeros_like(weight) for name, weight in w.items()}
    g["embedding.token"] += np.einsum("btv,btc->vc", d_logits_BTV, out_BTC)
    d_x_BTC = norm_backward(g, d_logits_BTV @ w["embedding.token"])
    for part_backward, norm_backward in reversed(tape):
        d_x_BTC = d_x_BTC + norm_backward(g, part_backward(g, d_x_BTC))
    np.add.at(g["embedding.token"], ids_BT, d_x_BTC)  # tied: used at both ends
    g["embedding.position"][:length] += d_x_BTC.sum(0)
    return loss, g


def layer_norm(w, name, x_BTC):
    """Normalised over C, scaled and shifted; and its backward."""
    centred_BTC = x_BTC - x_BTC.mean(-1, keepdims=True)
    rstd_BT1 = 1 / np.sqrt((centred_BTC**2).mean(-1, keepdims=True) + EPS)
    n_BTC = centred_BTC * rstd_BT1

    def backward(g, d_y_BTC):
        g[f"{name}.scale"] += (d_y_BTC * n_BTC).sum((0, 1))
        g[f"{name}.bias"] += d_y_BTC.sum((0, 1))
        d_n_BTC = d_y_BTC * w[f"{name}.scale"]
        mean_BT1 = d_n_BTC.mean(-1, keepdims=True)
        along_BT1 = (d_n_BTC * n_BTC).mean(-1, keepdims=True)
        return rstd_BT1 * (d_n_BTC - mean_BT1 - n_BTC * along_BT1)

    return n_BTC * w[f"{name}.scale"] + w[f"{name}.bias"], backward


def attention(w, block, x_BTC):
    """Causal self-attention; and its backward."""
    qkv, out = block + "attention.qkv", block + "attention.out"
    weight_C3HD, weight_HDC = w[f"{qkv}.weight"], w[f"{out}.weight"]
    q, k, v = np.einsum("btc,cihd->ibhtd", x_BTC, weight_C3HD) + w[f"{qkv}.bias"][:, None, :, None]
    scale, length = 1 / math.sqrt(q.shape[-1]), x_BTC.shape[1]
    logits_BHTS = np.einsum("bhtd,bhsd->bhts", q, k) * scale
    logits_BHTS[..., np.triu(np.ones((length, length), bool), 1)] = -np.inf
    p_BHTS = np.exp(logits_BHTS - logits_BHTS.max(-1, keepdims=True))
    p_BHTS /= p_BHTS.sum(-1, keepdims=True)
    o_BHTD = p_BHTS @ v

    def backward(g, d_y_BTC):
        g[f"{out}.bias"] += d_y_BTC.sum((0, 1))
        g[f"{out}.weight"] += np.einsum("bhtd,btc->hdc", o_BHTD, d_y_BTC)
        d_o_BHTD = np.einsum("btc,hdc->bhtd", d_y_BTC, weight_HDC)
        d_p_BHTS = np.einsum("bhtd,bhsd->bhts", d_o_BHTD, v)
        d_logits_BHTS = p_BHTS * (d_p_BHTS - (d_p_BHTS * p_BHTS).sum(-1, keepdims=True)) * scale
        d_q = d_logits_BHTS @ k
        d_k = np.einsum("bhts,bhtd->bhsd", d_logits_BHTS, q)
        d_v = np.einsum("bhts,bhtd->bhsd", p_BHTS, d_o_BHTD)
        d_qkv = np.stack((d_q, d_k, d_v))
        g[f"{qkv}.bias"] += d_qkv.sum((1, 3))
        g[f"{qkv}.weight"] += np.einsum("btc,ibhtd->cihd", x_BTC, d_qkv)
        return np.einsum("ibhtd,cihd->btc", d_qkv, weight_C3HD)

    return np.einsum("bhtd,hdc->btc", o_BHTD, weight_HDC) + w[f"{out}.bias"], backward


def mlp(w, block, x_BTC):
    """Two linear layers with the exact GELU in between; and its backward."""
    up, down = block + "mlp.up", block + "mlp.down"
    h_BTM = x_BTC @ w[f"{up}.weight"] + w[f"{up}.bias"]
    cdf_BTM = 0.5 * (1 + erf(h_BTM / math.sqrt(2)))
    a_BTM = h_BTM * cdf_BTM

    def backward(g, d_y_BTC):
        g[f"{down}.bias"] += d_y_BTC.sum((0, 1))
        g[f"{down}.weight"] += np.einsum("btm,btc->mc", a_BTM, d_y_BTC)
        density_BTM = np.exp(-(h_BTM**2) / 2) / math.sqrt(2 * math.pi)
        d_h_BTM = (d_y_BTC @ w[f"{down}.weight"].T) * (cdf_BTM + h_BTM * density_BTM)
        g[f"{up}.bias"] += d_h_BTM.sum((0, 1))
        g[f"{up}.weight"] += np.einsum("btc,btm->cm", x_BTC, d_h_BTM)
        return d_h_BTM @ w[f"{up}.weight"].T

    return a_BTM @ w[f"{down}.weight"] + w[f"{down}.bias"], backward


def cross_entropy(logits_BTV, targets_BT):
    """The mean over all positions, and its gradient (B, T, V)."""
    shifted_BTV = logits_BTV - logits_BTV.max(-1, keepdims=True)
    log_p_BTV = shifted_BTV - np.log(np.exp(shifted_BTV).sum(-1, keepdims=True))
    chosen = targets_BT[..., None]
    loss = -np.take_along_axis(log_p_BTV, chosen, -1).mean()
    d_logits_BTV = np.exp(log_p_BTV)
    np.put_along_axis(d_logits_BTV, chosen, np.take_along_axis(d_logits_BTV, chosen, -1) - 1, -1)
    return loss, d_logits_BTV / targets_BT.size
