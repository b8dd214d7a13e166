"""Rematerialisation: backward computes activations again, and forward does not keep them."""

from collections.abc import Callable
from typing import Any, Literal

import jax

from compare.spec.experiment import Layout

Remat = Literal["none", "dots", "full"]
IsGather = Callable[..., bool]
"""(primitive, *arguments, **parameters) -> whether the operation makes a full parameter from shards."""

# Casts and reshapes. Keeping one in place of a gathered parameter would keep the parameter.
VIEWS = frozenset({"convert_element_type", "reshape", "slice", "squeeze", "transpose"})
# A sum over devices is as expensive as a matrix product: dots keeps its result, too.
REDUCTIONS = frozenset({"psum", "psum_invariant", "reduce_scatter"})
FUSED_ATTENTION = "dot_product_attention_fwd"
"""The first words of cuDNN's primitives: a kernel of two products, which dots keeps."""
KEPT_BY_DOTS = "kept by dots"
"""The name (`checkpoint_name`) of products inside functions with their own derivative."""


def remat_of(layout: Layout) -> Remat:
    """The activations that forward keeps. auto is dots: in a scan it is faster and smaller than none."""
    return "dots" if layout.remat == "auto" else layout.remat


def gathers_in_layers(layout: Layout) -> bool:
    """True if each block gathers its own parameters, as under zero 3.

    The blocks of a pipeline run at every tick. If they are to keep what they gather, it is gathered before
    the first tick.
    """
    return layout.zero == 3 and (layout.pp == 1 or layout.reshard_after_forward)


def apply_remat(
    layer: Callable[..., Any],
    remat: Remat,
    *,
    is_gather: IsGather | None = None,
    keep_gathered: bool = False,
) -> Callable[..., Any]:
    """A scanned layer whose forward keeps all (none), products and sums (dots), or nothing (full).

    Gathered parameters are kept if `keep_gathered`. Otherwise backward gathers them again, for every `remat`.
    """
    if remat == "none" and (is_gather is None or keep_gathered):
        return layer

    def policy(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
        if is_gather is not None and is_gather(primitive, *arguments, **parameters):
            return keep_gathered
        if remat == "none":
            return primitive.name not in VIEWS
        out_sharding = parameters.get("out_sharding")
        # The sum of an unreduced product is kept in place of the product.
        if remat == "full" or (out_sharding is not None and out_sharding.spec.unreduced):
            return False
        if primitive.name == "reshard":  # a sum over devices, if it casts what is unreduced
            return bool(arguments[0].sharding.spec.unreduced)
        if primitive.name.startswith(FUSED_ATTENTION):
            return True
        if primitive.name == "name":
            return parameters["name"] == KEPT_BY_DOTS
        dots = jax.checkpoint_policies.dots_saveable
        return primitive.name in REDUCTIONS or bool(dots(primitive, *arguments, **parameters))

    # A scan compiles forward and backward separately, so common subexpressions are never merged.
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)
