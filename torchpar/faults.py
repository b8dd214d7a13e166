"""Faults to plant on purpose, so that the ladder is seen to catch them: `FAULTS`, for `contract.faults`.

A fault holds for what is built and run inside.
"""

from collections.abc import Callable, Collection, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

from compare.contract import faults as contract
from compare.contract.communication import ACTIVATIONS, GRADIENTS, REPLICATED_GRADIENTS, TIED_GRADIENTS
from compare.contract.faults import PlantedFault
from compare.spec.axes import AXES, DP_REPLICATE, DP_SHARD, EP, PP, ROWS, TP
from torchpar import dropout, library, train
from torchpar import run as batches
from torchpar.comm.collectives import DONE, Axis, Work, chunk_slices
from torchpar.compiler import data_parallel as placed_data_parallel
from torchpar.compiler import tensor_parallel as placed_tensor_parallel
from torchpar.compiler.placement import of_activation
from torchpar.dtensors import Placements, axis_names, local_part
from torchpar.library import tensor_parallel
from torchpar.manual import context_parallel
from torchpar.manual.megatron import leave_region
from torchpar.manual.stage import Stage
from torchpar.manual.tensor_parallel import RowParallelLinear
from torchpar.mlp import Balance, Choice
from torchpar.model import GPT
from torchpar.parallel_model import Parameters, Strategy, local
from torchpar.run import Run

# At a collective of torch-manual, by mesh axis and purpose --------------------------------------------------


def wrong_call(
    method: str, instead: Callable[..., Work], *, axis: str, purpose: str
) -> AbstractContextManager:
    """In place of a collective `instead(call, axis, *tensors)`, where `call(*tensors)` is the right one."""
    right, wrong = getattr(Axis, method), (axis, purpose)

    def changed(self: Axis, *tensors: torch.Tensor, purpose: str = "", **options: Any) -> Work:
        call = partial(right, self, purpose=purpose, **options)
        return instead(call, self, *tensors) if (self.name, purpose) == wrong else call(*tensors)

    return patch.object(Axis, method, changed)


@contextmanager
def left_out_reductions(**place: str) -> Generator[None]:
    """Each rank goes on with its part of the sum."""

    def no_reduce_scatter(call: Any, axis: Axis, piece: torch.Tensor, full: torch.Tensor) -> Work:
        piece.copy_(full[chunk_slices(len(full), axis.size)[axis.rank]])
        return DONE

    no_all_reduce = wrong_call("start_all_reduce", lambda call, axis, tensor: DONE, **place)
    with no_all_reduce, wrong_call("start_reduce_scatter", no_reduce_scatter, **place):
        yield


times_ranks = partial(wrong_call, "start_all_reduce", lambda call, axis, tensor: call(tensor.mul_(axis.size)))
"""A mean becomes the sum."""
sent_zeros = partial(wrong_call, "start_send", lambda call, axis, tensor: call(torch.zeros_like(tensor)))
"""Messages arrive as zeros: each rank goes on with its part of a sum."""


def doubled_row_bias() -> AbstractContextManager:
    """Every rank adds the bias before the sum over ranks."""

    def forward(self: RowParallelLinear, x: torch.Tensor) -> torch.Tensor:
        part = nn.functional.linear(x, self.weight, self.bias)
        return leave_region(part, self.axis, self.sequence_dim)

    return patch.object(RowParallelLinear, "forward", forward)


def forgotten_hop() -> AbstractContextManager:
    """What the neighbour sends round the ring is handed on, and no query sees it."""
    right = context_parallel.pass_round

    def wrong(*args: Any) -> Generator[Any]:
        yield from (block for hop, block in enumerate(right(*args)) if hop != 1)

    return patch.object(context_parallel, "pass_round", wrong)


def stopped_maximum() -> AbstractContextManager:
    """A row's sum of exponentials is taken for a constant, as behind two stop_gradients: v alone is right."""
    right = context_parallel.attend_backward

    def wrong(*args: torch.Tensor, **options: Any) -> Any:
        *others, dot_BKGR = args
        return right(*others, torch.zeros_like(dot_BKGR), **options)

    return patch.object(context_parallel, "attend_backward", wrong)


