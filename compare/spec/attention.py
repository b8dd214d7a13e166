"""Attention cores: the core that `model.attention = auto` chooses, and what each core needs."""

from typing import Literal

from compare.spec.sections import Experiment

Core = Literal["dense", "blockwise", "fused"]
FEWEST_POSITIONS = 512
"""Positions from which blocks are faster than all weights at once."""
HEAD_DIM, MOST_HEAD_DIM = 8, 128
"""cuDNN's kernel takes multiples of the first, up to the second; Hopper takes more."""
NARROW = ("bfloat16", "float16")


def why_not_core(core: str, experiment: Experiment) -> str:
    """The reason why no engine can compute an experiment by a core; '' if some can."""
    model, precision = experiment.model, experiment.precision
    if model.dropout and core in ("blockwise", "fused"):
        return (
            f"model.attention = {core} with model.dropout = {model.dropout}: dropout is of whole rows of "
            "attention's weights, which exist only in the core dense: set model.attention = dense or auto"
        )
    if core == "fused" and precision.dtype not in NARROW:
        return (
            f"model.attention = fused with precision.dtype = {precision.dtype}: fused kernels have 16 bits: "
            f"set model.attention = blockwise, or precision.dtype to {' or '.join(NARROW)}"
        )
    return ""


def why_not_cudnn(experiment: Experiment) -> str:
    """The reason why JAX's fused core, cuDNN's kernel, cannot compute an experiment; '' if it can."""
    model, layout = experiment.model, experiment.layout
    head_dim = model.n_embd // model.n_head
    if head_dim % HEAD_DIM or head_dim > MOST_HEAD_DIM:
        return (
            f"model.attention = fused: cuDNN takes heads of {HEAD_DIM}, {2 * HEAD_DIM}, .. {MOST_HEAD_DIM} "
            f"features, and n_embd / n_head is {head_dim}: set model.attention = blockwise"
        )
    if layout.cp > 1 and layout.context != "ulysses":
        return (
            f"model.attention = fused with layout.context = {layout.context}: cuDNN's causal mask is of "
            "whole sequences, and a device has queries of some positions: use ulysses, or set "
            "model.attention = blockwise"
        )
    return ""


def core_in_jax(experiment: Experiment, *, platform: str) -> Core:
    """The core that JAX engines run: `model.attention` with auto resolved to the fastest exact core."""
    if experiment.model.attention != "auto":
        return experiment.model.attention
    if platform == "gpu" and not (why_not_core("fused", experiment) or why_not_cudnn(experiment)):
        return "fused"
    is_long = experiment.model.block_size >= FEWEST_POSITIONS
    return "blockwise" if is_long and not experiment.model.dropout else "dense"
