"""Deep copies of torchpar's wrappers, averages over them, whole states, on four gloo ranks.

The oracle is the plain module, copied and averaged likewise on one rank.
"""

import copy
from functools import partial

import modules
import pytest
import torch
from modules import Odd, double, ids, share, stack
from ranks import on_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torchpar import FSDP, DataParallel, ShardedOptimizer
from torchpar.comm import process_groups
from torchpar.comm.collectives import Axis
from torchpar.manual.tensor_parallel import ColumnParallelLinear
from torchpar.measure.memory import resident_bytes

WRAPPERS = {
    "data_parallel": DataParallel,
    "zero3": FSDP,
    "shard_grad_op": partial(FSDP, reshard_after_forward=False),
    "zero2": partial(FSDP, zero=2),
}
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
assert_same = partial(modules.assert_same, rtol=1e-10, atol=1e-12)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.full_state_dict() if isinstance(model, FSDP) else model.module.state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model(batch).backward()
    if not isinstance(model, Odd):
        model.finish_gradient_synchronization()
    optimizer.step()
    optimizer.zero_grad()


@each_wrapper
@on_ranks
def test_a_copy_and_its_original_train_apart(rank: int, wrap) -> None:
    plain, model = Odd(), wrap(Odd())
    axis = model.axis
    make = partial(torch.optim.AdamW, lr=1e-2)
    plain_optimizer, optimizer = make(plain.parameters()), make(model.parameters())
    step(plain, plain_optimizer, ids(0))
    step(model, optimizer, share(ids(0), rank))
    axis.traffic.clear()
    plain_copy, plain_copied = copy.deepcopy((plain, plain_optimizer))
    twin, copied = copy.deepcopy((model, optimizer))
    assert not axis.traffic.calls
    for seed in (1, 2):
        step(plain, plain_optimizer, ids(seed))
        step(plain_copy, plain_copied, ids(seed + 10))
        step(model, optimizer, share(ids(seed), rank))
        step(twin, copied, share(ids(seed + 10), rank))
    assert_same(weights(model), plain.state_dict())
    assert_same(weights(twin), plain_copy.state_dict())
    assert twin.axis is axis


@each_wrapper
@on_ranks
def test_a_copy_in_the_middle_of_a_step_is_at_rest(rank: int, wrap) -> None:
    plain, model = Odd(), wrap(Odd())
    plain(ids(0)).backward()
    with model.no_sync():
        model(share(ids(0), rank)).backward()
        early = copy.deepcopy(model)  # with gradients that were not reduced, and inside of no_sync
    loss = model(share(ids(1), rank))
    late = copy.deepcopy(model)  # while units are whole
    plain(ids(1)).backward()
    loss.backward()
    model.finish_gradient_synchronization()
    for twin in (early, late):
        assert all(p.grad is None for p in twin.parameters())
        again = Odd()
        again(ids(2)).backward()
        twin(share(ids(2), rank)).backward()
        twin.finish_gradient_synchronization()
        assert_same(gradients(twin), modules.gradients(again))
    assert_same(gradients(model), modules.gradients(plain))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, FSDP):
        there = {name: p.grad for name, p in model.pieces.items() if p.grad is not None}
        zeros = {name: torch.zeros_like(p) for name, p in model.pieces.items()}
        whole = model.gather({**zeros, **there})
        return {name: whole[name] for name in there}
    return modules.gradients(model.module)


@each_wrapper
@on_ranks
def test_a_moving_average_equals_that_of_the_plain_module(rank: int, wrap) -> None:
    plain, model = Odd(), wrap(Odd())
    average = partial(AveragedModel, multi_avg_fn=get_ema_multi_avg_fn(0.6))
    plain_average, averaged = average(plain), average(model)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(3):
        step(plain, plain_optimizer, ids(seed))
        step(model, optimizer, share(ids(seed), rank))
        plain_average.update_parameters(plain)
        averaged.update_parameters(model)
        with torch.no_grad():
            torch.testing.assert_close(averaged(ids(9)), plain_average(ids(9)), rtol=1e-10, atol=1e-12)
    assert_same(weights(averaged.module), plain_average.module.state_dict())
    assert_same(weights(model), plain.state_dict())


@on_ranks
def test_the_sharded_optimizer_is_copied_with_its_module(rank: int) -> None:
    for reduces in (True, False):
        plain, module = Odd(), Odd()
        model = module if reduces else DataParallel(module)
        plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        optimizer = ShardedOptimizer(
            module.parameters(), torch.optim.AdamW, lr=1e-2, reduce_gradients=reduces
        )
        torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)  # which patches `step`

        def train(model, optimizer, seed: int, reduces=reduces) -> None:
            model(share(ids(seed), rank)).backward()
            (optimizer if reduces else model).finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad()

        step(plain, plain_optimizer, ids(0))
        train(model, optimizer, 0)
        for order in (1, -1):
            twin, copied = copy.deepcopy((model, optimizer)[::order])[::order]
            plain_copy, plain_copied = copy.deepcopy((plain, plain_optimizer))
            for seed in (1, 2):
                train(twin, copied, seed)
                step(plain_copy, plain_copied, ids(seed))
            module_copy = twin if reduces else twin.module
            assert_same(module_copy.state_dict(), plain_copy.state_dict())
            assert copied.state is copied.inner.state
            assert_same(module.state_dict(), plain.state_dict())


