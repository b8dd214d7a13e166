"""Units of a fully sharded module: the parameters that are unsharded together."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchpar.comm.collectives import Axis
from torchpar.manual.zero.flat_parameters import FlatParameters, flatten_parameters

Units = Iterable[nn.Module | Iterable[nn.Module]]
Use = tuple[nn.Module, str, nn.Parameter]  # a module, and under which name it has a parameter
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # never called themselves
_TRANSPARENT = (torch.Tensor, int, float, complex, str, type(None))


class Unit:
    """Parameters that are unsharded and resharded together, whenever one of some modules runs.

    Attributes:
        modules: while one of these runs, the parameters are unsharded.
        flats: the parameters, as they are cut.
        spans: other units run inside of one of its modules, so that it is kept until the end of backward.
        is_opaque: backward may enter it unseen.
        is_shown: its modules have the parameters, and not the pieces.
        running: how many of its modules are just now in their forward.
    """

    def __init__(self, modules: Sequence[nn.Module], flats: list[FlatParameters], uses: list["Use"]):
        self.modules = modules
        self.flats = flats
        self.spans = self.is_opaque = False
        self.is_shown = True
        self.running = 0
        self._arrived: set[nn.Parameter] = set()
        piece_of = {p: piece for flat in flats for p, piece in zip(flat.parameters, flat.pieces, strict=True)}
        self._swaps = [(module, name, p, piece_of[p]) for module, name, p in uses]
        self._names = {p: name for flat in flats for p, name in zip(flat.pieces, flat.names, strict=True)}

    def __getstate__(self) -> dict[str, Any]:
        """For copies: as between two passes."""
        return {**self.__dict__, "running": 0, "_arrived": set()}

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

    def wait_unshard(self) -> None:
        """Wait until the parameters are unsharded, and show them to the modules."""
        for flat in self.flats:
            flat.wait_unshard()
        if self.is_shown:
            return
        self.is_shown = True
        for module, name, parameter, piece in self._swaps:
            if module._parameters.get(name) is not piece:
                raise RuntimeError(
                    f"{self._names[piece]} was replaced or removed since FSDP was made, which goes on with "
                    f"the old one: write into it instead (load_state_dict without assign=True)"
                )
            parameter.requires_grad_(piece.requires_grad)  # users freeze the pieces, which they see
            module._parameters[name] = parameter

    def show_pieces(self) -> None:
        """Show the modules this rank's pieces, which users are to see; memory stays as it is."""
        if not self.is_shown:
            return
        self.is_shown = False
        for module, name, _, piece in self._swaps:
            module._parameters[name] = piece

    def add_gradient(self, flat: FlatParameters, index: int) -> bool:
        """Take in a gradient. Returns whether it was the unit's last of this backward."""
        flat.gradients.add(index)
        self._arrived.add(flat.parameters[index])
        expected = sum(p.requires_grad for f in self.flats for p in f.parameters)
        if len(self._arrived) < expected:
            return False
        self._arrived.clear()
        return True

    def begin_pass(self) -> None:
        """Another forward begins: gradients of parameters that the last one did not use will not come."""
        self._arrived.clear()


class Structure:
    """A module's submodules and parameters, to notice what has come since.

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


def make_units(module: nn.Module, units: Units | None, axis: Axis, **options) -> list[Unit]:
    """Share a module's parameters out over units: its own, or the innermost that contains them.

    What is in none, or tied between two, goes to the unit of the module itself, which comes last.

    Args:
        module: all of it.
        units: submodules, or lists of them that are one unit together; None for `default_units`.
        axis, options: as for `flatten_parameters`.

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
    groups.append([module])
    roots = [(sum(1 for _ in root.modules()), index, root) for index, g in enumerate(groups) for root in g]
    innermost: dict[nn.Module, int] = {}
    for _, index, root in sorted(roots, key=lambda entry: entry[:2], reverse=True):
        innermost.update(dict.fromkeys(root.modules(), index))
    uses: dict[nn.Parameter, list[Use]] = {}
    for submodule in innermost:
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                uses.setdefault(parameter, []).append((submodule, name, parameter))
    members: list[list[tuple[str, nn.Parameter]]] = [[] for _ in groups]
    for name, parameter in module.named_parameters():
        indices = {innermost[submodule] for submodule, _, _ in uses[parameter]}
        members[indices.pop() if len(indices) == 1 else -1].append((name, parameter))
    made = [
        Unit(roots, flatten_parameters(named, axis, **options), [use for _, p in named for use in uses[p]])
        for roots, named in zip(groups, members, strict=True)
        if named
    ]
    for unit in made:
        within = {sub for root in unit.modules for sub in root.modules()}
        unit.spans = any(root in within for other in made if other is not unit for root in other.modules)
    return made


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors of a module's output that backward goes through."""
    leaves = tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def is_opaque(value: object) -> bool:
    """True if a module's output holds something in which tensors may hide."""
    return not all(isinstance(leaf, _TRANSPARENT) for leaf in tree_leaves(value))
