"""torch-manual's strategies under spmd_types: typed on one process, without ranks; gradients by duality.

Each strategy passes as it is, and is refused with one collective forgotten or made twice. A refusal names the
operator at which two types meet that do not go together.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import spmd_types as spmd
import torch
from gpt_steps import make_gpt
from spmd_rules import one_rank, type_of, typed
from spmd_types import I, P, R, SpmdTypeError, V, no_typecheck
from spmd_types.checker import typecheck

from torchpar.comm import collectives
from torchpar.comm.collectives import Axis
from torchpar.gpt_stages import units_of
from torchpar.manual import data_parallel, fully_sharded, tensor_parallel
from torchpar.manual.data_parallel import DataParallel
from torchpar.manual.fully_sharded import FSDP
from torchpar.manual.megatron import vocab_parallel
from torchpar.manual.zero.flat_gradients import FlatGradients
from torchpar.manual.zero.flat_parameters import FlatParameters
from torchpar.model import GPT

TOKENS_BT = torch.arange(16).view(2, 8)
Plant = Callable[[], AbstractContextManager]


def as_it_is(x: torch.Tensor, axis: Axis, *, dim: int = 0) -> torch.Tensor:
    """A mapping that is forgotten."""
    return x


def forgotten(module: object, name: str) -> Plant:
    return partial(patch.object, module, name, as_it_is)


def split_gradients(axis: Axis, *, sequence_parallel: bool) -> list[torch.Tensor]:
    """Of a GPT that tp splits: those of whole parameters. Its split ones vary, the others are equal.

    Under sequence parallelism a whole parameter meets a part of the positions: it is replicated, and its
    gradient partial.
    """
    model = make_gpt()
    split = tensor_parallel.split_layers(model, axis, sequence_parallel=sequence_parallel)
    ids_BT = TOKENS_BT.clone()
    with typecheck():
        for name, parameter in model.named_parameters():
            typed(parameter, axis, V if name in split.splits else R if name in split.partial else I)
        typed(ids_BT, axis, R)
        loss = model(ids_BT, ids_BT)[1]
        assert type_of(loss, axis) is I
        loss.backward()
        whole = [p for name, p in model.named_parameters() if name in split.partial]
        return [typed(p.grad, axis, type_of(p, axis).backward_type()) for p in whole if p.grad is not None]


@contextmanager
def sums_noted() -> Generator[list]:
    """Types after each all-reduce. What it fills is copied back into slots that are partial, and stay so."""
    right, noted = Axis.all_reduce, []

    def all_reduce(axis: Axis, tensor: torch.Tensor, **options: Any) -> None:
        right(axis, tensor, **options)
        noted.append(type_of(tensor, axis))
        spmd.mutate_type(tensor, axis.group, src=noted[-1], dst=P)

    with patch.object(Axis, "all_reduce", all_reduce):
        yield noted


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallelism_is_well_typed(sequence_parallel):
    with one_rank("tp") as axis:
        gradients = split_gradients(axis, sequence_parallel=sequence_parallel)
        assert {type_of(gradient, axis) for gradient in gradients} == ({P} if sequence_parallel else set())
        if sequence_parallel:
            with typecheck(), sums_noted() as sums:
                tensor_parallel.synchronize_replicated_gradients(gradients, axis)
            assert sums == [R]


FORGOTTEN = {
    "f": (False, forgotten(tensor_parallel, "copy_to_region"), "linear"),
    "g": (False, forgotten(tensor_parallel, "reduce_from_region"), "add"),
    "the sum of the embedding's parts": (False, forgotten(vocab_parallel, "reduce_from_region"), "add"),
    "the scatter of a sequence's sums": (
        True,
        lambda: patch.object(
            tensor_parallel,
            "reduce_scatter_from_region",
            lambda x, axis, *, dim: tensor_parallel.reduce_from_region(x, axis),
        ),
        "",
    ),
}


@pytest.mark.parametrize(("sequence_parallel", "plant", "operator"), FORGOTTEN.values(), ids=FORGOTTEN)
def test_a_forgotten_mapping_is_a_type_error(sequence_parallel, plant, operator):
    with one_rank("tp") as axis, plant(), pytest.raises(SpmdTypeError) as refused:
        split_gradients(axis, sequence_parallel=sequence_parallel)
    assert operator in str(refused.value)


def replica_sums(axis: Axis, *, means: object = P, times: int = 1) -> set:
    """Types of the gradients of a replica, after their reduction; its loss is a part of a mean."""
    model, ids_BT = DataParallel(make_gpt(), gradient_sync="naive", group=axis), TOKENS_BT.clone()
    with typecheck():
        for parameter in model.parameters():
            typed(parameter, axis, R)
        typed(ids_BT, axis, V)
        with model.no_sync():
            loss = model(ids_BT, ids_BT)[1]
            if means is P:
                loss = spmd.reinterpret(loss, axis.group, src=V, dst=P)
            loss.backward()
        for bucket in model.buckets:
            (parameter,) = bucket.parameters
            typed(parameter.grad, axis, R.backward_type())
            bucket.add(0, ranks=axis.size)
        for _ in range(times):
            data_parallel.all_reduce_full_buckets(model.buckets, axis)
            model.buckets.restart()
        return {type_of(bucket.buffer, axis) for bucket in model.buckets}


def test_data_parallelism_is_well_typed():
    with one_rank("dp_replicate") as axis:
        assert replica_sums(axis) == {R}


def test_gradients_of_replicas_that_are_not_summed_or_twice_are_told():
    with one_rank("dp_replicate") as axis, patch.object(Axis, "start_all_reduce"):
        assert replica_sums(axis) == {P}
    with one_rank("dp_replicate") as axis, pytest.raises(SpmdTypeError, match="expected input type P"):
        replica_sums(axis, times=2)
    with one_rank("dp_replicate") as axis, pytest.raises(SpmdTypeError, match="The loss is Varying"):
        replica_sums(axis, means=V)


@contextmanager
def flat_types(axis: Axis) -> Generator[None]:
    """What no operator says of flat buffers: whose part of them is whose.

    This rank's shard varies. The parameters are replicated once they are gathered. Each rank's gradients of
    them vary, and are parts of a sum, of which a shard varies again.
    """

    def own(flat: FlatParameters) -> torch.Tensor:
        with no_typecheck():
            mine = flat.full[flat.layout.own]
        return typed(mine, axis, V)

    def begin_reduction(gradients: FlatGradients) -> tuple[torch.Tensor, torch.Tensor]:
        with no_typecheck():
            shard, full = begin(gradients)
        return typed(shard, axis, V), typed(full, axis, V)

    def scatter(shard: torch.Tensor, full: torch.Tensor, **options: Any) -> Any:
        return reduce_scatter(shard, spmd.mutate_type(full, axis.group, src=V, dst=P), **options)

    begin, reduce_scatter = FlatGradients.begin_reduction, collectives._reduce_scatter_equal
    with (
        patch.object(collectives, "_reduce_scatter_equal", scatter),
        patch.object(FlatParameters, "own", property(own)),
        patch.object(FlatGradients, "begin_reduction", begin_reduction),
    ):
        yield


def run_sharded(axis: Axis) -> None:
    """Gather, forward and backward, scatter: ZeRO-3, and of its parts ZeRO-1 and 2 are made."""
    model, ids_BT = make_gpt(), TOKENS_BT.clone()
    sharded = FSDP(model, units=units_of(model), group=axis)
    with flat_types(axis):
        with typecheck():
            for flat in sharded.flats:
                typed(flat.shard, axis, V)
                typed(flat.full, axis, R)
                fully_sharded.unshard(flat)
                typed(flat.full, axis, R)
                for parameter in flat.parameters:
                    typed(parameter, axis, R)
        for unit in sharded.units:
            unit.wait_unshard()
        with typecheck():
            typed(ids_BT, axis, V)
            loss = GPT.forward(model, ids_BT, ids_BT)[1]
            assert type_of(loss, axis) is V
        for flat in sharded.flats:
            flat.gradients.used = set(range(len(flat.parameters)))
            flat.gradients.slot(0)
            with typecheck():
                fully_sharded.reduce_scatter_gradients(flat.gradients)
                typed(flat.gradients.shard, axis, V)


def test_fully_sharded_is_well_typed():
    with one_rank("dp_shard") as axis:
        run_sharded(axis)


def test_a_sum_that_is_scattered_as_if_it_were_parts_is_a_type_error():
    right = Axis.start_reduce_scatter

    def of_the_sum(axis: Axis, piece: torch.Tensor, full: torch.Tensor, *, purpose: str) -> Any:
        axis.all_reduce(spmd.mutate_type(full, axis.group, src=V, dst=P), purpose=purpose)
        return right(axis, piece, full, purpose=purpose)

    with (
        one_rank("dp_shard") as axis,
        patch.object(Axis, "start_reduce_scatter", of_the_sum),
        pytest.raises(SpmdTypeError, match="V"),
    ):
        run_sharded(axis)


def test_messages_between_stages_have_no_types():
    """A pipeline is beyond spmd_types 0.3: it refuses sends and receives by name."""
    with one_rank("pp") as axis, typecheck():
        x = typed(torch.ones(3), axis, R)
        with pytest.raises(SpmdTypeError, match="isend is not yet implemented"):
            axis.start_send(x, to=1)