@on_ranks
def test_a_copy_of_hybrid_shards_in_another_dtype_costs_its_shards(rank: int) -> None:
    shards = process_groups.make_group([[0, 1], [2, 3]])
    replicas = process_groups.make_group([[0, 2], [1, 3]])
    module = stack(4).float()
    model = FSDP(module, group=shards, replicate_group=replicas, compute_dtype=torch.bfloat16)
    twin = copy.deepcopy(model)
    assert resident_bytes([*twin.parameters(), *twin.transient]) == resident_bytes(model.parameters())
    module[0].requires_grad_(False)
    frozen = copy.deepcopy(model)
    assert not frozen.module[0].weight.requires_grad
    x = torch.ones(2, 16)
    for each in (model, twin, frozen):
        each(x).float().sum().backward()
        each.finish_gradient_synchronization()
    assert_same(gradients(frozen), gradients(model))
    assert {"0.weight", "0.bias"} == gradients(twin).keys() - gradients(model).keys()
    torch.testing.assert_close(gradients(twin)["3.weight"], gradients(model)["3.weight"])


@on_ranks
def test_a_part_of_a_sharded_module_is_not_copied(rank: int) -> None:
    model = FSDP(Odd())
    for part in (model.module, model.module.layers[0], model.module.layers):
        with pytest.raises(ValueError, match="copy the FSDP module itself, or load its full_state_dict"):
            copy.deepcopy(part)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="copy the module first"):
        copy.deepcopy((optimizer, model))


@on_ranks
def test_tensor_parallel_layers_are_copied(rank: int) -> None:
    layer = ColumnParallelLinear.from_linear(nn.Linear(8, 8, dtype=double), Axis.of(None))
    twin = copy.deepcopy(layer)
    assert twin.axis is layer.axis
    x = torch.ones(2, 8, dtype=double)
    assert torch.equal(twin(x), layer(x))


class Stateful(nn.Module):
    """Tied parameters and buffers, a buffer that is not saved, and what is no tensor at all."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.last = nn.Linear(3, 3, dtype=double)
        self.layers = nn.ModuleList(nn.Linear(3, 3, dtype=double) for _ in range(2))
        self.layers[0].weight = self.last.weight
        self.norm = nn.BatchNorm1d(3, dtype=double)
        self.register_buffer("mean", self.norm.running_mean)
        self.register_buffer("mask", torch.full((3,), float(seed)), persistent=False)
        self.seed = seed

    def get_extra_state(self) -> dict[str, int]:
        return {"seed": self.seed}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seed = state["seed"]


@pytest.mark.parametrize("zero", [3, 2])
@on_ranks
def test_a_whole_state_is_that_of_the_plain_module(rank: int, zero: int) -> None:
    for make in (Odd, Stateful):
        plain, model = make(seed=1), FSDP(make(seed=1), zero=zero)
        state = model.full_state_dict()
        assert list(state) == list(plain.state_dict())
        again = make(seed=2)
        again.load_state_dict(state)
        assert repr(dict(again.state_dict())) == repr(dict(plain.state_dict()))
        other = FSDP(make(seed=3), zero=zero)
        other.load_full_state_dict(again.state_dict())
        assert repr(dict(other.full_state_dict())) == repr(dict(plain.state_dict()))
        if make is Odd:
            model(share(ids(), rank))  # units are whole
            assert_same(model.full_state_dict(), plain.state_dict())


@on_ranks
def test_a_state_that_does_not_fit_changes_nothing(rank: int) -> None:
    model = FSDP(Stateful(seed=0))
    before = repr(dict(model.full_state_dict()))
    state = Stateful(seed=1).state_dict()
    once = {name: value for name, value in state.items() if name not in ("last.weight", "mean")}
    unsaved = {**state, "mask": torch.ones(3)}
    tied = r"last.weight and layers.0.weight are tied, and the state has two values"
    for bad, message in (
        ({**state, "extra": torch.ones(1)}, "^the state has, and the module has not, extra$"),
        ({**state, "layers.0.weight": torch.zeros(3, 3)}, tied),
        (
            {**state, "norm.running_var": torch.ones(1)},
            r"norm.running_var is \(3,\), and the state has \(1,\)",
        ),
        ({**unsaved, "mask": torch.ones(1)}, r"mask is \(3,\), and the state has \(1,\)"),
        ({name: once[name] for name in once if name != "layers.0.weight"}, "has no last.weight$"),
    ):
        with pytest.raises(ValueError, match=message):
            model.load_full_state_dict(bad)
    assert repr(dict(model.full_state_dict())) == before
    for good in (once, unsaved):
        model = FSDP(Stateful(seed=0))
        model.load_full_state_dict(good)
        assert repr(dict(model.full_state_dict())) == repr(dict(state))
    assert model.module.mask.sum() == 3
