"""Loss scaling for float16, whose smallest numbers are larger than many gradients: the rule, as plain data.

Backward starts from the loss times a scale, and gradients are divided by it before anything else is done with
them. Where the scale is too large something overflows: then the global norm of the gradients is not finite,
which all devices see alike, and the step is skipped: weights, moments and Adam's count stay, the scale is
halved. The learning rate follows the step, skipped or not, as nanoGPT's does. After so many steps without an
overflow the scale is doubled.

Sources: Micikevicius et al., Mixed Precision Training (arXiv 1710.03740, section 3.2); hysteresis and the
smallest scale are those of Megatron-LM's and DeepSpeed's dynamic loss scalers.
"""

from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from compare.spec.sections import LARGEST_LOSS_SCALE, Precision

FACTOR = 2.0


class LossScale(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Loss scale between two steps."""

    scale: Annotated[float, Meta(gt=0, le=LARGEST_LOSS_SCALE)]
    """Factor of the next step's loss."""
    good_steps: Annotated[int, Meta(ge=0)] = 0
    """Since the scale changed, or a step was skipped."""
    hysteresis: Annotated[int, Meta(ge=1)] = 1
    """Overflows from here until it is halved."""


def first_scale(precision: Precision) -> LossScale | None:
    """The scale that training begins with; None where the precision needs none."""
    if precision.dtype != "float16":
        return None
    return LossScale(scale=precision.loss_scale, hysteresis=precision.loss_scale_hysteresis)


def next_scale(before: LossScale, precision: Precision, *, overflowed: bool) -> LossScale:
    """The scale after a step. Raises OverflowError: the smallest overflowed, which no other will mend."""
    patience = precision.loss_scale_hysteresis
    if overflowed:
        if before.scale <= precision.min_loss_scale:
            raise OverflowError(f"gradients overflow at the smallest loss scale, {before.scale:g}")
        if before.hysteresis > 1:
            return replace(before, good_steps=0, hysteresis=before.hysteresis - 1)
        return LossScale(scale=max(before.scale / FACTOR, precision.min_loss_scale), hysteresis=patience)
    if before.good_steps + 1 >= precision.loss_scale_window:  # a training that went on may have a shorter one
        return LossScale(scale=min(before.scale * FACTOR, LARGEST_LOSS_SCALE), hysteresis=patience)
    return replace(before, good_steps=before.good_steps + 1)
