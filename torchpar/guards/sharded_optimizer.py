"""`ShardedOptimizer` for any module, guarded: `manual.sharded_optimizer` is the lesson.

What the guards are for: optimizers that are not element-wise; steps before gradients are there, or of another
optimizer; gradients that another wrapper averages, that are left over, or that ranks do not all have; groups
that come later, closures, schedulers and `state_dict`; deep copies.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from torchpar.comm.collectives import Axis, ProcessGroup
from torchpar.guards.claims import claim, claimant_of, require_unclaimed
from torchpar.guards.elementwise import require_elementwise
from torchpar.guards.flat_gradients import agree_on_used
from torchpar.guards.flat_parameters import FlatParameters, flatten_parameters
from torchpar.guards.flat_steps import FlatSteps
from torchpar.guards.parts import axes_of
from torchpar.guards.weak_hooks import weakly
from torchpar.manual import sharded_optimizer as lesson
from torchpar.manual.launch_order import LaunchOrder
from torchpar.optimizer import clip_gradients
from torchpar.pieces import TensorsByParameter

_PARAMS, _NAMES = "params", "param_names"


class ShardedOptimizer(lesson.ShardedOptimizer):
    """Any optimizer that treats elements one by one (SGD, Adam, ...), its state shared out over a group.

    It is a torch Optimizer over the whole parameters: param groups, `add_param_group`, `step(closure)`,
    learning-rate schedulers and `state_dict` work as ever; the state is this rank's.

        >>> module = nn.Linear(8, 8)
        >>> model = DataParallel(module)
        >>> optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-2)
        >>> schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
        >>> for x in torch.randn(3, 16, 8):
        ...     model(x).square().mean().backward()
        ...     model.finish_gradient_synchronization()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     schedule.step()

    Instead of DataParallel, which leaves the mean of every gradient on every rank, it can reduce gradients
    itself, each to the rank that needs it: two thirds of the traffic. With `reduce_gradients=True` call
    `optimizer.finish_gradient_synchronization()` after the last backward, and clip with `clip_grad_norm_`.
    With `bucket_size_mb` too, gradients leave in buckets while backward goes on; put every pass of a step but
    the last in `no_sync()`.

    An optimizer has to do with its parameters alone. Buffers, such as BatchNorm's statistics, and frozen
    parameters that it is not given, DataParallel broadcasts; where there is none begin with the same frozen
    ones on all ranks, and call `buffers.broadcast_buffers(module)` before each forward.

    Args:
        params: as for any optimizer: tensors, or groups. Their values become those of the first rank, and
            their memory becomes part of a flat buffer for each group.
        optimizer_cls: such as torch.optim.AdamW. It is tried on a small matrix, whole and cut.
        group: the ranks: an Axis, a torch ProcessGroup, or None for all.
        replicate_group: ranks that hold the same shard as this one; for reduce_gradients.
        reduce_gradients: average gradients over the ranks here, and nowhere else.
        bucket_size_mb: with reduce_gradients, reduce during backward, in buckets of this size; 1 MB = 1e6
            bytes. A larger parameter gets a bucket of its own. None: after backward, each group at once.
        find_unused_parameters: with reduce_gradients, parameters may be used on some ranks only, and count as
            zero on the others; costs one small all-reduce a step, and nothing is reduced before that. Else
            every rank uses the same.
        kwargs: for optimizer_cls.

    Raises:
        ValueError: optimizer_cls does not treat elements one by one (Adafactor, Muon, LBFGS, ...); or
            bucket_size_mb is not positive, or without reduce_gradients.
    """

    kind = "ShardedOptimizer"
    flats: list[Any]  # `flat_parameters.FlatParameters`, which the lesson knows as its own

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        group: Axis | ProcessGroup | None = None,
        replicate_group: Axis | ProcessGroup | None = None,
        reduce_gradients: bool = False,
        bucket_size_mb: float | None = None,
        find_unused_parameters: bool = False,
        **kwargs: Any,
    ):
        if bucket_size_mb is not None and (bucket_size_mb <= 0 or not reduce_gradients):
            raise ValueError(f"bucket_size_mb = {bucket_size_mb}: positive, and with reduce_gradients=True")
        self._bucket_size_mb = bucket_size_mb
        self._reduces, self._find_unused = reduce_gradients, find_unused_parameters
        self._make: partial[torch.optim.Optimizer] = partial(optimizer_cls, **kwargs)
        self._names: dict[torch.Tensor, str] = {}
        self._has_stepped = False  # with gradients that have not been dropped yet
        super().__init__(
            params,
            optimizer_cls,
            group=group,
            replicate_group=replicate_group,
            bucket_size_mb=float("inf") if bucket_size_mb is None else bucket_size_mb,
            **kwargs,
        )
        self.defaults = self.inner.defaults
        self._take_defaults()

    def __getstate__(self) -> dict[str, Any]:
        """For copies: parameters and their pieces come first, because the rest refers to them."""
        for flat in self.flats:
            flat.keep_memory("parameters")
        # As ever without hooks, and without the `step` that schedulers put around the class's.
        state = {k: v for k, v in vars(self).items() if k != "step" and not k.startswith("_optimizer_")}
        at_rest = {"_has_stepped": False, "is_synchronizing": True, "order": LaunchOrder()}
        return {"flats": self.flats, **state, **at_rest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become the copy."""
        super().__setstate__(state)
        if self._reduces:
            self._claim([])
            for flat in self.flats:
                self.attach(flat)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own; later ones than the first step too."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        names = group.get(_NAMES) or [f"parameter {index}" for index in range(len(group[_PARAMS]))]
        try:
            self._require_elementwise(group)
            self._claim(list(zip(names, group[_PARAMS], strict=True)))
        except ValueError:
            self.param_groups.pop()
            raise
        if "inner" in vars(self):
            self.inner.add_param_group(self.cut(group))
            self._take_defaults()

    def cut(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Flatten a group's parameters. Returns the group of this rank's pieces, named if they are."""
        pieces = super().cut(group)
        if names := pieces.pop(_NAMES, None):
            pieces[_PARAMS] = list(zip(names, pieces[_PARAMS], strict=True))
        return pieces

    def flatten(self, named: Sequence[tuple[str, nn.Parameter]]) -> list[Any]:
        """Guarded flat buffers, (n,) each, of some parameters: one a bucket."""
        options = {"replicas": self.replicas, "keeps_full": True, "keeps_gradients": self._reduces}
        return flatten_parameters(named, self.axis, limit_bytes=self.limit_bytes, **options)

    def attach(self, flat: Any) -> None:
        """Ask to be told when a parameter has its gradient, if they are reduced here."""
        if not self._reduces:
            return
        self.order.append(flat.gradients)
        for index, parameter in enumerate(flat.parameters):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(weakly(self._take_gradient, flat, index))

    def _take_gradient(self, flat: FlatParameters, index: int) -> None:
        self._require_dropped()
        if self._bucket_size_mb is None or self._find_unused:
            flat.gradients.add(index)  # all are reduced after backward
        else:
            self.gradient_ready(flat, index, flat.parameters[index])

    def finish_gradient_synchronization(self) -> None:
        """With reduce_gradients: leave each rank the mean gradient of its pieces.

        A parameter that no rank used keeps None.

        Raises:
            RuntimeError: without find_unused_parameters, if this rank did not use a parameter of which it
                holds a piece, and others did.
        """
        self._require_reduction()
        self._require_dropped()
        for flat in self.flats:
            flat.gradients.take_all()
        if self._find_unused:
            agree_on_used([flat.gradients for flat in self.flats])
        super().finish_gradient_synchronization()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's cut of the parameters, and gather the others'. Returns the closure's loss.

        Raises:
            RuntimeError: with reduce_gradients, gradients are still each rank's own.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for flat in self.flats:
            flat.keep_memory("parameters")
            if not self._reduces:
                flat.gradients.slice_means()
            elif flat.gradients.is_awaited or any(flat.gradients.used_here):
                raise RuntimeError("call finish_gradient_synchronization() before step()")
        self._has_stepped = self._reduces
        self.update()
        return loss

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """With reduce_gradients: clip by the norm over all ranks. Returns the norm before, a scalar."""
        self._require_reduction()
        for flat in self.flats:
            flat.gradients.require_finished("clip_grad_norm_()")
        of_all = [pair for flat in self.flats for pair in zip(flat.parameters, flat.pieces, strict=True)]
        pieces = {str(number): piece for number, (_, piece) in enumerate(of_all)}
        axes = {str(number): (self.axis, *axes_of(full)) for number, (full, _) in enumerate(of_all)}
        return clip_gradients(pieces, axes.__getitem__, max_norm=max_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the parameters and of the pieces, or make them zero."""
        self._has_stepped = False
        if self._reduces:
            self.order.restart()
            for flat in self.flats:
                flat.gradients.drop(set_to_none=set_to_none)
        else:  # the next step gives each piece its part of the parameter's
            torch.optim.Optimizer.zero_grad(self, set_to_none)
            for flat in self.flats:
                for piece in flat.pieces:
                    piece.grad = None

    def piece_of(self, parameter: torch.Tensor) -> nn.Parameter:
        """This rank's piece of a parameter: 1-D, perhaps empty; the key of its state."""
        return self.piece_by_parameter[parameter]

    @property
    def elements(self) -> dict[torch.Tensor, slice]:
        """Elements of each flattened parameter, (numel,), in this rank's piece."""
        return self.elements_by_parameter

    def gather(self, pieces: TensorsByParameter) -> TensorsByParameter:
        """Full tensors, by parameter and of its shape, from all ranks' pieces (n,), such as moments."""
        return self.gather_by_parameter(pieces)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, and which part it is."""
        self.push_options()
        return {**self.inner.state_dict(), "shard": self._cut}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this rank saved.

        Raises:
            ValueError: it is another rank's part, or of another number of ranks, or of other buckets.
        """
        shard = self._cut
        if state_dict.get("shard") != shard:
            raise ValueError(f"a state of shard {state_dict.get('shard')} cannot be loaded into {shard}")
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "shard"})
        self.state = self.inner.state
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(_options(inner))

    def before_step(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """RuntimeError if another optimizer steps over parameters, any shapes, whose gradients come here."""
        if optimizer is not self:
            raise RuntimeError(
                f"the gradients of {self._names[parameters[0]]} go to a ShardedOptimizer: step that, and no "
                f"{type(optimizer).__name__}"
            )

    def before_clipping(self, parameters: Sequence[torch.Tensor]) -> None:
        """RuntimeError: the gradients are with this rank's pieces, (n,) each, and no longer here."""
        raise RuntimeError(
            f"the gradients of {self._names[parameters[0]]} go to a ShardedOptimizer: call its own "
            f"clip_grad_norm_()"
        )

    def after_step(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """As `before_step`, after a closure has made the gradients, of any shapes."""
        self.before_step(optimizer, parameters)

    def _claim(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Refuse gradients that another wrapper reduces, and pieces that are cut already."""
        if self._reduces:
            self._names.update((parameter, name) for name, parameter in named)
            claim(self, {name: parameter for parameter, name in self._names.items()})
        else:
            pieces = {name: p for name, p in named if isinstance(claimant_of(p), FlatSteps)}
            require_unclaimed(pieces)

    def _require_elementwise(self, group: dict[str, Any]) -> None:
        name = getattr(self._make.func, "__name__", repr(self._make.func))
        options = {**_options(group), **{key: v for key, v in self._make.keywords.items() if key == "lr"}}
        require_elementwise(self._make, options, name=name, device=group[_PARAMS][0].device)

    @property
    def _cut(self) -> dict[str, Any]:
        """Description of this rank's shard: equal ones hold the same elements."""
        return {"rank": self.axis.rank, "size": self.axis.size, "bucket_size_mb": self._bucket_size_mb}

    def _require_dropped(self) -> None:
        """The module's own `zero_grad` does not reach gradients that are here already."""
        if self._has_stepped:
            raise RuntimeError(
                "gradients of the last step are still there, and more come: call the optimizer's zero_grad() "
                "after step()"
            )

    def _require_reduction(self) -> None:
        if not self._reduces:
            raise RuntimeError("this optimizer does not reduce gradients: make it with reduce_gradients=True")

    def _take_defaults(self) -> None:
        """Options that the optimizer's class has defaults for, which schedulers and users look for here."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            for key, value in _options(inner).items():
                group.setdefault(key, value)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in (_PARAMS, _NAMES)}