def wrong_choice(
    wrong: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> AbstractContextManager:
    """Of a router's weights, chosen experts (B, T, k) and logits (B, T, E): other weights and experts."""
    right = Choice.forward

    def forward(self: Choice, x_BTC: torch.Tensor, router_EC: torch.Tensor) -> Any:
        *chosen, probability_E = right(self, x_BTC, router_EC)
        return *wrong(*chosen, nn.functional.linear(x_BTC, router_EC)), probability_E

    return patch.object(Choice, "forward", forward)


def of_next_expert(weights: torch.Tensor, chosen: torch.Tensor, logits: torch.Tensor) -> Any:
    return weights, ((chosen + 1) % logits.shape[-1]).sort().values


def unrenormalised(weights: torch.Tensor, chosen: torch.Tensor, logits: torch.Tensor) -> Any:
    return logits.softmax(-1).gather(-1, chosen), chosen


def local_balance() -> AbstractContextManager:
    """The load-balance loss has each rank's own shares of its own choices; what is recorded is of all."""
    right = Balance.forward

    def forward(self: Balance, *args: torch.Tensor) -> torch.Tensor:
        with patch.object(self, "total_counts", lambda counts_LE: counts_LE):
            loss = right(self, *args)
        self.tokens_LE = self.total_counts(self.tokens_LE)
        return loss

    return patch.object(Balance, "forward", forward)


def averaged_experts(run: Run) -> None:
    """Ranks of ep take the mean of gradients that are of other experts each."""
    axis, parallel = run.mesh[EP], run.parallel

    def finish(parameters: Parameters) -> None:
        for name in sorted(parameters):
            if ".mlp.c_" in name:
                gradient = parameters[name].grad
                assert gradient is not None
                axis.all_reduce(local(gradient).div_(axis.size), purpose=GRADIENTS)

    run.parallel = parallel.under(Strategy(finish=finish))


# In what a user gives to PyTorch's wrappers -----------------------------------------------------------------


def without_reduction(run: Run) -> None:
    """DDP only accumulates, as in its `no_sync`: gradients stay each replica's own."""
    ddp: Any = run.parallel.module
    ddp.require_backward_grad_sync = False


def undivided_sum(run: Run) -> None:
    """DDP's sum over the replicas stays a sum."""

    def summed(group: dist.ProcessGroup, bucket):  # DDP refuses another annotation than its own
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp: Any = run.parallel.module
    ddp.register_comm_hook(ddp.process_group, summed)


def unsummed_rows() -> AbstractContextManager:
    """Row-parallel layers leave partial sums; the embedding, which names its input, stays right."""

    def unsummed(**layouts: Any) -> RowwiseParallel:
        return RowwiseParallel(**(layouts if "input_layouts" in layouts else {"output_layouts": Partial()}))

    return patch.object(tensor_parallel, "RowwiseParallel", unsummed)


def incomplete_norms() -> AbstractContextManager:
    """Gradients of LayerNorms stay those of each rank's part of the sequence."""

    def take_parts_for_sums(model: nn.Module) -> None:
        for parameter in model.parameters():
            if isinstance(gradient := parameter.grad, DTensor):
                parameter.grad = taken_for_sum(gradient, axis_names(gradient.device_mesh))

    return patch.object(library, "complete_gradients", take_parts_for_sums)


# In where torch-compiler says that tensors live -------------------------------------------------------------


def taken_for_sum(x: DTensor, axes: Collection[str]) -> DTensor:
    """A partial sum along these axes, said to be the sum."""
    said = tuple(
        Replicate() if name in axes and how.is_partial() else how
        for name, how in zip(axis_names(x.device_mesh), x.placements, strict=True)
    )
    return local_part(x.to_local(), x.device_mesh, said, of=x)


def parts_for_sums(axes: Collection[str]) -> AbstractContextManager:
    """A device's part of a gradient's sum along these axes is said to be the gradient."""
    right = placed_data_parallel.synchronize_gradients

    def wrong(gradient: torch.Tensor, placements: Placements) -> torch.Tensor:
        assert isinstance(gradient, DTensor)
        return right(taken_for_sum(gradient, axes), placements)

    return patch.object(placed_data_parallel, "synchronize_gradients", wrong)


def placed_sum_for_mean() -> AbstractContextManager:
    """The mean over a rank's own rows is said to be a part of the loss's sum, and not of its average."""
    right = placed_data_parallel.split_batch

    def of_own_rows(logits_NV: DTensor, targets_N: DTensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(logits_NV.to_local(), targets_N.to_local())
        devices = logits_NV.device_mesh
        sums = tuple(Partial() if how.is_shard() else how for how in of_activation(devices))
        return local_part(loss, devices, sums)

    return patch.object(placed_data_parallel, "split_batch", partial(right, cross_entropy=of_own_rows))


def placed_row_products() -> AbstractContextManager:
    """A rank's part of what attention and MLP add to the stream is said to be all of it."""
    right = placed_tensor_parallel._at

    def at(x: torch.Tensor, devices: DeviceMesh, placements: Placements) -> DTensor:
        if isinstance(x, DTensor) and type(x.placements[axis_names(devices).index(TP)]) is Partial:
            x = taken_for_sum(x, (TP,))
        return right(x, devices, placements)

    return patch.object(placed_tensor_parallel, "_at", at)


# In the loop, the optimizer and the weights of all engines --------------------------------------------------


def spoiled(spoil: Callable[[Run], None]) -> AbstractContextManager:
    """A run that is set up as it should be, and then spoiled."""
    set_up = train.set_up

    def wrong(*args: Any, **options: Any) -> Run:
        run = set_up(*args, **options)
        spoil(run)
        return run

    return patch.object(train, "set_up", wrong)


@contextmanager
def overwritten_microbatch() -> Generator[None]:
    """Each microbatch's gradient takes the place of those before it, as if `zero_grad` stood in the loop."""
    backward, backward_chunk = Stage.backward, PipelineStage.backward_one_chunk

    def ours(self: Stage, *args: Any, **options: Any) -> Any:
        self.module.zero_grad()
        return backward(self, *args, **options)

    def theirs(self: PipelineStage, *args: Any, **options: Any) -> Any:
        self.submod.zero_grad()
        return backward_chunk(self, *args, **options)

    with patch.object(Stage, "backward", ours), patch.object(PipelineStage, "backward_one_chunk", theirs):
        yield


def change_update(run: Run, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Weights become `change(before, after)` whenever the optimizer has updated them."""
    before = dict[str, torch.Tensor]()

    def remember(*optimizer_and_arguments: Any) -> None:
        before.update({name: p.detach().clone() for name, p in run.parallel.parameters.items()})

    @torch.no_grad()
    def move(*optimizer_and_arguments: Any) -> None:
        for name, parameter in run.parallel.parameters.items():
            parameter.copy_(change(before[name], parameter))

    run.parallel.optimizer.register_step_pre_hook(remember)
    run.parallel.optimizer.register_step_post_hook(move)


def skipped_last_update(run: Run) -> None:
    """The last step updates nothing."""
    last = run.experiment.train.max_iters - 1
    change_update(run, lambda old, new: old if run.state.step == last else new)


def moved_weight() -> AbstractContextManager:
    """One weight starts a little away."""
    right = train.starting_parameters
    return patch.object(train, "starting_parameters", lambda *args: contract.moved_weight(right(*args)))


def kept_gradients(run: Run) -> None:
    """A step's gradients are added to those of the step before."""
    run.parallel.optimizer.zero_grad = lambda set_to_none=True: None


def shifted_targets() -> AbstractContextManager:
    """Targets are shifted after the cut: the last one is the rank's own first token."""
    right = batches.RankBatch

    def wrong(inputs_ABT: torch.Tensor, _: torch.Tensor, *keys: torch.Tensor) -> Any:
        return right(inputs_ABT, inputs_ABT.roll(-1, dims=-1), *keys)

    return patch.object(batches, "RankBatch", wrong)


def local_positions(run: Run) -> None:
    """A rank's positions are taken for the first ones of the sequence."""
    for module in run.parallel.module.modules():
        if isinstance(module, GPT):
            module.positions = torch.arange


def unscaled_dropout() -> AbstractContextManager:
    """Elements that are not dropped are not scaled up."""
    return patch.object(dropout, "kept_scale", lambda rate: 1.0)


def same_dropout_on_every_rank(run: Run) -> None:
    """Every rank takes its rows for the first ones."""
    for module in run.parallel.module.modules():
        if isinstance(module, dropout.Dropout):
            module.part, module.rows = 0, None


def norm_counts_replicas_twice(run: Run) -> None:
    """Squares are summed over every axis, whether a parameter is spread over it or repeated."""
    axes = (run.mesh[name] for name in AXES)
    everywhere = tuple(axis for axis in axes if axis.size > 1)
    run.parallel = replace(run.parallel, sharded_over=dict.fromkeys(run.parallel.parameters, everywhere))


def wrong_optimizer_shard(run: Run) -> None:
    """Each rank updates its shard with the next rank's gradients, repeated if that has too few."""
    axis = run.mesh[DP_SHARD]

    @torch.no_grad()
    def before_update(*optimizer_and_arguments: Any) -> None:
        gradients = [p.grad for p in run.parallel.parameters.values() if p.grad is not None]
        mine = [local(gradient).view(-1) for gradient in gradients]
        theirs, start = axis.all_gather_objects(torch.cat(mine))[(axis.rank + 1) % axis.size], 0
        for gradient in mine:
            places = torch.arange(start, start + len(gradient)) % max(len(theirs), 1)
            gradient.copy_(theirs[places] if len(theirs) else torch.zeros_like(gradient))
            start += len(gradient)

    run.parallel.optimizer.register_step_pre_hook(before_update)


MANUAL, LIBRARY, COMPILER = ("manual",), ("library",), ("compiler",)
ALL = MANUAL + LIBRARY + COMPILER
_gradients = {"axis": DP_REPLICATE, "purpose": GRADIENTS}
_row_products = {"axis": TP, "purpose": ACTIVATIONS}
_partial_gradients = {"axis": TP, "purpose": REPLICATED_GRADIENTS}
_tied_gradients = {"axis": PP, "purpose": TIED_GRADIENTS}
_reversed, _rounded = (lambda old, new: 2 * old - new), (lambda old, new: new.bfloat16().to(new.dtype))

FAULTS = (
    PlantedFault("dropped_all_reduce", MANUAL, partial(left_out_reductions, **_gradients)),
    PlantedFault("dropped_all_reduce", LIBRARY, partial(spoiled, without_reduction)),
    PlantedFault("dropped_all_reduce", COMPILER, partial(parts_for_sums, ROWS)),
    PlantedFault("sum_for_mean", MANUAL, partial(times_ranks, **_gradients)),
    PlantedFault("sum_for_mean", LIBRARY, partial(spoiled, undivided_sum)),
    PlantedFault("sum_for_mean", COMPILER, placed_sum_for_mean),
    PlantedFault("moved_weight", ALL, moved_weight),
    PlantedFault("kept_gradients", ALL, partial(spoiled, kept_gradients)),
    PlantedFault("dropped_tp_all_reduce", MANUAL, partial(left_out_reductions, **_row_products)),
    PlantedFault("dropped_tp_all_reduce", LIBRARY, unsummed_rows),
    PlantedFault("dropped_tp_all_reduce", COMPILER, placed_row_products),
    PlantedFault("doubled_row_bias", MANUAL, doubled_row_bias),
    PlantedFault("missing_norm_psum", MANUAL, partial(left_out_reductions, **_partial_gradients)),
    PlantedFault("missing_norm_psum", LIBRARY, incomplete_norms),
    PlantedFault("missing_norm_psum", COMPILER, partial(parts_for_sums, (TP,))),
    PlantedFault("norm_counts_replicas_twice", ALL, partial(spoiled, norm_counts_replicas_twice)),
    PlantedFault("wrong_optimizer_shard", ALL, partial(spoiled, wrong_optimizer_shard)),
    PlantedFault("overwritten_microbatch", MANUAL + LIBRARY, overwritten_microbatch),
    PlantedFault("stale_tied_copy", MANUAL + LIBRARY, partial(sent_zeros, **_tied_gradients)),
    PlantedFault("shifted_targets", ALL, shifted_targets),
    PlantedFault("local_positions", ALL, partial(spoiled, local_positions)),
    PlantedFault("forgotten_hop", MANUAL, forgotten_hop),
    PlantedFault("stopped_maximum", MANUAL, stopped_maximum),
    PlantedFault("next_expert", ALL, partial(wrong_choice, of_next_expert)),
    PlantedFault("unrenormalised_weights", ALL, partial(wrong_choice, unrenormalised)),
    PlantedFault("local_balance", ALL, local_balance),
    PlantedFault("averaged_experts", ALL, partial(spoiled, averaged_experts)),
    PlantedFault("unscaled_dropout", ALL, unscaled_dropout),
    PlantedFault("same_dropout_on_every_rank", ALL, partial(spoiled, same_dropout_on_every_rank)),
    PlantedFault("reversed_update", ALL, partial(spoiled, partial(change_update, change=_reversed))),
    PlantedFault("rounded_weights", ALL, partial(spoiled, partial(change_update, change=_rounded))),
    PlantedFault("skipped_last_update", ALL, partial(spoiled, skipped_last_update)),
)
