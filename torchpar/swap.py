"""Surgery on any module: some of its submodules replaced by others, from outside."""

import fnmatch
from collections.abc import Callable, Mapping

from torch import nn


def swap(model: nn.Module, makers: Mapping[str, Callable[..., nn.Module]]) -> None:
    """Replace submodules, in place. Tied weights stay tied, names of parameters stay.

        >>> axis = Axis.of(None)
        >>> mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> column = partial(ColumnParallelLinear.from_linear, axis=axis)
        >>> row = partial(RowParallelLinear.from_linear, axis=axis)
        >>> swap(mlp, {"0": column, "2": row})
        >>> mlp(torch.ones(4, 8)).shape
        torch.Size([4, 8])

    Args:
        model: any module; it stays itself.
        makers: by path, `*` standing for anything: what makes the new module from the old one.

    Raises:
        ValueError: a path that no submodule has, or one and another inside of it.
    """
    tied: dict[nn.Parameter, nn.Parameter] = {}
    paths = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    for pattern, make in makers.items():
        matching = fnmatch.filter(paths, pattern)
        if not matching:
            raise ValueError(f"{pattern!r} matches no submodule of {type(model).__name__}")
        for outer, inner in ((a, b) for a in matching for b in matching if b.startswith(f"{a}.")):
            raise ValueError(f"{pattern!r} matches both {outer} and {inner} inside of it: name one of them")
        for path in matching:
            try:
                _replace(model, path, make, tied)
            except Exception as error:
                error.add_note(f"where {path} of {type(model).__name__} was to be replaced")
                raise


def _replace(
    model: nn.Module,
    path: str,
    make: Callable[..., nn.Module],
    tied: dict[nn.Parameter, nn.Parameter],
) -> None:
    old = model.get_submodule(path)
    new = make(old)
    before = dict(old.named_parameters())
    for name, parameter in list(new.named_parameters()):
        if name in before:
            owner, _, leaf = name.rpartition(".")
            setattr(new.get_submodule(owner), leaf, tied.setdefault(before[name], parameter))
    model.set_submodule(path, new)
