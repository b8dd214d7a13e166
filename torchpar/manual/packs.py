"""Parameters put together into flat memory, up to a size."""

from collections.abc import Iterable

from torch import nn


def pack(
    named: Iterable[tuple[str, nn.Parameter]], limit_bytes: float = float("inf")
) -> list[list[tuple[str, nn.Parameter]]]:
    """Packs of parameters, in their order, of one dtype and device, and all trainable or all frozen.

    Args:
        named: any shapes, by name.
        limit_bytes: a pack is closed before it would pass this; 0 gives every parameter its own.
    """
    packs: list[list[tuple[str, nn.Parameter]]] = []
    unfinished: dict[tuple, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        kind = (parameter.dtype, parameter.device, parameter.requires_grad)
        members = unfinished.get(kind)
        if members is None or sum(p.nbytes for _, p in members) + parameter.nbytes > limit_bytes:
            members = unfinished[kind] = []
            packs.append(members)
        members.append((name, parameter))
    return packs
