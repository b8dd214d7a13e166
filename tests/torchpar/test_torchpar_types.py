"""torch-manual's strategies under spmd_types: typed on one process, without ranks; gradients by duality.

Each strategy passes as it is, and is refused with one collective forgotten or made twice. A refusal names the
operator at which two types meet that do not go together.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import spmd_types as spmd
import torch
from gpt_steps import make_gpt
from spmd_rules import one_rank, type_of, typed
from spmd_types import I, P, R, SpmdTypeError, V
from spmd_types.checker import typecheck

from torchpar.comm.collectives import Axis
from torchpar.manual import megatron, tensor_parallel
from torchpar.manual.data_parallel import DataParallel

TOKENS_BT = torch.arange(16).view(2, 8)
Plant = Callable[[], AbstractContextManager]


def as_it_is(x: torch.Tensor, axis: Axis, dim: int | None = None) -> torch.Tensor:
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
            typed(parameter, axis, V if name in split.spread else R if sequence_parallel else I)
        typed(ids_BT, axis, R)
        loss = model(ids_BT, ids_BT)[1]
        assert type_of(loss, axis) is I
        loss.backward()
        named = model.named_parameters() if sequence_parallel else ()
        whole = [p for name, p in named if name not in split.spread]
        return [typed(p.grad, axis, type_of(p, axis).backward_type()) for p in whole if p.grad is not None]


@contextmanager
def sums_noted(slots: Sequence[torch.Tensor]) -> Generator[list]:
    """Types after each all-reduce; what it fills is copied back into the slots, which are whole then."""
    right, noted = Axis.all_reduce, []

    def all_reduce(axis: Axis, tensor: torch.Tensor, **options: Any) -> None:
        right(axis, tensor, **options)
        noted.append(type_of(tensor, axis))
        for slot in slots:
            spmd.mutate_type(slot, axis.group, src=P, dst=noted[-1])

    with patch.object(Axis, "all_reduce", all_reduce):
        yield noted


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallelism_is_well_typed(sequence_parallel):
    with one_rank("tp") as axis:
        gradients = split_gradients(axis, sequence_parallel=sequence_parallel)
        assert {type_of(gradient, axis) for gradient in gradients} == ({P} if sequence_parallel else set())
        if sequence_parallel:
            with typecheck(), sums_noted(gradients) as sums:
                tensor_parallel.synchronize_replicated_gradients(gradients, axis)
            assert sums == [R]


FORGOTTEN = {
    "f": (False, forgotten(tensor_parallel, "enter_region"), "linear"),
    "g": (False, forgotten(tensor_parallel, "leave_region"), "add"),
    "the sum of the embedding's parts": (False, forgotten(megatron, "leave_region"), "add"),
    "the scatter of a sequence's sums": (
        True,
        lambda: patch.object(
            tensor_parallel,
            "leave_region",
            lambda x, axis, dim: megatron.leave_region(x, axis),
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
            model.all_reduce_full_buckets()
            model.buckets.taken = 0
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
