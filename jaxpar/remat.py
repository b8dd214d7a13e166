"""Recomputing activations in backward, so that forward need not keep them."""

from collections.abc import Callable
from typing import Any, Literal

import jax

Remat = Literal["none", "dots", "full"]
IsGather = Callable[..., bool]
"""(primitive, *its arguments, **its parameters) -> whether it makes a whole parameter out of shards."""

# What only casts or reshapes: kept in place of a gathered parameter, it would be the parameter again.
VIEWS = frozenset({"convert_element_type", "reshape", "slice", "squeeze", "transpose"})
# The result of a sum over devices is dear in the way that a matrix product is: dots keeps it as well.
REDUCTIONS = frozenset({"psum", "psum_invariant", "reduce_scatter"})


def apply_remat(
    layer: Callable[..., Any],
    remat: Remat,
    *,
    is_gather: IsGather | None = None,
    keep_gathered: bool = False,
) -> Callable[..., Any]:
    """A scanned layer that keeps of its forward pass what `remat` allows.

    none keeps all, dots matrix products and sums over devices, full nothing. Results of operations that are a
    gather are kept if `keep_gathered`; otherwise they are gathered again, whatever `remat` says.
    """
    if remat == "none" and (is_gather is None or keep_gathered):
        return layer

    def policy(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
        if is_gather is not None and is_gather(primitive, *arguments, **parameters):
            return keep_gathered
        if remat == "none":
            return primitive.name not in VIEWS
        if remat == "full" or _is_part_of_sum(**parameters):
            return False
        return _is_reduction(primitive, *arguments) or bool(
            jax.checkpoint_policies.dots_saveable(primitive, *arguments, **parameters)
        )

    # A scan compiles its body apart from its backward: nothing has to be kept from merging the two (CSE).
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def _is_reduction(primitive: Any, *arguments: Any) -> bool:
    """A sum over devices; where types say so, a cast from what is unreduced."""
    if primitive.name == "reshard":
        return bool(arguments[0].sharding.spec.unreduced)
    return primitive.name in REDUCTIONS


def _is_part_of_sum(out_sharding: Any = None, **others: Any) -> bool:
    """A product that is typed unreduced: the sum that is made of it is kept in its place."""
    return out_sharding is not None and bool(out_sharding.spec.unreduced)
