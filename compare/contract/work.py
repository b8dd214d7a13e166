"""Work: what one step of a device computes, as it was seen in the program; RUN_DIR/work.json.

A manifest can only repeat the request. This is what the code did, seen by whoever carries it out: PyTorch's
dispatcher, or JAX's own account of the traced step. The judge holds it against the layout and the precision
that were asked for (`compare.judge.strategy`).
"""

from typing import Literal

from msgspec import Struct, field

from compare.pipeline.schedules import Task

WORK = "work.json"
Again = Literal["products", "activations"]


class ObservedWork(Struct, frozen=True, kw_only=True):
    """Observed work of one step, all devices together."""

    products: dict[str, int]
    """Matrix products by the dtype of what is multiplied; tf32 where float32 may be rounded to it."""
    again: list[Again]
    """What of the blocks is computed again for backward: matrix products, and GELUs (activations)."""
    logits_positions: list[int]
    """Positions (T) of the logits that exist at once, in forward: block_size over train.loss_chunks."""
    tasks: list[list[str]] = field(default_factory=list)
    """Of a pipeline: the tasks of each of its ranks in the order in which they were done, by `name_of`.
    Empty where a compiler orders them."""
    overlaps: bool = False
    """Whether a reduction of gradients began before backward had ended."""


def name_of(task: Task) -> str:
    """A task in a word: F0.3 is the forward of stage 0 on microbatch 3."""
    return f"{task.kind}{task.stage}.{task.microbatch}"
