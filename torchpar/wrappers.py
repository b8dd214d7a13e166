"""The lessons' strategies for modules that train as usual: `DataParallel`, `FSDP`, `ShardedOptimizer`.

As usual: tied, frozen and unused parameters, buffers, passes that accumulate, several param groups,
optimizers that treat elements one by one, and whole states out and in. A step, or a clipping, before the
gradients are synchronised is an error. What is beyond that is refused, in a line that names PyTorch's class
for it: DistributedDataParallel, ZeroRedundancyOptimizer, fully_shard. Nothing of PyTorch is replaced: pieces
of tensors, and parts of sums, are of classes of their own, which refuse what is wrong on them.

    model = FSDP(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x in batches:                                  # this rank's share of each
        model(x).square().mean().backward()
        model.finish_gradient_synchronization()        # the mean over all ranks
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from compare.contract.communication import UNUSED
from torchpar.comm.collectives import Axis
from torchpar.manual import data_parallel, fully_sharded, sharded_optimizer
from torchpar.manual.data_parallel import Bucket
from torchpar.manual.flat import replicate
from torchpar.manual.flat_parameters import FlatGradients, FlatParameters, Unit, gather_pieces, pieces_of
from torchpar.optimizer import gradient_norm, scale_gradients

DDP, ZERO, FSDP2 = "DistributedDataParallel", "ZeroRedundancyOptimizer", "fully_shard"
ELEMENTWISE = {
    *("SGD", "ASGD", "Rprop", "RMSprop", "Adagrad", "Adadelta"),
    *("Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
}
"""Classes of torch.optim that compute the same on pieces of tensors as on tensors."""
FINISH = "call finish_gradient_synchronization() first"
OF_THE_WHOLE = {"dim", "ndim", "ndimension", "shape", "size", "_amp_foreach_non_finite_check_and_unscale_"}
"""What a piece cannot tell of a parameter: its dims, and whether a gradient is finite on all ranks."""


class Piece(torch.Tensor):
    """This rank's piece of a parameter or of its gradient, (n,): right is what looks at elements one by one.

    A single number of it, such as a norm, is refused. So are its dims: by `p.dim() >= 2` none would decay.
    """

    gradients: FlatGradients | None = None

    @classmethod
    def __torch_function__(cls, func, types, args: Sequence[Any] = (), kwargs=None):
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__  # of an attribute
        if name == "grad" and args[0].gradients and args[0].gradients.used:
            raise RuntimeError(f"gradients are not the mean over ranks: {FINISH}")
        if name not in OF_THE_WHOLE:
            result = super().__torch_function__(func, types, args, kwargs)
            with DisableTorchFunctionSubclass():
                leaves = tree_leaves(result)
                if all(leaf.dim() for leaf in leaves if isinstance(leaf, torch.Tensor)):
                    return result
        raise RuntimeError(
            f"{name} of this rank's pieces is not that of the whole: choose param groups by name, from "
            "FSDP.pieces, clip by FSDP.clip_grad_norm_, and use no GradScaler"
        )


class Unfinished(torch.Tensor):
    """A gradient that is not the mean over ranks yet: nothing may be read from it, or written to it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ != "__get__":
            raise RuntimeError(f"{func.__name__} before gradients are the mean over ranks: {FINISH}")
        return super().__torch_function__(func, types, args, kwargs)


class Guarded(nn.Module):
    """What `DataParallel` and `FSDP` have in common."""

    module: nn.Module
    is_synchronizing: bool

    def _watch(self, axes: Sequence[Axis | None], parameters: Iterable[torch.Tensor], unused: bool) -> None:
        """Make buffers the first rank's, and look at every `step()` of an optimizer over the parameters."""
        self._axes, self._buffers_are_due = [axis for axis in axes if axis], True
        self._find_unused = unused
        self._unfinished = 0  # 1: gradients are accumulating, 2: the last backward was there
        replicate(self.module.buffers(), self._axes)
        ids, reference = {id(parameter) for parameter in parameters}, weakref.ref(self)

        def before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
            wrapper = reference()
            theirs = any(id(p) in ids for group in optimizer.param_groups for p in group["params"])
            if wrapper is not None and theirs:
                wrapper.before_step(optimizer)

        weakref.finalize(self, register_optimizer_step_pre_hook(before_step).remove)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._unfinished:
            raise RuntimeError(f"step() before gradients are the mean over ranks: {FINISH}")

    def forward(self, *args, **kwargs):
        if self._unfinished == 2 and torch.is_grad_enabled():
            raise RuntimeError(f"forward after a backward without no_sync(): {FINISH}")
        if self._buffers_are_due:  # DDP's rule: not after an evaluation, nor within accumulated passes
            replicate(self.module.buffers(), self._axes)
        self._buffers_are_due = self.is_synchronizing and torch.is_grad_enabled()
        return super().forward(*args, **kwargs)

    def _used(self, here: Sequence[bool], names: Sequence[str]) -> list[bool]:
        """Whether any rank has used each parameter; an error where all have to."""
        if not self._find_unused:
            for name in (name for name, is_used in zip(names, here, strict=True) if not is_used):
                raise RuntimeError(f"{name} took no part in the loss: set find_unused_parameters=True")
            return list(here)
        flags = torch.tensor(here, dtype=torch.int32, device=next(self.module.parameters()).device)
        for axis in self._axes:
            axis.all_reduce(flags, purpose=UNUSED)
        return flags.bool().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Guarded":
        raise RuntimeError(f"a copy would share hooks: load the whole state into another, or use {DDP}")

    def _apply(self, fn: Any, recurse: bool = True) -> "Guarded":
        raise RuntimeError("convert or move the module before it is wrapped")


