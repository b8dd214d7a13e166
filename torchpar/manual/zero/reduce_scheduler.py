"""Order of reductions: when the gradients of each unit of a fully sharded module leave for other ranks."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from torchpar.guards.weak_hooks import weakly
from torchpar.manual.zero.flat_gradients import FlatGradients, used_on_any_rank
from torchpar.manual.zero.flat_parameters import FlatParameters
from torchpar.manual.zero.units import Unit


class ReduceScheduler:
    """Reduces each unit as soon as backward has left all of its gradients; at most two hold full ones.

    Args:
        units: in the order of forward.
        reduce_scatter, all_reduce: the strategy's: begin to sum gradients over the shards, and wait for
            that to sum them over the replicas.
        must_agree: ranks use different parameters, and all units wait until they have agreed on which.

    Attributes:
        is_synchronizing: False while gradients are only accumulated.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        reduce_scatter: Callable[..., None],
        all_reduce: Callable[[FlatGradients], None],
        must_agree: bool,
    ):
        self._units, self._must_agree = units, must_agree
        self._reduce_scatter, self._all_reduce = reduce_scatter, all_reduce
        self.is_synchronizing = True
        self._last: Unit | None = None  # whose reduce_scatter has begun
        self._hooked: set[nn.Parameter] = set()

    def __getstate__(self) -> dict[str, Any]:
        """For copies: at rest, and without hooks."""
        return {**self.__dict__, "is_synchronizing": True, "_last": None, "_hooked": set()}

    def are_awaited(self) -> bool:
        """True if gradients are being accumulated, or are on their way to the pieces."""
        flats = (flat for unit in self._units for flat in unit.flats)
        return not self.is_synchronizing or any(flat.gradients.is_awaited for flat in flats)

    def watch(self, unit: Unit) -> None:
        """Have the gradients of a unit's parameters taken in; also of one that was frozen before."""
        for flat in unit.flats:
            for index, parameter in enumerate(flat.parameters):
                if parameter.requires_grad and parameter not in self._hooked:
                    self._hooked.add(parameter)
                    hook = weakly(self._gradient_ready, unit, flat, index)
                    parameter.register_post_accumulate_grad_hook(hook)

    def reduce_all(self) -> None:
        """Begin to reduce what is not under way yet, in the order of backward."""
        if not self._must_agree:
            for unit in reversed(self._units):
                self._reduce(unit)
            return
        all_gradients = [flat.gradients for unit in reversed(self._units) for flat in unit.flats]
        for gradients, used in zip(all_gradients, used_on_any_rank(all_gradients), strict=True):
            self._reduce_scatter(gradients, used)

    def reset(self) -> None:
        """No reduction is under way."""
        self._last = None

    def _gradient_ready(self, unit: Unit, flat: FlatParameters, index: int) -> None:
        is_complete = unit.add_gradient(flat, index)
        if is_complete and self.is_synchronizing and not self._must_agree:
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        if self._last:
            for flat in self._last.flats:
                self._all_reduce(flat.gradients)
        for flat in unit.flats:
            self._reduce_scatter(flat.gradients)
        self._last = unit
