"""Collectives as operators of a compiled program, which torch.compile does not look into.

While torch.compile traces a block, a collective becomes one operator. When the program runs, the operator
calls the collective. So the collective is sent and observed as it is without a program.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from types import FunctionType
from typing import Any, NamedTuple, TypeVar, cast

import torch

Method = TypeVar("Method", bound=Callable[..., torch.Tensor])
NAMESPACE = "shardpair"


class _Collective(NamedTuple):
    """A method of `Axis`, the names of its dims, and the shape of its result."""

    method: Callable[..., torch.Tensor]
    dims: Sequence[str]
    shape_of: Callable[..., Sequence[int]]


AXES: dict[str, Any] = {}
"""Axes by their key: joined axes may have the same process group."""
_COLLECTIVES: dict[str, _Collective] = {}


def as_one_operator(shape_of: Callable[..., Sequence[int]]) -> Callable[[Method], Method]:
    """Let a program call a method (axis, x, dims, purpose) of an axis in `AXES` as one operator.

    `shape_of` is from the shape of x, the number of ranks and the dims to the shape of the result, which is a
    new contiguous tensor.
    """

    def decorate(method: Method) -> Method:
        name = cast(FunctionType, method).__name__
        dims = [*inspect.signature(method).parameters][2:-1]
        _COLLECTIVES[name] = _Collective(method, dims, shape_of)

        @wraps(method)
        def call(axis: Any, x: torch.Tensor, *values: int, purpose: str, **named: int) -> torch.Tensor:
            if not torch.compiler.is_compiling():
                return method(axis, x, *values, purpose=purpose, **named)
            all_values = [*values, *(named[dim] for dim in dims if dim in named)]
            return torch.ops.shardpair.collective(x, name, axis.key, all_values, purpose)

        return cast(Method, call)

    return decorate


def run(x: torch.Tensor, name: str, axis: str, dims: list[int], purpose: str) -> torch.Tensor:
    """Call a collective by its name, with the key of its axis."""
    collective = _COLLECTIVES[name]
    named = dict(zip(collective.dims, dims, strict=True))
    return collective.method(AXES[axis], x, purpose=purpose, **named)


operator = torch.library.custom_op(f"{NAMESPACE}::collective", run, mutates_args=())


@operator.register_fake
def _(x: torch.Tensor, name: str, axis: str, dims: list[int], purpose: str) -> torch.Tensor:
    return x.new_empty(_COLLECTIVES[name].shape_of(x.shape, AXES[axis].size, *dims))
