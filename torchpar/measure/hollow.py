"""Operators that make their results and compute nothing: for a rank whose numbers mean nothing.

Shapes come from PyTorch's meta device. A result is zeros, in memory that nobody writes to, so that the
operating system never provides it; what is small is computed as ever, since a program may look at it: a
step's number, a norm. Fake tensors (`torch._subclasses.fake_tensor`) have no memory at all: nothing may look
at them, and a module that holds them cannot be moved.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves, tree_map_only

from torchpar.measure.ledger import NAMESPACES

SMALL = 2**14
"""Elements up to which operators compute."""
REUSED_BYTES = 2**25
"""Up to this size malloc may give what was freed before; what is larger it always has from the system."""
SHAPE = (torch.ops.aten.resize_.default, torch.ops.aten.set_.source_Tensor)
"""They change what a tensor is, and no number."""
LOOKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Of operators whose results a program looks at, or whose shapes depend on numbers."""


class HollowMode(TorchDispatchMode):
    """Large results of operators are left as they come, while it is entered."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # DTensor first: what it makes of the operator comes back here
        kwargs = kwargs or {}
        if func in SHAPE or func.namespace in NAMESPACES or func.is_view or LOOKS & set(func.tags):
            return func(*args, **kwargs)
        writes = func._schema.is_mutable
        meta = None if writes else _on_meta(func, args, kwargs)
        if all(leaf.numel() <= SMALL for leaf in tree_leaves((args, kwargs, meta)) if torch.is_tensor(leaf)):
            return func(*args, **kwargs)
        return _written(func, args, kwargs) if writes else tree_map_only(torch.Tensor, _hollow, meta)


def _on_meta(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What an operator gives, as shapes."""
    kwargs = {**kwargs, **({"device": "meta"} if "device" in kwargs else {})}
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
    return func(*args, **kwargs)


def _hollow(meta: torch.Tensor) -> torch.Tensor:
    """Zeros, of any shape: of the operating system, or where memory may be used again, our own."""
    made = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
    return made if made.nbytes > REUSED_BYTES else made.zero_()


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What an operator returns that writes into its arguments: these, as they are."""
    schema = func._schema
    given = {one.name: value for one, value in zip(schema.arguments, args, strict=False)} | kwargs
    written = [given[one.name] for one in schema.arguments if one.alias_info and one.alias_info.is_write]
    if not schema.returns:
        return None
    return written[0] if len(schema.returns) == 1 else tuple(written)
