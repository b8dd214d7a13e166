"""The state of a sharded module, by the names and in the order of the plain module's `state_dict()`."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchpar.guards.flat_parameters import FlatParameters

_EXTRA = "_extra_state"


def plain_state(module: nn.Module, flats: Sequence[FlatParameters]) -> dict[str, Any]:
    """The module's own `state_dict()`, with parameters in the place of pieces: tied ones under each name.

    Parameters have their shapes and dtypes, but not always their values; the rest is as it is.
    """
    parameter_of = {
        id(piece): p for flat in flats for p, piece in zip(flat.parameters, flat.pieces, strict=True)
    }
    with _showing_pieces():
        state = module.state_dict(keep_vars=True)
    return {name: parameter_of.get(id(value), value) for name, value in state.items()}


_shows_pieces = False


@contextmanager
def _showing_pieces() -> Generator[None]:
    global _shows_pieces
    _shows_pieces = True
    try:
        yield
    finally:
        _shows_pieces = False


def refuse_pieces_in_state(module: nn.Module) -> None:
    """Let `state_dict()` of a sharded module, or of one around it, raise a RuntimeError.

    It would have this rank's pieces under the parameters' names: what saves it keeps one rank's pieces.
    """
    module.register_state_dict_pre_hook(_refuse)


def _refuse(module: nn.Module, *arguments: Any) -> None:
    if not _shows_pieces:
        raise RuntimeError(
            "state_dict() of a module under FSDP has this rank's pieces alone: save full_state_dict() of the "
            "FSDP, and load it with load_full_state_dict()"
        )


def full_state(
    module: nn.Module, flats: Sequence[FlatParameters], weights: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """The module's state dict with its full weights.

    Args:
        module: sharded.
        flats: its flat buffers.
        weights: full tensors, in the model's shapes, once by the parameters' names.
    """
    full = {
        id(p): weights[name] for flat in flats for name, p in zip(flat.names, flat.parameters, strict=True)
    }
    state = {name: full.get(id(value), value) for name, value in plain_state(module, flats).items()}
    return {name: value.detach() if torch.is_tensor(value) else value for name, value in state.items()}


@torch.no_grad()
def load_full_state(module: nn.Module, flats: Sequence[FlatParameters], state: Mapping[str, Any]) -> None:
    """Load full tensors. Nothing is changed if they do not fit.

    Args:
        module: at rest.
        flats: its parameters.
        state: tied ones under all of their names or one; buffers that are not saved may be there, too.

    Raises:
        ValueError: a name is missing or unknown, a tensor has another shape, or tied ones differ.
    """
    plain = plain_state(module, flats)
    unsaved = {name: buffer for name, buffer in module.named_buffers() if name in state and name not in plain}
    values = _match({**plain, **unsaved}, state)
    for flat in flats:
        flat.load([values[id(parameter)] for parameter in flat.parameters])
    for buffer in module.buffers():
        if id(buffer) in values:
            buffer.copy_(values[id(buffer)])
    for name in plain:
        path, _, leaf = name.rpartition(".")
        if leaf == _EXTRA:
            module.get_submodule(path).set_extra_state(state[name])


def _match(plain: Mapping[str, Any], state: Mapping[str, Any]) -> dict[int, torch.Tensor]:
    """By the identity of the tensor that is to be filled, the one in the state."""
    names_of: dict[int, list[str]] = {}
    for name, value in plain.items():
        names_of.setdefault(id(value) if torch.is_tensor(value) else id(name), []).append(name)
    _require([names[0] for names in names_of.values() if not any(n in state for n in names)], "has no")
    _require([name for name in state if name not in plain], "has, and the module has not,")
    values = {}
    for key, names in names_of.items():
        first, *others = [name for name in names if name in state]
        if not torch.is_tensor(plain[first]):
            continue
        values[key] = state[first]
        for name in (first, *others):
            _require_shape(name, plain[name], state[name])
        for other in others:
            if not torch.equal(state[first], state[other]):
                raise ValueError(f"{first} and {other} are tied, and the state has two values for them")
    return values


def _require_shape(name: str, wanted: torch.Tensor, given: torch.Tensor) -> None:
    if given.shape != wanted.shape:
        raise ValueError(f"{name} is {tuple(wanted.shape)}, and the state has {tuple(given.shape)}")


def _require(names: Iterable[str], what: str) -> None:
    if names := list(names):
        raise ValueError(f"the state {what} {', '.join(names)}")
