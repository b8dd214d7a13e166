"""The dtype in which ZeRO-3 gathers a parameter (`precision.gather`).

With mixed precision a product rounds its weight and bias to 16 bits. So they can be rounded before they are
gathered: the product is the same, and half as many bytes are sent. Their gradients have 16 bits either way,
and are summed over the ranks in float32. All other parameters, such as norms, are read in float32.
"""

import torch

from compare.spec.experiment import Experiment


def gathered_dtype(name: str, experiment: Experiment) -> torch.dtype | None:
    """The 16-bit dtype in which a parameter with nanoGPT's name is gathered; None: as it is stored."""
    is_factor = ".h." in name and not any(part in name for part in (".ln_", ".router."))
    return getattr(torch, experiment.precision.dtype) if is_factor and experiment.gathers_in_16_bits else None
