"""Sites of tensor parallelism in a model: the modules that have a weight which it splits."""

from typing import Any, NamedTuple

from flax import nnx
from flax.traverse_util import flatten_dict

from compare.spec.axes import LAYER, TP
from jaxpar.model import Embedding, Linear, cross_entropy
from jaxpar.problem import Problem

Path = tuple[Any, ...]
SPLIT_WEIGHT = {Linear: "weight", Embedding: "token"}
"""The parameter that says how a module is split. A subclass is left alone: what it adds would be lost."""


class Site(NamedTuple):
    """A module with a split weight."""

    path: Path
    """Its keys in the tree of parameters: ("blocks", "mlp", "up")."""
    module: Any
    """A `Linear` or an `Embedding`."""
    dim: int
    """The split dim of the weight, counted after the layers' dim."""

    @property
    def splits_inputs(self) -> bool:
        """True if a Linear's inputs are split (row parallel), and not its outputs (column parallel)."""
        return type(self.module) is Linear and self.dim < self.module.contracted

    def replace(self, model: Any, module: nnx.Module) -> None:
        """Put another module in this one's place."""
        owner, key = module_at(model, self.path[:-1]), self.path[-1]
        if isinstance(key, str):
            setattr(owner, key, module)
        else:
            owner[key] = module


def find_sites(model: Any, problem: Problem, placements: Any) -> list[Site]:
    """Every `Linear` and `Embedding` of the model whose weight tp splits.

    Raises:
        ValueError: one that cannot be split so, or a vocabulary whose loss we do not know.
    """
    axes, sites = flatten_dict(problem.axes), []
    for path, placement in flatten_dict(placements).items():
        module = module_at(model, path[:-1])
        if TP not in placement.dims or SPLIT_WEIGHT.get(type(module)) != path[-1]:
            continue
        site = Site(path[:-1], module, placement.dims[TP] - axes[path].count(LAYER))
        _check(site, axes)
        sites.append(site)
    if problem.vocab_size and getattr(model, "cross_entropy", None) is not cross_entropy:
        raise ValueError(
            "layout.tp splits the dim named vocab, and so puts another loss in the place of the model's "
            "cross_entropy, which must be jaxpar.model.cross_entropy: use it, or name the dim otherwise"
        )
    return sites


def module_at(model: Any, path: Path) -> Any:
    """The module that has the parameters under these keys; None if there is no such thing."""
    found: Any = model
    for key in path:
        if found is None:
            break
        found = getattr(found, key, None) if isinstance(key, str) else found[key]
    return found


def dotted(path: Path) -> str:
    """The name that we give to keys."""
    return ".".join(map(str, path))


def _check(site: Site, axes: dict[Path, tuple[str, ...]]) -> None:
    def of(key: str) -> tuple[str, ...]:
        return tuple(axis for axis in axes.get((*site.path, key), ()) if axis != LAYER)

    name = dotted(site.path)
    if isinstance(site.module, Embedding):
        if site.dim:
            raise ValueError(f"{name}.token has the axes {of('token')}: tp can split the first of them only")
        return
    bias, outputs = of("bias"), of("weight")[site.module.contracted :]
    if bias and bias != outputs:
        raise ValueError(
            f"{name}.bias has the axes {bias}, and the outputs of {name}.weight are {outputs}: they are "
            "split together, so give them the same names"
        )
