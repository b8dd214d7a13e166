"""Floating-point operations of training per token, in closed form, and peaks that vendors state for chips.

    weights of the blocks    6 N          a product and a sum for each weight forward, twice that backward
    head                     6 V h        the tied embedding, as the matrix that makes logits
    attention                12 L s h     scores and their sum over values: 4 s h forward, 8 s h backward

N is the number of parameters without the two embedding tables, whose rows are looked up, and with only the
experts of one token. V is the vocabulary, h the width, L the number of layers, s the context. By custom, the
half of the scores that a causal mask hides is counted. Recomputation in backward is not counted.

Source: PaLM (arXiv 2204.02311, appendix B), as in Megatron (arXiv 2104.04473, section 5.1).

Peaks are dense operations per second, half of a figure "with sparsity". Chips outside the table, parts of a
chip (MIG), and dtypes that the data sheet omits have no peak and no utilisation.
"""

from compare.numerics.parameters import block_parameters, end_parameters, parameter_count
from compare.spec.experiment import Experiment

T = 1e12
HOPPER_SXM = {"bfloat16": 989.5 * T, "tf32": 494.5 * T, "float32": 67 * T, "float64": 67 * T}
HOPPER_NVL = {"bfloat16": 835.5 * T, "tf32": 417.5 * T, "float32": 60 * T, "float64": 60 * T}
AMPERE = {"bfloat16": 312 * T, "tf32": 156 * T, "float32": 19.5 * T, "float64": 19.5 * T}
VOLTA = {"float32": 15.7 * T, "float64": 7.8 * T}

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
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"), AMPERE),
    **dict.fromkeys(("NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"), AMPERE),
    # nvidia.com: data sheets "A10", "A30", "A40", "L4", "L40S", "V100", "T4"
    "NVIDIA A10": {"bfloat16": 125 * T, "tf32": 62.5 * T, "float32": 31.2 * T},
    "NVIDIA A30": {"bfloat16": 165 * T, "tf32": 82 * T, "float32": 10.3 * T, "float64": 10.3 * T},
    "NVIDIA A40": {"bfloat16": 149.7 * T, "tf32": 74.8 * T, "float32": 37.4 * T},
    "NVIDIA L4": {"bfloat16": 121 * T, "tf32": 60 * T, "float32": 30.3 * T},
    "NVIDIA L40S": {"bfloat16": 362 * T, "tf32": 183 * T, "float32": 91.6 * T},
    **dict.fromkeys(("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"), VOLTA),
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


def model_flops_per_token(experiment: Experiment) -> float:
    """Floating-point operations of one token, forward and backward, in any layout.

    Equal to nanoGPT's `estimate_mfu`, which counts the token table in N instead of the tied head. Both count
    norms and biases as products: 1 part in 7,000 of GPT-2 124M.
    """
    model = experiment.model
    embeddings, _ = end_parameters(model)
    weights = parameter_count(model) - sum(table.size for table in embeddings)
    experts = sum(parameter.size for parameter in block_parameters(model, 0) if "expert" in parameter.axes)
    weights -= model.n_layer * experts * (1 - model.experts_per_token / (model.n_experts or 1))
    head = model.vocab_size * model.n_embd
    attention = 2 * model.n_layer * model.block_size * model.n_embd
    return 6.0 * (weights + head + attention)


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Dense FLOP/s of a chip in a dtype, by its `device_kind`; None if the table lacks it."""
    if dtype == "float16" and device_kind.startswith("NVIDIA"):
        dtype = "bfloat16"  # equally fast on these chips
    return PEAKS.get(device_kind, {}).get(dtype)


def flops_utilization(experiment: Experiment, device_kind: str, tokens_per_s: float) -> float | None:
    """MFU of all devices at this speed, a fraction of their peak; None for a device without a peak."""
    peak = peak_flops(device_kind, experiment.precision.product_dtype)
    if peak is None:
        return None
    return model_flops_per_token(experiment) * tokens_per_s / (experiment.layout.devices * peak)
