"""Dynamic loss scaling for float16, as plain data.

Many gradients are smaller than float16's smallest number. So backward starts from the loss times a scale, and
gradients are divided by the scale before any other use. If the scale is too large, the global norm of the
gradients is not finite on any device. The step is then skipped and the scale is halved; weights, moments and
Adam's count stay. The learning rate counts skipped steps, as in nanoGPT. After `loss_scale_window` steps
without an overflow the scale is doubled.

The same steps overflow on every layout. Each device begins backward with its share of the mean over the
batch, and products of some rows rarely overflow before products of all rows. A mean gradient that would
exceed `LARGEST` when multiplied by the scale counts as an overflow, as it is on one device.

Sources: Micikevicius et al., Mixed Precision Training (arXiv 1710.03740, section 3.2). Hysteresis and the
smallest scale follow the dynamic loss scalers of Megatron-LM and DeepSpeed.
"""

from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from compare.spec.sections import LARGEST_LOSS_SCALE, Precision

FACTOR = 2.0
LARGEST = 65504.0
"""The largest number of float16."""


class LossScale(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Loss scale between two steps."""

    scale: Annotated[float, Meta(gt=0, le=LARGEST_LOSS_SCALE)]
    """Factor of the next step's loss."""
    good_steps: Annotated[int, Meta(ge=0)] = 0
    """Steps since the scale changed or a step was skipped."""
    hysteresis: Annotated[int, Meta(ge=1)] = 1
    """Overflows until the scale is halved."""


def first_scale(precision: Precision) -> LossScale | None:
    """The first scale of a training; None if the precision needs none."""
    if precision.dtype != "float16":
        return None
    return LossScale(scale=precision.loss_scale, hysteresis=precision.loss_scale_hysteresis)


def next_scale(before: LossScale, precision: Precision, *, overflowed: bool) -> LossScale:
    """The scale after a step. Raises OverflowError: gradients overflowed at the smallest scale."""
    patience = precision.loss_scale_hysteresis
    if overflowed:
        if before.scale <= precision.min_loss_scale:
            raise OverflowError(f"gradients overflow at the smallest loss scale, {before.scale:g}")
        if before.hysteresis > 1:
            return replace(before, good_steps=0, hysteresis=before.hysteresis - 1)
        return LossScale(scale=max(before.scale / FACTOR, precision.min_loss_scale), hysteresis=patience)
    if before.good_steps + 1 >= precision.loss_scale_window:  # a resumed training may have a shorter window
        return LossScale(scale=min(before.scale * FACTOR, LARGEST_LOSS_SCALE), hysteresis=patience)
    return replace(before, good_steps=before.good_steps + 1)
