"""`make gpu-day`, its last part: fused attention of both frameworks, each held to float64; about a minute.

    python docs/gpu_attention.py            # cuDNN and flash kernels where there is a GPU, else the CPU's own

No engine uses these kernels: they have no float64, in which engines are compared. So each is held by itself,
output and gradients, to attention in NumPy in float64 on the same rounded inputs. An error is the root mean
square of the difference over that of the reference.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from compare.execute.launch import visible_gpus
from compare.host.disk import write_atomically

FILE = Path(__file__).parents[1] / "runs" / "gpu-day" / "attention.json"
SHAPE_BTHD = (2, 512, 4, 64)
NAMES = ("y", "dq", "dk", "dv")
INPUTS = ("q", "k", "v", "dy")
LIMITS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 1e-5}
"""16 bits: two units in the last place, of the weights as they go into the second product, and of the result.
float32: sums of 64 to 512 products, each off by 6e-8, and a softmax of their exponentials."""
IN_JAX = """
import json, sys, jax, numpy as np
folder, dtype, ways = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
jax.config.update("jax_default_matmul_precision", "highest")
given = np.load(folder + "/given.npz")
q, k, v, dy = (jax.numpy.asarray(given[name], dtype) for name in ("q", "k", "v", "dy"))
for way in ways:
    try:
        how = {"is_causal": IS_CAUSAL, "implementation": way}
        attend = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **how))
        y, pull = jax.vjp(attend, q, k, v)
        found = [np.asarray(x, "float32") for x in (y, *pull(dy))]
        np.savez(f"{folder}/jax {way}.npz", *found)
    except Exception as error:
        print(f"jax {way}: {' '.join(str(error).split())[:160]}", file=sys.stderr)
"""
IN_TORCH = """
import json, sys, numpy as np, torch
from torch.nn.attention import SDPBackend, sdpa_kernel
folder, dtype, ways = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
device = "cuda" if torch.cuda.is_available() else "cpu"
given = np.load(folder + "/given.npz")
place = lambda x: torch.from_numpy(x).to(device, getattr(torch, dtype)).transpose(1, 2)
for way in ways:
    try:
        q, k, v = (place(given[name]).requires_grad_() for name in ("q", "k", "v"))
        with sdpa_kernel(getattr(SDPBackend, way)):
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=IS_CAUSAL)
            y.backward(place(given["dy"]))
        found = [x.detach().transpose(1, 2).float().cpu().numpy() for x in (y, q.grad, k.grad, v.grad)]
        np.savez(f"{folder}/torch {way}.npz", *found)
    except Exception as error:
        print(f"torch {way}: {' '.join(str(error).split())[:160]}", file=sys.stderr)
"""
NARROW = {"jax": ["cudnn"], "torch": ["CUDNN_ATTENTION", "FLASH_ATTENTION"]}
"""Kernels of a GPU that have no float32."""
WIDE = {"jax": ["xla"], "torch": ["EFFICIENT_ATTENTION", "MATH"]}
PROGRAMS = {"jax": IN_JAX, "torch": IN_TORCH}


def kernels(dtype: str, *, on_gpu: bool) -> dict[str, list[str]]:
    """Names of the kernels that there are, by framework. XLA multiplies no float16 on a CPU."""
    if on_gpu:
        return {side: [*(NARROW[side] if dtype != "float32" else ()), *WIDE[side]] for side in WIDE}
    return {"jax": ["xla"] if dtype != "float16" else [], "torch": ["FLASH_ATTENTION", "MATH"]}


def reference(
    q_BTHD: np.ndarray, k_BTHD: np.ndarray, v_BTHD: np.ndarray, dy_BTHD: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Causal attention and its gradients in float64: y, dq, dk, dv, each (B, T, H, D)."""
    q_BHTD, k_BHSD, v_BHSD, dy_BHTD = (x.swapaxes(1, 2) for x in (q_BTHD, k_BTHD, v_BTHD, dy_BTHD))
    scale, length = q_BHTD.shape[-1] ** -0.5, q_BHTD.shape[-2]
    scores_BHTS = q_BHTD @ k_BHSD.swapaxes(2, 3) * scale
    scores_BHTS[..., ~np.tri(length, dtype=bool)] = -np.inf
    weights_BHTS = np.exp(scores_BHTS - scores_BHTS.max(-1, keepdims=True))
    weights_BHTS /= weights_BHTS.sum(-1, keepdims=True)
    y_BHTD = weights_BHTS @ v_BHSD
    dweights_BHTS = dy_BHTD @ v_BHSD.swapaxes(2, 3)
    inner_BHT1 = (dy_BHTD * y_BHTD).sum(-1, keepdims=True)
    dscores_BHTS = weights_BHTS * (dweights_BHTS - inner_BHT1) * scale
    found = (y_BHTD, dscores_BHTS @ k_BHSD, dscores_BHTS.swapaxes(2, 3) @ q_BHTD)
    return tuple(x.swapaxes(1, 2) for x in (*found, weights_BHTS.swapaxes(2, 3) @ dy_BHTD))


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers that the dtype has, (...), as float32."""
    if dtype != "bfloat16":
        return x.astype(dtype).astype("float32")
    bits = x.astype("float32").view("uint32")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype("uint32").view("float32")


def errors(dtype: str, ways: dict[str, list[str]], *, is_causal: bool = True) -> dict[str, dict[str, float]]:
    """Relative errors of each way, by name; one that did not run has none, and says why on stderr.

    Args:
        dtype: of inputs and results.
        ways: kernels of each framework.
        is_causal: False is a mistake, to see that it shows.
    """
    draw = np.random.default_rng(0).standard_normal
    given = {name: rounded(draw(SHAPE_BTHD), dtype) for name in INPUTS}
    expected = reference(*(given[name].astype("float64") for name in INPUTS))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        np.savez(f"{folder}/given.npz", **given)
        for framework, own in ways.items():
            if not own:
                continue
            code = PROGRAMS[framework].replace("IS_CAUSAL", str(is_causal))
            asked = [folder, dtype, json.dumps(own)]
            subprocess.run([sys.executable, "-c", code, *asked], check=True)
            for path in sorted(Path(folder).glob(f"{framework} *.npz")):
                with np.load(path) as kept:
                    pairs = zip(NAMES, (kept[key] for key in kept.files), expected, strict=True)
                    found[path.stem] = {name: _relative(own, right) for name, own, right in pairs}
    return found


def _relative(own: np.ndarray, right: np.ndarray) -> float:
    return float(np.linalg.norm(own - right) / np.linalg.norm(right))


def main() -> int:
    """Try every kernel in every dtype that it has, and keep the errors. Returns 0 if all ran and agree."""
    rows, failed = {}, []
    for dtype, limit in LIMITS.items():
        ways = kernels(dtype, on_gpu=visible_gpus() > 0)
        rows[dtype] = errors(dtype, ways)
        names = [f"{side} {way}" for side, own in ways.items() for way in own]
        failed += [f"{name} in {dtype}" for name in names if name not in rows[dtype]]
        for name, off in rows[dtype].items():
            figures = ", ".join(f"{part} {error:.1e}" for part, error in off.items())
            is_off = max(off.values()) > limit
            failed += [f"{name} in {dtype}"] * is_off
            print(f"{dtype} {name}: {figures}{f'; MORE than {limit:.1e}' if is_off else ''}")
    FILE.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(FILE, json.dumps(rows, indent=1).encode())
    print(f"failed: {', '.join(failed)}" if failed else "all kernels agree with float64", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
