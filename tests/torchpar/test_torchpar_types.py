"""torch-manual's strategies under spmd_types, on one process: types of tensors and of their gradients.

A tensor has a type along a mesh axis, and so has its gradient:

    R   replicated: equal on all ranks       gradient P
    I   invariant: equal on all ranks        gradient I
    V   varying: different on each rank      gradient V
    P   partial: to be summed over ranks     gradient R

Megatron's f and g are the casts between the types. spmd_types itself knows the in-place collectives, but not
sends and receives. Each strategy passes. A collective that is left out, or runs twice, is rejected at the
operator where two types do not match: see the mutations "types-" in tests/data/mutations.toml.
"""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types import I, P, R, S, SpmdTypeError, V, rules
from spmd_types.checker import typecheck
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from compare.spec.experiment import Layout
from tests.support.gpt_steps import make_gpt
from torchpar.comm.collectives import Axis
from torchpar.manual import context_parallel, no_sync, ring, tensor_parallel, vocab_parallel
from torchpar.manual.data_parallel import DataParallel

RANKS = 4
TOKENS_BT = torch.arange(16).view(2, 8)


def type_of(x: Any, axis: Axis) -> Any:
    """R, I, V or P."""
    return spmd.get_axis_local_type(x, axis.group)


def typed(x: torch.Tensor, axis: Axis, to: Any) -> torch.Tensor:
    """x with this type. Raises SpmdTypeError: it has another type."""
    return spmd.assert_type(x, {axis.group: to})


def source(y: torch.Tensor, axis: Axis) -> Any:
    """The type of a partial sum: a product of split features is typed V."""
    return V if type_of(y, axis) is V else P


def copied(*, x: torch.Tensor, axis: Axis) -> Any:
    return rules.convert(x, axis.group, src=I, dst=R)


def reduced(*, y: torch.Tensor, axis: Axis) -> Any:
    return rules.all_reduce(y, axis.group, src=source(y, axis), dst=I)


def gathered(*, x: torch.Tensor, axis: Axis) -> Any:
    return rules.all_gather(x, axis.group, src=S(1), dst=R)


def scattered(*, y: torch.Tensor, axis: Axis) -> Any:
    return rules.reduce_scatter(y, axis.group, src=source(y, axis), dst=S(1))


def gathered_positions(*, kv_2BtKD: torch.Tensor, axis: Axis) -> Any:
    return rules.all_gather(kv_2BtKD, axis.group, src=S(2), dst=R)


def exchanged(*, x: torch.Tensor, axis: Axis, split: int, join: int) -> Any:
    return rules.all_to_all(x, axis.group, src=S(split), dst=S(join))


def of_cross_entropy(loss_N: torch.Tensor, *, logits_NV: torch.Tensor, targets_N: Any, axis: Axis) -> None:
    """A loss that is equal on all ranks, from logits that differ."""
    rules.ignore(targets_N)
    typed(logits_NV, axis, V)
    typed(loss_N, axis, I)


def of_ring(y: torch.Tensor, *, q_BHtD: Any, kv_2BKtD: Any, axis: Axis, blocks: Any) -> None:
    for x in (q_BHtD, kv_2BKtD, y):
        typed(x, axis, V)


TYPES = {
    tensor_parallel.CopyToRegion: copied,
    tensor_parallel.ReduceFromRegion: reduced,
    tensor_parallel.GatherSequence: gathered,
    tensor_parallel.ScatterSequence: scattered,
    vocab_parallel.CrossEntropy: of_cross_entropy,
    context_parallel.GatherPositions: gathered_positions,
    context_parallel.AllToAll: exchanged,
    ring.Ring: of_ring,
}
"""By autograd Function, the types of its result and what it demands of its inputs."""


