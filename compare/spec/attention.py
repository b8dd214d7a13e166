"""Attention cores: the core that `model.attention = auto` chooses, and what each core needs."""

from typing import Literal

from compare.spec.sections import Experiment

Core = Literal["dense", "blockwise", "fused"]
FEWEST_POSITIONS, FEWEST_IN_RING = 512, 256
"""Positions of a sequence, and of a chunk of a ring, from which small blocks are faster than one block."""
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


def why_not_in_jax(core: str, experiment: Experiment, *, by_types: bool) -> str:
    """The reason why a JAX engine cannot compute an experiment by a core; '' if it can.

    Its fused core is cuDNN's kernel. `by_types` is true for jax-explicit.
    """
    model, layout = experiment.model, experiment.layout
    has_own_positions = layout.cp > 1 and layout.context != "ulysses"
    if by_types and layout.pp > 1 and (core == "fused" or (core == "blockwise" and has_own_positions)):
        of_cp = f" and layout.cp = {layout.cp}" * (core == "blockwise")
        return (
            f"model.attention = {core} with layout.pp = {layout.pp}{of_cp}: in a shard_map inside a vmap of "
            "stages JAX loses the type of gradients: set model.attention = auto"
        )
    if why := why_not_core(core, experiment):
        return why
    head_dim = model.n_embd // model.n_head
    if core != "fused":
        return ""
    if head_dim % HEAD_DIM or head_dim > MOST_HEAD_DIM:
        return (
            f"model.attention = fused: cuDNN takes heads of {HEAD_DIM}, {2 * HEAD_DIM}, .. {MOST_HEAD_DIM} "
            f"features, and n_embd / n_head is {head_dim}: set model.attention = blockwise"
        )
    if has_own_positions:
        return (
            f"model.attention = fused with layout.context = {layout.context}: cuDNN's causal mask is of "
            "whole sequences, and a device has queries of some positions: use ulysses, or set "
            "model.attention = blockwise"
        )
    return ""


def is_ring(experiment: Experiment) -> bool:
    """True if keys and values travel around a ring."""
    return experiment.layout.cp > 1 and experiment.layout.context == "ring"


def positions_of_block(experiment: Experiment) -> int:
    """Positions of a block of attention that is not cut: a chunk of a ring, else the whole sequence."""
    chunks = experiment.layout.cp * (1 + experiment.layout.zigzag) if is_ring(experiment) else 1
    return experiment.model.block_size // chunks


def core_in_jax(experiment: Experiment, *, platform: str, by_types: bool) -> Core:
    """The core that a JAX engine runs: `model.attention` with auto resolved to the fastest possible core."""
    if experiment.model.attention != "auto":
        return experiment.model.attention
    fewest = FEWEST_IN_RING if is_ring(experiment) else FEWEST_POSITIONS
    is_fast = {"fused": platform == "gpu", "blockwise": positions_of_block(experiment) >= fewest}
    for core in ("fused", "blockwise"):
        if is_fast[core] and not why_not_in_jax(core, experiment, by_types=by_types):
            return core
    return "dense"
