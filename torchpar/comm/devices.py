"""The device a rank computes on, and the packages that its numbers depend on."""

import torch

from compare.host.facts import cpu_model

PACKAGES = ("torch", "numpy")


def device_kind(device: torch.device) -> str:
    """The model of the GPU, or of the CPU as far as the system tells."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()
