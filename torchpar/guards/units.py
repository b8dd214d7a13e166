"""Units of any module: nested, tied, with outputs in which tensors hide; and what changes in them later."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchpar.comm.collectives import Axis
from torchpar.guards.flat_parameters import FlatParameters, flatten_parameters
from torchpar.manual.zero import flat_parameters as lesson

Units = Iterable[nn.Module | Iterable[nn.Module]]
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # never called themselves
_TRANSPARENT = (torch.Tensor, int, float, complex, str, type(None))


class Unit(lesson.Unit):
    """Parameters that are unsharded and resharded together, whenever one of some modules runs.

    Attributes:
        spans: other units run inside of one of its modules, so that it is kept until the end of backward.
        is_opaque: backward may enter it unseen.
        is_shown: its modules have the parameters, and not the pieces.
        running: how many of its modules are just now in their forward.
    """

    flats: Sequence[Any]  # `FlatParameters`

    def __init__(self, modules: Sequence[nn.Module], flats: Sequence[FlatParameters]):
        super().__init__(modules, flats)
        self.spans = self.is_opaque = False
        self.is_shown = True
        self.running = 0
        self._names = {p: name for flat in flats for p, name in zip(flat.pieces, flat.names, strict=True)}

    def __getstate__(self) -> dict[str, Any]:
        """For copies: as between two passes."""
        return {**self.__dict__, "running": 0}

    @property
    def is_idle(self) -> bool:
        """True if its parameters may be resharded while others run."""
        return not self.running and not self.spans

    @property
    def is_stale(self) -> bool:
        """True if it was gathered before its pieces were changed."""
        return any(flat.is_stale for flat in self.flats)

    @property
    def version(self) -> int:
        """Grows with every change of its pieces."""
        return sum(flat.version for flat in self.flats)

    def begin_pass(self) -> None:
        """Another forward begins: gradients of parameters that the last one did not use will not come."""
        for flat in self.flats:
            flat.gradients.ready.clear()

    def wait_unshard(self) -> None:
        """Wait until the parameters are unsharded, and give them to the modules.

        Raises:
            RuntimeError: somebody has replaced or removed a piece.
        """
        if not self.is_shown:
            for holder, name, parameter, piece in self.uses:
                self._require_same(holder, name, piece)
                parameter.requires_grad_(piece.requires_grad)  # users freeze the pieces, which they see
        self.is_shown = True
        super().wait_unshard()

    def show_pieces(self) -> None:
        """Give the modules this rank's pieces, which users are to see; memory stays as it is."""
        if self.is_shown:
            super().show_pieces()
        self.is_shown = False

    def _require_same(self, holder: nn.Module, name: str, piece: nn.Parameter) -> None:
        if holder._parameters.get(name) is not piece:
            raise RuntimeError(
                f"{self._names[piece]} was replaced or removed since FSDP was made, which goes on with "
                f"the old one: write into it instead (load_state_dict without assign=True)"
            )


class Structure:
    """A module's submodules and parameters, to notice later additions.

    Args:
        module: at rest.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        self._parameters = set(module.parameters())
        self._parts = self._list_parts()

    def require_same(self) -> None:
        """RuntimeError if there are parameters that were not there before. The module is at rest."""
        if all(tuple(m._modules.values()) == now and tuple(m._parameters) == p for m, now, p in self._parts):
            return
        for name, parameter in self._module.named_parameters():
            if parameter not in self._parameters:
                raise RuntimeError(
                    f"{name} has come since FSDP was made, and each rank would train its own: change the "
                    f"module before it is wrapped"
                )
        self._parts = self._list_parts()

    def _list_parts(self) -> list[tuple[nn.Module, tuple, tuple]]:
        return [(m, tuple(m._modules.values()), tuple(m._parameters)) for m in self._module.modules()]


def default_units(module: nn.Module, *, is_listed: bool = False) -> Iterator[nn.Module]:
    """The elements of the outermost ModuleLists and Sequentials: the layers of most models.

    Args:
        module: any.
        is_listed: it is an element of such a list itself, which is never called.
    """
    is_listed = is_listed or isinstance(module, (nn.ModuleList, nn.Sequential))
    for child in module.children():
        if is_listed and not isinstance(child, _CONTAINERS):
            yield child
        else:
            yield from default_units(child, is_listed=is_listed)


def groups_of(module: nn.Module, units: Units | None) -> list[list[nn.Module]]:
    """The modules of each unit; the last unit is the module itself, for the parameters left over.

    Args:
        module: all of it.
        units: submodules, or lists of them that are one unit together; None for `default_units`.

    Raises:
        TypeError: a unit is neither a module nor a list of modules.
        ValueError: a unit is no part of the module.
    """
    chosen = default_units(module) if units is None else units
    groups = [[one] if isinstance(one, nn.Module) else list(one) for one in chosen]
    inside = set(module.modules())
    for one in (one for group in groups for one in group):
        if not isinstance(one, nn.Module):
            raise TypeError(f"units: {one!r} is no module: give submodules, or lists of them")
        if one not in inside:
            raise ValueError(f"units: this {type(one).__name__} is no part of the module that is sharded")
    return [*groups, [module]]


def make_units(
    module: nn.Module, groups: Sequence[Sequence[nn.Module]], axis: Axis, **options: Any
) -> list[Unit]:
    """Share a module's parameters out over units: its own, or the innermost that contains them.

    What is tied between two units goes to the last one.

    Args:
        module: all of it.
        groups: from `groups_of`.
        axis, options: as for `flatten_parameters`.
    """
    members: list[list[tuple[str, nn.Parameter]]] = [[] for _ in groups]
    units_with = _units_with(groups)
    for name, parameter in module.named_parameters():
        numbers = units_with[parameter]
        members[numbers.pop() if len(numbers) == 1 else -1].append((name, parameter))
    made = [
        Unit(modules, flatten_parameters(named, axis, **options))
        for modules, named in zip(groups, members, strict=True)
        if named
    ]
    for unit in made:
        within = {sub for root in unit.modules for sub in root.modules()}
        unit.spans = any(root in within for other in made if other is not unit for root in other.modules)
    return made


def _units_with(groups: Sequence[Sequence[nn.Module]]) -> dict[nn.Parameter, set[int]]:
    """By parameter, the numbers of the groups in whose modules it is: the innermost around each use."""
    roots = [(sum(1 for _ in root.modules()), number, root) for number, g in enumerate(groups) for root in g]
    innermost: dict[nn.Module, int] = {}
    for _, number, root in sorted(roots, key=lambda entry: entry[:2], reverse=True):
        innermost.update(dict.fromkeys(root.modules(), number))
    found: dict[nn.Parameter, set[int]] = {}
    for holder, number in innermost.items():
        for parameter in holder._parameters.values():
            if parameter is not None:
                found.setdefault(parameter, set()).add(number)
    return found


def is_opaque(value: object) -> bool:
    """True if a module's output holds something in which tensors may hide."""
    return not all(isinstance(leaf, _TRANSPARENT) for leaf in tree_leaves(value))