class DataParallel(Guarded, data_parallel.DataParallel):
    """Averages the gradients of a module over the ranks: see `manual.data_parallel`.

    Parameters and buffers become those of the first rank. With `find_unused_parameters` a parameter that no
    rank uses has no gradient; one used on some ranks counts as zero on the others. That costs one small
    all-reduce a step. Options: gradient_sync, bucket_size_mb and group.
    """

    def __init__(self, module: nn.Module, *, find_unused_parameters: bool = False, **options: Any):
        require_usual(module)
        super().__init__(module, **options)
        self._watch([self.axis], module.parameters(), find_unused_parameters)

    def gradient_ready(self, bucket: Bucket, index: int, parameter: torch.Tensor) -> None:
        self._unfinished = max(self._unfinished, 1 + self.is_synchronizing)
        with DisableTorchFunctionSubclass():
            super().gradient_ready(bucket, index, parameter)
            assert parameter.grad is not None
            parameter.grad = parameter.grad.as_subclass(Unfinished)

    def finish_gradient_synchronization(self) -> None:
        parameters = [parameter for bucket in self.buckets for parameter in bucket.parameters]
        names = [name for bucket in self.buckets for name in bucket.names]
        used = self._used([parameter.grad is not None for parameter in parameters], names)
        for parameter in parameters:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            with DisableTorchFunctionSubclass():
                parameter.grad = gradient.as_subclass(torch.Tensor)
        super().finish_gradient_synchronization()
        for parameter, is_used in zip(parameters, used, strict=True):
            parameter.grad = parameter.grad if is_used else None
        self._unfinished = 0


