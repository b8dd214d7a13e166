"""What PyTorch's own tools and habits make of parameters of which a rank has a part: right, or refused."""

import copy
import gc
import weakref
from functools import partial

import modules
import pytest
import torch
from modules import double, normal, share
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import prune

from compare.pipeline.schedules import make_schedule
from torchpar import FSDP, DataParallel, ShardedOptimizer
from torchpar.comm.collectives import Axis
from torchpar.manual.megatron.vocab_parallel import VocabParallelEmbedding
from torchpar.manual.pipeline.weight_gradients import Factors, add_up
from torchpar.manual.pipeline_parallel import PipelineParallel
from torchpar.manual.tensor_parallel import ColumnParallelLinear, RowParallelLinear

assert_same = partial(modules.assert_same, rtol=1e-12, atol=1e-14)


def net(*, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width)
    return nn.Sequential(*layers).to(double)


def split(whole: nn.Sequential, axis: Axis) -> nn.Sequential:
    column = ColumnParallelLinear.from_linear(whole[0], axis)
    return nn.Sequential(column, whole[1], RowParallelLinear.from_linear(whole[2], axis), whole[3])


@pytest.mark.parametrize("zero", [3, 2])
@on_ranks
def test_an_overflow_in_one_ranks_part_is_everyones(rank: int, zero: int) -> None:
    sharded = FSDP(nn.Linear(8, 8, bias=False), zero=zero)
    assert overflows(sharded, list(sharded.parameters()), column=-1) == [1.0] * 3
    column = ColumnParallelLinear.from_linear(nn.Linear(8, 8, bias=False), Axis.of(None))
    for layer in (column, copy.deepcopy(column)):
        assert overflows(layer, list(layer.parameters()), column=-1 if rank == 3 else None) == [1.0] * 3


def overflows(module: nn.Module, parameters: list[nn.Parameter], *, column: int | None) -> list[float]:
    """The scale after a step that overflows, and whether anything moved; and after a step that does not."""
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    found = []
    for overflow in (True, False):
        before = [p.detach().clone() for p in parameters]
        y = module(torch.ones(4, 8))
        gradient = torch.ones_like(y)
        if overflow and column is not None:
            gradient[:, column] = torch.inf
        scaler.scale((y * gradient).sum()).backward()
        if isinstance(module, FSDP):
            module.finish_gradient_synchronization()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = any((a != b).any() for a, b in zip(before, parameters, strict=True) if a.numel())
        found.append(scaler.get_scale())
        assert moved != overflow
    return [*found, float(scaler.get_growth_factor() == 2.0)]


@on_ranks
def test_a_sharded_optimizer_that_reduces_itself_refuses_a_scaler(rank: int) -> None:
    layer = nn.Linear(8, 8)
    optimizer = ShardedOptimizer(layer.parameters(), torch.optim.SGD, lr=1.0, reduce_gradients=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(layer(torch.ones(4, 8)).sum()).backward()
    optimizer.finish_gradient_synchronization()
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(optimizer)


@on_ranks
def test_clipping_takes_the_norm_of_all_parts(rank: int) -> None:
    """By PyTorch's function and by the wrappers': over shards, parts of layers, and shards of parts."""
    x = normal(8, 8)
    two = Axis.of(torch.distributed.new_subgroups(2)[0]), across(rank)
    for way in ("fsdp", "tp", "tp and fsdp", "tp and zero 1"):
        reference = net()
        reference(x).square().mean().backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 1e-2)
        if way == "tp":
            module = split(net(), Axis.of(None))
            module(x).square().mean().backward()
            norm = nn.utils.clip_grad_norm_(module.parameters(), 1e-2)
            torch.testing.assert_close(module[3].weight.grad, reference[3].weight.grad)
        elif way == "tp and zero 1":
            tp, dp = two
            module = split(net(), tp)
            parameters = module.parameters()
            optimizer = ShardedOptimizer(parameters, torch.optim.SGD, lr=1.0, group=dp, reduce_gradients=True)
            module(x.chunk(2)[dp.rank]).square().mean().backward()
            with pytest.raises(RuntimeError, match=r"go to a ShardedOptimizer: call its own clip_grad_norm_"):
                nn.utils.clip_grad_norm_(module.parameters(), 1e-2)
            optimizer.finish_gradient_synchronization()
            norm = optimizer.clip_grad_norm_(1e-2)
            whole = optimizer.gather({p: optimizer.piece_of(p).grad for p in module.parameters()})
            torch.testing.assert_close(whole[module[3].weight], reference[3].weight.grad)
        else:
            tp, dp = two
            inner = net() if way == "fsdp" else split(net(), tp)
            module = FSDP(inner, group=None if way == "fsdp" else dp)
            rows = share(x, rank) if way == "fsdp" else x.chunk(2)[dp.rank]
            module(rows).square().mean().backward()
            with pytest.raises(RuntimeError, match="finish_gradient_synchronization"):
                nn.utils.clip_grad_norm_(module.parameters(), 1e-2)
            module.finish_gradient_synchronization()
            with pytest.raises(ValueError, match=r"norm_type = inf .* give 2\.0"):
                nn.utils.clip_grad_norm_(module.parameters(), 1e-2, norm_type=torch.inf)
            norm = module.clip_grad_norm_(1e-2) if way != "fsdp" else clip(module)
            whole = module.gather({name: p.grad for name, p in module.pieces.items()})
            torch.testing.assert_close(whole["3.weight"], reference[3].weight.grad)
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)


