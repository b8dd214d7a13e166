"""What vendors promise of a chip: dense floating-point operations a second, by its name and the dtype.

A figure that a data sheet gives "with sparsity" stands here without it, halved. A chip that is not in the
table, a part of one (MIG), or a dtype that its sheet does not give has no peak, and so no utilisation: 104 %
of a wrong peak helps nobody.
"""

from compare.contract.record import Manifest
from compare.judge.closed_forms.flops import model_flops_per_token

T = 1e12
HOPPER_SXM = {"bfloat16": 989.5 * T, "tf32": 494.5 * T, "float32": 67 * T, "float64": 67 * T}
HOPPER_NVL = {"bfloat16": 835.5 * T, "tf32": 417.5 * T, "float32": 60 * T, "float64": 60 * T}
AMPERE = {"bfloat16": 312 * T, "tf32": 156 * T, "float32": 19.5 * T, "float64": 19.5 * T}

PEAKS: dict[str, dict[str, float]] = {
    # nvidia.com: data sheets "H100 Tensor Core GPU", "H200 Tensor Core GPU"
    "NVIDIA H100 80GB HBM3": HOPPER_SXM,
    "NVIDIA H200": HOPPER_SXM,
    "NVIDIA H100 NVL": HOPPER_NVL,
    "NVIDIA H200 NVL": HOPPER_NVL,
    "NVIDIA H100 PCIe": {"bfloat16": 756.5 * T, "tf32": 378 * T, "float32": 51 * T, "float64": 51 * T},
    # nvidia.com: data sheet "HGX B200", an eighth of the board's figure
    "NVIDIA B200": {"bfloat16": 2250 * T},
    # nvidia.com: data sheet "A100 Tensor Core GPU"
    "NVIDIA A100-SXM4-40GB": AMPERE,
    "NVIDIA A100-SXM4-80GB": AMPERE,
    "NVIDIA A100-PCIE-40GB": AMPERE,
    "NVIDIA A100 80GB PCIe": AMPERE,
    # nvidia.com: data sheets "A10", "A30", "A40", "L4", "L40S", "V100", "T4"
    "NVIDIA A10": {"bfloat16": 125 * T, "tf32": 62.5 * T, "float32": 31.2 * T},
    "NVIDIA A30": {"bfloat16": 165 * T, "tf32": 82 * T, "float32": 10.3 * T, "float64": 10.3 * T},
    "NVIDIA A40": {"bfloat16": 149.7 * T, "tf32": 74.8 * T, "float32": 37.4 * T},
    "NVIDIA L4": {"bfloat16": 121 * T, "tf32": 60 * T, "float32": 30.3 * T},
    "NVIDIA L40S": {"bfloat16": 362 * T, "tf32": 183 * T, "float32": 91.6 * T},
    "Tesla V100-SXM2-16GB": {"float32": 15.7 * T, "float64": 7.8 * T},
    "Tesla V100-SXM2-32GB": {"float32": 15.7 * T, "float64": 7.8 * T},
    "Tesla T4": {"float32": 8.1 * T},
    # nvidia.com: white papers "Ada GPU architecture" and "Ampere GA102"; bfloat16 summed up in float32
    "NVIDIA GeForce RTX 4090": {"bfloat16": 165.2 * T, "tf32": 82.6 * T, "float32": 82.6 * T},
    "NVIDIA GeForce RTX 3090": {"bfloat16": 71 * T, "tf32": 35.6 * T, "float32": 35.6 * T},
    # cloud.google.com/tpu/docs/system-architecture-tpu-vm; JAX has two names for some
    "TPU v4": {"bfloat16": 275 * T},
    "TPU v5 lite": {"bfloat16": 197 * T},
    "TPU v5e": {"bfloat16": 197 * T},
    "TPU v5": {"bfloat16": 459 * T},
    "TPU v5p": {"bfloat16": 459 * T},
    "TPU v6 lite": {"bfloat16": 918 * T},
    "TPU v6e": {"bfloat16": 918 * T},
}


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Dense floating-point operations a second that a chip is sold with; None where nobody says.

    Args:
        device_kind: `Manifest.device_kind`, the whole name: CUDA's or JAX's.
        dtype: of the products: `Precision.product_dtype`.
    """
    if dtype == "float16" and device_kind.startswith("NVIDIA"):
        dtype = "bfloat16"  # as fast, where there is either
    return PEAKS.get(device_kind, {}).get(dtype)


def model_flops_utilization(manifest: Manifest, tokens_per_s: float) -> float | None:
    """MFU, a fraction of all devices' peak; None for a device without one, such as any CPU.

    Args:
        manifest: of the run: its model, devices and precision.
        tokens_per_s: over all devices.
    """
    peak = peak_flops(manifest.device_kind, manifest.experiment.precision.product_dtype)
    if peak is None:
        return None
    return model_flops_per_token(manifest.experiment) * tokens_per_s / (manifest.devices * peak)