class FSDP(Guarded, fully_sharded.FSDP):
    """Shards parameters, gradients and optimizer state over the ranks: see `manual.fully_sharded`.

    An optimizer over `parameters()` has this rank's pieces: 1-D, perhaps empty. So choose param groups by
    name, from `pieces`. Every rank runs the same units in the same order: submodules, or lists of them that
    are gathered together; by default the elements of the outermost ModuleLists and Sequentials. What is in
    none stays gathered to the end of the step. Gradients are reduced after backward if it is to find unused
    ones. Options: group, replicate_group, zero (2 or 3), reshard_after_forward.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        units: Iterable[nn.Module | Iterable[nn.Module]] | None = None,
        find_unused_parameters: bool = False,
        **options: Any,
    ):
        require_usual(module)
        if options.get("zero", 3) not in (2, 3):
            raise ValueError("zero: FSDP has 2 and 3; for 1 use ShardedOptimizer")
        chosen = default_units(module) if units is None else units
        groups = grouped(module, ([u] if isinstance(u, nn.Module) else list(u) for u in chosen))
        names = {parameter: name for name, parameter in module.named_parameters()}
        super().__init__(module, units=groups, **options)
        piece_of = pieces_of(self.flats)
        self.pieces = {name: piece_of[parameter] for parameter, name in names.items()}
        axes = [self.axis, self.flats[0].replicas]
        self._watch(axes, self.pieces.values(), find_unused_parameters)
        module.__dict__["state_dict"] = self._refuse_state_dict
        mark_pieces(self.flats, Piece)

    @torch.compiler.disable  # units may be compiled, each for itself
    def forward(self, *args, **kwargs):
        for flat in self.flats:
            memory = flat.shard.untyped_storage().data_ptr()
            for name, parameter, piece in zip(flat.names, flat.parameters, flat.pieces, strict=True):
                is_same = piece.untyped_storage().data_ptr() == memory
                if not (is_same and parameter.requires_grad == piece.requires_grad):
                    raise RuntimeError(f"{name} was replaced, frozen or thawed since FSDP began: use {FSDP2}")
        mark_pieces(self.flats, Piece)  # after a step they are parameters
        with saved_tensors_hooks(self._keep, self._read_again):
            return super().forward(*args, **kwargs)

    @torch.compiler.disable
    def before_forward(self, unit: Unit, module: nn.Module, args: tuple) -> None:
        super().before_forward(unit, module, args)

    def before_backward(self, unit: Unit) -> None:
        """Without gathering ahead: a weight that backward reads unseen has no memory then, and raises."""
        if torch.is_grad_enabled():  # who reads the new graph is not seen
            raise RuntimeError("a second derivative reads freed weights: set reshard_after_forward=False")
        self.enter(unit, ())

    def _keep(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int, Unit | None]:
        """What autograd keeps for backward, its version, and if it is a weight that is freed, its unit."""
        memory = tensor.untyped_storage().data_ptr() if torch._C._has_storage(tensor) else 0
        for unit in (unit for unit in self._unsharded if not unit.stays):
            if any(memory == flat.full.untyped_storage().data_ptr() for flat in unit.flats):
                return tensor, tensor._version, unit
        return tensor, tensor._version, None

    def _read_again(self, kept: tuple[torch.Tensor, int, Unit | None]) -> torch.Tensor:
        """Gather what backward reads, even by a way that no output shows: a loss that a block keeps."""
        tensor, version, unit = kept
        if tensor._version != version:
            raise RuntimeError("a tensor that backward reads was changed in place since forward")
        if unit:
            self.before_backward(unit)
        return tensor

    def gradient_ready(self, unit: Unit, flat: FlatParameters, index: int, parameter: torch.Tensor) -> None:
        self._unfinished = max(self._unfinished, 1 + self.is_synchronizing)
        if self._find_unused:
            flat.gradients.add(index)  # reduced once it is known which are used
        else:
            super().gradient_ready(unit, flat, index, parameter)

    def finish_gradient_synchronization(self) -> None:
        places = [(flat, index) for flat in self.flats for index in flat.trainable]
        here = [index in flat.gradients.used for flat, index in places]
        used = self._used(here, [flat.names[index] for flat, index in places])
        for (flat, index), is_used, is_used_here in zip(places, used, here, strict=True):
            if is_used and not is_used_here:
                flat.parameters[index].grad = torch.zeros_like(flat.parameters[index])
                flat.gradients.add(index)
        with DisableTorchFunctionSubclass():
            super().finish_gradient_synchronization()
        mark_pieces(self.flats, Piece)
        self._unfinished = 0

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().before_step(optimizer)
        require_elementwise(type(optimizer))
        mark_pieces(self.flats, None)  # it may make its state of them
        self.reshard_all()  # what is gathered will be old

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip by the norm over all ranks' pieces. Returns the norm before: a scalar, the same everywhere."""
        if self._unfinished:
            raise RuntimeError(f"clip_grad_norm_: {FINISH}")
        axis_of = {piece: flat.axis for flat in self.flats for piece in flat.pieces}
        pieces = {str(number): piece for number, piece in enumerate(axis_of)}
        with DisableTorchFunctionSubclass():
            norm = gradient_norm(pieces, {name: (axis_of[piece],) for name, piece in pieces.items()})
            scale_gradients(pieces, norm, max_norm=max_norm)
        return norm

    def full_state_dict(self) -> dict[str, Any]:
        """The `state_dict()` of the wrapped module as if it were not sharded, on every rank."""
        piece_of = pieces_of(self.flats)
        with DisableTorchFunctionSubclass():
            full = gather_pieces(self.flats, {p: piece.detach() for p, piece in piece_of.items()})
        by_piece = {piece: full[parameter] for parameter, piece in piece_of.items()}
        return {name: by_piece.get(value, value) for name, value in self._state().items()}

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict()` of the unwrapped module, or a `full_state_dict`, the same on all ranks.

        Raises ValueError, and changes nothing, where a name is missing or unknown, or a shape is another one.
        """
        self.reshard_all()
        parameters = {piece: parameter for parameter, piece in pieces_of(self.flats).items()}
        targets = {name: parameters.get(target, target) for name, target in self._state().items()}
        theirs, ours = ({n: tuple(t.shape) for n, t in named.items()} for named in (state, targets))
        if differing := sorted(dict(theirs.items() ^ ours.items())):
            raise ValueError(f"names or shapes that differ: {', '.join(differing)}")
        values = {target: state[name] for name, target in targets.items()}
        for flat in self.flats:
            full = flat.full.new_empty(flat.full.shape)
            for index, parameter in enumerate(flat.parameters):
                flat.view(full, index).copy_(values.pop(parameter))
            flat.shard.copy_(full[flat.own])
        for buffer, value in values.items():
            buffer.copy_(value)

    @staticmethod
    def _refuse_state_dict(*arguments: Any, **options: Any) -> NoReturn:
        raise RuntimeError("state_dict() would have this rank's pieces alone: use full_state_dict()")

    def _state(self) -> dict[str, torch.Tensor]:
        """The module's own state dict, with pieces for parameters."""
        return type(self.module).state_dict(self.module, keep_vars=True)


class ShardedOptimizer(sharded_optimizer.ShardedOptimizer):
    """An optimizer that treats elements one by one, its state shared out: see `manual.sharded_optimizer`.

    Gradients are the mean over ranks already: DataParallel's, clipped as usual.
    """

    def __init__(self, params: Iterable[Any], optimizer_cls: type[torch.optim.Optimizer], **options: Any):
        require_elementwise(optimizer_cls)
        super().__init__(params, optimizer_cls, reduce_gradients=False, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "inner" in vars(self):
            raise RuntimeError(f"a param group after the start: use {ZERO}")
        super().add_param_group(param_group)

    def finish_gradient_synchronization(self) -> NoReturn:
        raise RuntimeError("an optimizer takes gradients as they are: reduce them by DataParallel")

    def step(self, closure: Any = None) -> Any:
        """Update from the means: each piece takes its part of a full gradient."""
        if closure is not None:
            raise ValueError("step(closure): a closure's gradients would not be reduced; step after backward")
        for flat in self.flats:
            for index, (parameter, piece) in enumerate(zip(flat.parameters, flat.pieces, strict=True)):
                gradient, piece.grad = parameter.grad, None
                if gradient is not None:
                    if gradient.stride() != parameter.stride():
                        gradient = torch.empty_like(parameter).copy_(gradient)
                    piece.grad = gradient.as_strided((gradient.numel(),), (1,))[flat.elements_of(index)]
        super().step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        torch.optim.Optimizer.zero_grad(self, set_to_none)  # parameters that keep their gradients

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.state = self.inner.state
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({**inner, "params": group["params"]})


def mark_pieces(flats: Sequence[FlatParameters], mark: type[Piece] | None) -> None:
    """Make pieces and their gradients `Piece`s, or what they were."""
    with DisableTorchFunctionSubclass():
        for flat in flats:
            for piece in flat.pieces:
                if piece.grad is not None:
                    piece.grad = piece.grad.as_subclass(mark or torch.Tensor)
                piece.__class__ = mark or nn.Parameter
                vars(piece).update(_is_param=True, gradients=flat.gradients)


def require_usual(module: nn.Module) -> None:
    """Refuse what is seen before training, and not usual."""
    for name, parameter in module.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise ValueError(f"gradients of {name} go to a wrapper already: use one of the two")
    for name, part in module.named_modules():
        if getattr(part, "sparse", False):
            raise ValueError(f"{name} has sparse gradients: use a dense embedding")


def require_elementwise(optimizer_cls: type[torch.optim.Optimizer]) -> None:
    """Refuse an optimizer that may look at rows or norms; `is_elementwise = True` vouches for yours."""
    name = optimizer_cls.__name__
    is_known = optimizer_cls.__module__.startswith("torch.optim.") and name in ELEMENTWISE
    if not (is_known or getattr(optimizer_cls, "is_elementwise", False)):
        raise ValueError(
            f"{name} may not treat elements one by one: use {FSDP2}, or set is_elementwise = True"
        )


_UNCALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def default_units(module: nn.Module, *, is_listed: bool = False) -> Iterator[nn.Module]:
    """The elements of the outermost ModuleLists and Sequentials: the layers of most models."""
    is_listed = is_listed or isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module.children():
        if is_listed and not isinstance(child, _UNCALLED):
            yield child
        else:
            yield from default_units(child, is_listed=is_listed)


def grouped(module: nn.Module, units: Iterable[Sequence[nn.Module]]) -> list[list[nn.Module]]:
    """Units that share no parameter: those that do are joined. The module itself is last, for all that is in
    none, or shared with what is in none."""
    units = list(units)
    parts = [part for unit in units for root in unit for part in root.modules()]
    if len(set(parts)) < len(parts) or not set(parts) <= set(module.modules()):
        raise ValueError(f"a unit is no part of the module, or in another one's, too: use {FSDP2}")
    outside = [part for part in module.modules() if part not in set(parts)]
    groups = [({p for part in outside for p in part.parameters(recurse=False)}, [module])]
    for unit in units:
        parameters, members = {p for part in unit for p in part.parameters()}, list(unit)
        for group in [group for group in groups if group[0] & parameters]:
            groups.remove(group)
            parameters, members = group[0] | parameters, group[1] + members
        groups.append((parameters, members))
    joined = [[module] if module in members else members for parameters, members in groups if parameters]
    return sorted(joined, key=lambda members: module in members)