def across(rank: int) -> Axis:
    """Of two by two ranks, those in the same place of each pair."""
    groups = [torch.distributed.new_group([place, place + 2]) for place in (0, 1)]
    return Axis.of(groups[rank % 2])


def clip(module: FSDP) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(module.parameters(), 1e-2)


@on_ranks
def test_clipping_gradients_of_one_rank_alone_is_refused(rank: int) -> None:
    replicas = DataParallel(net())
    replicas(normal(2, 8)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"finish_gradient_synchronization\(\) before clip_grad_norm_\(\)"):
        nn.utils.clip_grad_norm_(replicas.parameters(), 1.0)
    replicas.finish_gradient_synchronization()
    assert nn.utils.clip_grad_norm_(replicas.parameters(), 1.0) > 0


@on_ranks
def test_a_state_of_pieces_is_refused_and_a_full_one_is_not(rank: int) -> None:
    sharded = FSDP(net())
    for around in (sharded, nn.Sequential(sharded), sharded.module):
        with pytest.raises(RuntimeError, match=r"pieces alone: save full_state_dict\(\)"):
            around.state_dict()
    state = sharded.full_state_dict()
    assert_same(state, net().state_dict())
    sharded.load_full_state_dict(state)
    assert list(copy.deepcopy(sharded).full_state_dict()) == list(state)


@pytest.mark.parametrize("kind", ["register_post_accumulate_grad_hook", "register_hook"])
@on_ranks
def test_a_hook_that_would_never_run_is_refused(rank: int, kind: str) -> None:
    sharded = FSDP(net())
    for parameter in sharded.parameters():
        if parameter.requires_grad:
            getattr(parameter, kind)(lambda gradient: None)
    sharded(normal(2, 8)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"a hook on .* would never run"):
        sharded.finish_gradient_synchronization()


class LayerDrop(nn.Module):
    """Each rank chooses its layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=double) for _ in range(4))

    def forward(self, x: torch.Tensor, keep: list[int]) -> torch.Tensor:
        for number in keep:
            x = torch.tanh(self.layers[number](x))
        return x


@on_ranks
def test_layers_that_each_rank_chooses_for_itself(rank: int) -> None:
    sharded, keep = FSDP(LayerDrop(), find_unused_parameters=True), [0, 1 + rank % 2, 3]
    torch.testing.assert_close(sharded(normal(2, 8), keep), LayerDrop()(normal(2, 8), keep))


class Quantised(nn.Module):
    """Ids and a mask that are parameters."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.ids = nn.Parameter(torch.tensor([257, 1001, 65535, 3]), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True, True]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x).masked_fill(self.mask, 0), self.ids.clone()


@on_ranks
def test_integers_are_not_cast(rank: int) -> None:
    y, ids = FSDP(Quantised(), compute_dtype=torch.bfloat16)(torch.ones(2, 4))
    assert y.dtype == torch.bfloat16
    assert ids.tolist() == [257, 1001, 65535, 3]


