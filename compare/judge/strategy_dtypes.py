"""Settings of precision, read off observed work for the rung "strategy"."""

from collections.abc import Iterator
from typing import get_args

import numpy as np

from compare.contract.communication import GRADIENTS, PARAMETERS, REPLICATED_GRADIENTS, TIED_GRADIENTS
from compare.contract.record import read_tensors
from compare.contract.request import Rung as Recorded
from compare.contract.work import Kept
from compare.judge.observed import Finding, Observed
from compare.numerics.parameters import storage_dtype
from compare.spec.attention import is_ring
from compare.spec.axes import PP

OF_HLO = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}
"""XLA's names of dtypes."""


def read_dtypes(run: Observed) -> Iterator[Finding]:
    """Dtypes of matrix products, and of the gradients and streams that are sent."""
    asked = run.experiment.precision.product_dtype
    if asked == "tf32" and run.record.manifest.platform == "cpu":
        asked = "float32"  # tf32 is a permission; a CPU has no such products
    yield Finding("precision.dtype", asked, ", ".join(sorted(run.work.products)) or "none")
    if run.engine.sends_by == "xla":
        return  # XLA chooses the dtype of its messages
    stored, sent = storage_dtype(run.experiment).name, dict[str, set[str]]()
    for row in run.record.ledger.rows:
        is_of_gradients = row.purpose in (GRADIENTS, REPLICATED_GRADIENTS, TIED_GRADIENTS)
        is_of_stream = (row.kind, row.axis) == ("permute", PP)
        what = "gradients" if is_of_gradients else "streams" if is_of_stream else ""
        if (row.kind, row.purpose) == ("all_gather", PARAMETERS) and not run.engine.is_jax:
            what = "weights"
        if what and row.dtype:
            sent.setdefault(what, set()).update(OF_HLO.get(dtype, dtype) for dtype in row.dtype.split(", "))
    if run.infers_shapes and "streams" in sent:
        sent["streams"] -= {"int32", "int64", "uint8"}  # the shapes
    for what, dtypes in sent.items():
        in_16_bits = what == "weights" and run.experiment.gathers_in_16_bits
        expected = sorted({stored, asked} if in_16_bits else {stored})  # norms stay as they are stored
        yield Finding(f"dtype of {what} that are sent", ", ".join(expected), ", ".join(sorted(dtypes)))


def read_kept_dtypes(run: Observed) -> Iterator[Finding]:
    """Dtypes of operations that 16-bit training leaves in float32."""
    if run.work.compiled:
        raise ValueError(f"operators of a compiled program cannot be observed ({run.work.compiled})")
    stored, model = storage_dtype(run.experiment).name, run.experiment.model
    exists = {
        "rotation": model.position == "rope",
        "router": model.n_experts > 0,
        "ring": is_ring(run.experiment),
        "softmax": False,  # invisible in a fused kernel
    }
    for what in get_args(Kept):
        found = run.work.kept.get(what, [])
        if what == "ring" and stored in found:
            found = [stored]  # the first parts are products in 16 bits
        if found or exists.get(what, True):
            yield Finding(f"dtype of the {what}", stored, ", ".join(found) or "none")


def read_gradient_sums(run: Observed) -> Iterator[Finding]:
    """The dtype in which gradients are summed, if products have 16 bits.

    Gradients of norms and positions are sums of float32 terms, which need all 24 bits. If the terms or the
    partial sums were rounded to 8 or 11 bits, most sums would fit into 16.
    """
    gradients, layout = read_tensors(run.record.folder, Recorded.GRADIENTS), run.experiment.layout
    terms = run.experiment.microbatches_per_step * layout.data_parallel * layout.cp
    names = [name for name in ("embedding.position", "norm.scale") if name in gradients]
    if not names or run.experiment.precision.dtype not in ("bfloat16", "float16"):
        return
    sums = np.concatenate([gradients[name].reshape(-1) for name in names])
    sums = sums[np.isfinite(sums) & (sums != 0)] * np.float32(terms)
    if sums.size:
        needs_few = sums.view(np.uint32) % 256 == 0
        found = "16 bits" if needs_few.mean() > 0.5 else "float32"
        yield Finding("dtype in which gradients are added up", "float32", found)