@contextmanager
def one_rank(name: str) -> Generator[Axis]:
    """An axis of several ranks, of which only this one runs. Its messages go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    how = {"attribute": "spmd_typecheck", "create": True}
    try:
        mesh = DeviceMesh("cpu", torch.arange(RANKS), mesh_dim_names=(name,))
        with (
            spmd.set_current_mesh(mesh),
            ExitStack() as stack,
        ):
            for function, hook in TYPES.items():
                stack.enter_context(patch.object(function, new=staticmethod(hook), **how))
            yield Axis(name, size=RANKS, rank=0, group=mesh.get_group(name))
    finally:
        dist.destroy_process_group()


def split_gradients(axis: Axis, *, sequence_parallel: bool) -> list[torch.Tensor]:
    """Gradients of the replicated parameters of a GPT that tp splits. Split parameters vary.

    With sequence parallelism a replicated parameter sees some of the positions, so its gradient is partial.
    """
    model = make_gpt()
    layers = tensor_parallel.split_layers(model, axis, sequence_parallel=sequence_parallel)
    vocabulary = vocab_parallel.split_vocabulary(model, axis, sequence_parallel=sequence_parallel)
    spread = {*layers.axes, *vocabulary.axes}
    ids_BT = TOKENS_BT.clone()
    with typecheck():
        for name, parameter in model.named_parameters():
            typed(parameter, axis, V if name in spread else R if sequence_parallel else I)
        typed(ids_BT, axis, R)
        loss = model(ids_BT, ids_BT)[1]
        assert type_of(loss, axis) is I
        loss.backward()
        named = model.named_parameters() if sequence_parallel else ()
        whole = [p for name, p in named if name not in spread]
        return [typed(p.grad, axis, type_of(p, axis).backward_type()) for p in whole if p.grad is not None]


@contextmanager
def sums_noted(slots: Sequence[torch.Tensor]) -> Generator[list]:
    """Record the type after each all-reduce, whose result is copied into the slots."""
    right, noted = Axis.all_reduce, []

    def all_reduce(axis: Axis, tensor: torch.Tensor, **options: Any) -> None:
        right(axis, tensor, **options)
        noted.append(type_of(tensor, axis))
        for slot in slots:
            spmd.mutate_type(slot, axis.group, src=P, dst=noted[-1])

    with patch.object(Axis, "all_reduce", all_reduce):
        yield noted


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_types_of_tensor_parallelism(sequence_parallel):
    with one_rank("tp") as axis:
        gradients = split_gradients(axis, sequence_parallel=sequence_parallel)
        assert {type_of(gradient, axis) for gradient in gradients} == ({P} if sequence_parallel else set())
        if sequence_parallel:
            with typecheck(), sums_noted(gradients) as sums:
                tensor_parallel.sum_replicated_gradients(gradients, axis)
            assert sums == [R]


def replica_sums(axis: Axis, *, means: object = P, times: int = 1) -> set:
    """Types of the reduced gradients of a replica, whose loss is a partial mean."""
    model, ids_BT = make_gpt(), TOKENS_BT.clone()
    axis_of = dict.fromkeys(model.parameters(), axis)
    how = {"gradient_sync": "naive", "bucket_size_mb": 0.0, "ranks": RANKS}
    model = DataParallel(model, axis_of=axis_of, **how)
    with typecheck():
        for parameter in model.parameters():
            typed(parameter, axis, R)
        typed(ids_BT, axis, V)
        with no_sync(model):
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
            model.buckets.next = 0
        return {type_of(bucket.buffer, axis) for bucket in model.buckets}


def test_types_of_data_parallel_sums():
    with one_rank("dp_replicate") as axis:
        assert replica_sums(axis) == {R}
    with one_rank("dp_replicate") as axis, patch.object(Axis, "start_all_reduce"):
        assert replica_sums(axis) == {P}
    with one_rank("dp_replicate") as axis, pytest.raises(SpmdTypeError, match="expected input type P"):
        replica_sums(axis, times=2)
    with one_rank("dp_replicate") as axis, pytest.raises(SpmdTypeError, match="The loss is Varying"):
        replica_sums(axis, means=V)


@pytest.mark.parametrize("way", ["allgather", "ring", "ulysses"])
def test_types_of_context_parallelism(way):
    """The loss varies over cp, and the gradients are partial sums: the mean over cp is computed later."""
    layout, ids_BT, cpu = Layout(cp=RANKS, context=way), TOKENS_BT[:, :2].clone(), torch.device("cpu")
    model = make_gpt()
    with one_rank("cp") as axis:
        context_parallel.split_sequence(model, axis, layout, cpu)
        with typecheck():
            for parameter in model.parameters():
                typed(parameter, axis, R)
            for own in (ids_BT, model.positions(2, device=cpu)):
                typed(own, axis, V)
            loss = typed(model(ids_BT, ids_BT)[1], axis, V)
            spmd.reinterpret(loss, axis.group, src=V, dst=P).backward()
            for parameter in model.parameters():
                typed(parameter.grad, axis, P)