@on_ranks
def test_only_plain_layers_are_split(rank: int) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    class Scaled(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(ids)

    split_linear, split_embedding = ColumnParallelLinear.from_linear, VocabParallelEmbedding.from_embedding
    normed = nn.utils.parametrizations.weight_norm
    for make, layer, name in (
        (split_linear, Doubled(8, 8), "Linear"),
        (RowParallelLinear.from_linear, normed(nn.Linear(8, 8)), "Linear"),
        (split_embedding, Scaled(8, 8), "Embedding"),
        (split_embedding, normed(nn.Embedding(8, 8)), "Embedding"),
    ):
        with pytest.raises(TypeError, match=rf"is made from nn\.{name}, not from"):
            make(layer, Axis.of(None))
    hooked = nn.Linear(8, 8)
    hooked.register_forward_hook(lambda module, args, output: 2 * output)
    for layer in (hooked, prune.identity(nn.Linear(8, 8), "weight"), nn.utils.spectral_norm(nn.Linear(8, 8))):
        with pytest.raises(TypeError, match="ColumnParallelLinear would not run the hooks of this Linear"):
            split_linear(layer, Axis.of(None))


def test_weight_gradients_of_complex_layers():
    layer, x = nn.Linear(3, 2, dtype=torch.complex128), torch.randn(4, 3, dtype=torch.complex128)
    y = layer(x)
    y.retain_grad()
    y.abs().square().mean().backward()
    expected, layer.weight.grad, layer.bias.grad = layer.weight.grad, None, None
    for times in (1, 2):
        add_up(Factors(layer.weight, layer.bias, x, y.grad))
        torch.testing.assert_close(layer.weight.grad, times * expected)


class Scores(nn.Linear):
    """A score for each row, by F.linear with a vector."""

    def __init__(self, width: int, dtype: torch.dtype):
        super().__init__(width, 1, bias=False, dtype=dtype)
        self.weight = nn.Parameter(self.weight[0].detach())


@on_ranks
def test_a_pipeline_of_complex_layers_and_of_vectors(rank: int) -> None:
    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        dtype = torch.complex128
        return nn.Sequential(nn.Linear(3, 3, dtype=dtype), nn.Linear(3, 3, dtype=dtype), Scores(3, dtype))

    x, alone = torch.randn(4, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(1)), layers()
    loss = lambda y, target: y.abs().square().mean()  # noqa: E731
    groups = [torch.distributed.new_group([member]) for member in range(4)]
    pipeline = PipelineParallel(
        {0: (stage := layers())},
        schedule=make_schedule("gpipe", ranks=1, microbatches=1),
        loss=loss,
        boundary=lambda stage, x: x,
        group=groups[rank],
    )
    pipeline.run([x], [torch.zeros(1)])
    loss(alone(x), None).backward()
    assert_same(modules.gradients(stage), modules.gradients(alone))


@on_ranks
def test_units_groups_and_tensors_of_others_are_refused_by_name(rank: int) -> None:
    with pytest.raises(ValueError, match="this Linear is no part of the module"):
        FSDP(net(), units=[nn.Linear(2, 2)])
    with pytest.raises(TypeError, match="'0' is no module: give submodules"):
        FSDP(net(), units=["0"])
    group = torch.distributed.new_group([0])
    if rank:
        with pytest.raises(ValueError, match=f"rank {rank} is not in this process group"):
            FSDP(net(), group=group)
    mesh = torch.distributed.init_device_mesh("cpu", (4,))
    with pytest.raises(ValueError, match="is a DTensor, which PyTorch's own parallelism has made"):
        DataParallel(fully_shard(net(), mesh=mesh))


@on_ranks
def test_what_nobody_has_any_more_is_freed(rank: int) -> None:
    """Hooks are held out of the garbage collector's sight: one that held its owner would keep all of it."""
    gone = []
    for wrap in (DataParallel, FSDP, partial(FSDP, zero=2), lambda module: module):
        module = net()
        wrapper = wrap(module)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
        if wrapper is module:
            optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1, reduce_gradients=True)
        wrapper(normal(2, 8)).square().mean().backward()
        (optimizer if wrapper is module else wrapper).finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
        gone += [weakref.ref(one) for one in (wrapper, module, optimizer)]
    del wrapper, module, optimizer
    gc.collect()
    assert [one() for one in gone] == [None] * 12
