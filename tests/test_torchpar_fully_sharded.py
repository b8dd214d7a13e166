"""torchpar.manual's FSDP and ShardedOptimizer around modules of all kinds, on four gloo ranks, in float64.

One launch of a fresh interpreter runs every case below; a rank that disagrees ends it with its traceback.
The oracle is the same module on one rank, over the whole batch, with PyTorch's own optimizer.
"""

import copy
import doctest
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from torchpar import collectives
from torchpar.collectives import Axis
from torchpar.launch import bind_to_loopback, launch
from torchpar.manual.data_parallel import DataParallel
from torchpar.manual.flat import Flat
from torchpar.manual.fully_sharded import FSDP
from torchpar.manual.sharded_optimizer import ShardedOptimizer
from torchpar.memory import StorageMode, resident_bytes
from torchpar.pieces import pieces
from torchpar.rank import Rank
from torchpar.traffic import Call

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
RANKS = 4
SYNCS = ({"zero": 3}, {"zero": 3, "reshard_after_forward": False}, {"zero": 2})
# Averages of four partial means in another order than one mean over all: a few units in the last place,
# which Adam's division by a gradient's own size makes a little larger.
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
double = torch.float64


class Residual(nn.Module):
    """A custom layer: parameters of its own beside those of a submodule, one frozen, one a scalar."""

    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Linear(width, width, dtype=double)
        self.scale = nn.Parameter(torch.randn(width, dtype=double))
        self.gate = nn.Parameter(torch.tensor(0.5, dtype=double))
        self.shift = nn.Parameter(torch.randn(3, dtype=double), requires_grad=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": x + self.gate * torch.tanh(self.inner(x) * self.scale) + self.shift.sum()}


class Odd(nn.Module):
    """Layers of odd sizes; tied, frozen, strided parameters, some at the top; two dtypes, a buffer."""

    def __init__(self, seed: int = 0, width: int = 6):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, width, dtype=double)
        self.layers = nn.ModuleList(Residual(width) for _ in range(3))
        self.strided = nn.Parameter(torch.randn(5, width, dtype=double).t())
        self.single = nn.Parameter(torch.randn(5))
        self.frozen = nn.Parameter(torch.randn(5, dtype=double), requires_grad=False)
        self.head = nn.Linear(width, 7, bias=False, dtype=double)
        self.head.weight = self.embedding.weight
        self.register_buffer("offset", torch.randn(5, dtype=double))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)["out"]
        y = x @ self.strided + self.frozen + self.offset
        # The float32 parameter stands alone, so that its rounding does not reach the others.
        return self.head(x).square().mean() + y.square().mean() + self.single.double().square().mean()


def ends_and_layers(module: Odd) -> list:
    return [[module.embedding, module.head], *module.layers]


def stack(layers: int = 6, width: int = 16) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(width, width, dtype=double) for _ in range(layers)))


def ids(step: int = 0, count: int = 16) -> torch.Tensor:
    return torch.randint(7, (count,), generator=torch.Generator().manual_seed(step))


def share(whole: torch.Tensor, rank: Rank) -> torch.Tensor:
    return whole.chunk(RANKS)[rank.rank]


def assert_same(whole: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert whole.keys() == expected.keys()
    for name, tensor in expected.items():
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if tensor.dtype == torch.float32 else {}
        close(whole[name], tensor, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def assert_same_gradients(sharded: FSDP, reference: nn.Module) -> None:
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    zeros = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in sharded.pieces.items()}
    assert {name for name, p in sharded.pieces.items() if p.grad is not None} == expected.keys()
    whole = sharded.gather(zeros)
    assert_same({name: whole[name] for name in expected}, expected)


def train_like_one_rank(rank: Rank, reference: nn.Module, sharded: FSDP, *, steps: int = 3) -> None:
    """Clipping that bites and AdamW, held against one rank at every step."""
    alone = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    for step in range(steps):
        for module, batch in ((reference, ids(step)), (sharded, share(ids(step), rank))):
            module(batch).backward()
        sharded.finish_gradient_synchronization()
        assert_same_gradients(sharded, reference)
        trained = [p for p in reference.parameters() if p.grad is not None]
        close(sharded.clip_grad_norm_(0.1).float(), nn.utils.clip_grad_norm_(trained, 0.1).float(), rtol=1e-6)
        for each in (alone, optimizer):
            each.step()
            each.zero_grad()
    assert_same(sharded.full_state_dict(), {**dict(reference.named_parameters()), "offset": reference.offset})


def case_any_module_equals_one_rank(rank: Rank) -> None:
    for units in (None, lambda module: (), ends_and_layers):
        for options in SYNCS:
            reference, module = Odd(seed=0), Odd(seed=rank.rank)  # the first rank's values are everybody's
            sharded = FSDP(module, units=units and units(module), **options)
            train_like_one_rank(rank, reference, sharded)


def case_pieces_cut_everything_once(rank: Rank) -> None:
    sharded = FSDP(Odd())
    for name, parameter in Odd().named_parameters():
        piece = sharded.pieces[name]
        assert piece.dim() == 1
        assert sum(sharded.axis.all_gather_objects(piece.numel())) == parameter.numel()
    mine = resident_bytes(sharded.parameters())
    whole = sum(p.nbytes for p in Odd().parameters())
    assert sum(sharded.axis.all_gather_objects(mine)) == whole  # nothing padded, nothing twice
    flats = [flat for unit in sharded.units for flat in unit.flats]
    assert all(flat.full.untyped_storage().nbytes() == 0 for flat in flats)


def case_fewer_elements_than_ranks(rank: Rank) -> None:
    for options in SYNCS:
        sharded = FSDP(nn.Linear(2, 1, bias=False, dtype=double), **options)
        assert sharded.pieces["weight"].numel() == (rank.rank < 2)
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1.0, weight_decay=0.0)
        sharded(torch.full((1, 2), float(rank.rank), dtype=double)).sum().backward()
        sharded.finish_gradient_synchronization()
        gradients = sharded.gather({"weight": sharded.pieces["weight"].grad})
        close(gradients["weight"], torch.full((1, 2), 1.5, dtype=double))
        optimizer.step()


def case_hybrid_shards_equal_one_rank(rank: Rank) -> None:
    shards = collectives.make_group([[0, 1], [2, 3]])
    replicas = collectives.make_group([[0, 2], [1, 3]])
    for options in SYNCS:
        module = Odd(seed=rank.rank)
        train_like_one_rank(
            rank, Odd(), FSDP(module, group=shards, replicate_group=replicas, **options), steps=2
        )


def case_accumulation_reduces_once(rank: Rank) -> None:
    for options in SYNCS:
        axis, reference, module = Axis.of(None), Odd(), Odd()
        sharded = FSDP(module, group=axis, units=ends_and_layers(module), **options)
        axis.traffic.clear()
        for step in range(3):
            reference(ids(step)).backward()
        with sharded.no_sync():
            for step in range(2):
                sharded(share(ids(step), rank)).backward()
        sharded(share(ids(2), rank)).backward()
        sharded.finish_gradient_synchronization()
        axis.traffic.is_paused = True
        assert_same_gradients(sharded, reference)
        sent = axis.traffic.bytes
        trainable = sum(p.nbytes for p in reference.parameters() if p.requires_grad)
        assert sent[Call("reduce_scatter", "world", "gradients")] == trainable
        gathered = sent[Call("all_gather", "world", "parameters")]
        whole = sum(p.nbytes for p in reference.parameters())
        if not options.get("reshard_after_forward", options["zero"] == 3):
            assert gathered == whole, (options, gathered, whole)  # once a step, however many passes
        else:
            # Twice a pass, but for what lies at the top, which is gathered once.
            top = sum(p.nbytes for p in (reference.strided, reference.single, reference.frozen))
            assert gathered == 3 * 2 * (whole - top) + top, (options, gathered, whole, top)


def case_two_backwards_without_no_sync_add_up(rank: Rank) -> None:
    reference, sharded = Odd(), FSDP(Odd())
    for step in range(2):
        reference(ids(step)).backward()
        sharded(share(ids(step), rank)).backward()
    sharded.finish_gradient_synchronization()
    assert_same_gradients(sharded, reference)


class Branch(nn.Module):
    """Nobody uses `never`; `twice` runs twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3, dtype=double) for _ in range(2))
        self.twice = nn.Linear(3, 3, dtype=double)
        self.never = nn.Linear(3, 3, dtype=double)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.twice(self.layers[0](self.twice(x))).square().mean()


def case_unused_and_reused_layers(rank: Rank) -> None:
    x = torch.linspace(-1, 1, 24, dtype=double).view(8, 3)
    for options in SYNCS:
        reference, module = Branch(), Branch()
        sharded = FSDP(module, units=[*module.layers, module.twice, module.never], **options)
        for _ in range(2):
            reference(x).backward()
            sharded(share(x, rank)).backward()
            sharded.finish_gradient_synchronization()
        assert_same_gradients(sharded, reference)
        assert sharded.pieces["never.weight"].grad is None


def case_freezing_after_construction(rank: Rank) -> None:
    reference, module = Odd(), Odd()
    sharded = FSDP(module)
    for each in (reference, module):
        each.layers[1].requires_grad_(False)
        each.frozen.requires_grad_(True)
    reference(ids()).backward()
    sharded(share(ids(), rank)).backward()
    sharded.finish_gradient_synchronization()
    assert_same_gradients(sharded, reference)


class Recomputed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


def case_recomputation_around_a_unit(rank: Rank) -> None:
    x = torch.linspace(-1, 1, 8 * 16, dtype=double).view(8, 16)
    for options in SYNCS:
        reference, module = (Recomputed(*stack(3)) for _ in range(2))
        sharded = FSDP(module, **options)
        for _ in range(2):
            for each in (reference, sharded):
                each.zero_grad()
            reference(x).backward()
            sharded(share(x, rank)).backward()
            sharded.finish_gradient_synchronization()
            assert_same_gradients(sharded, reference)


def case_evaluation_between_steps(rank: Rank) -> None:
    for options in SYNCS:
        reference, sharded = Odd(), FSDP(Odd(), **options)
        for _ in range(2):
            with torch.no_grad():
                close(sharded(ids()), reference(ids()))
            assert all(p.dim() == 1 for p in sharded.parameters())  # at rest again
            reference.zero_grad()
            sharded.zero_grad()
            reference(ids()).backward()
            sharded(share(ids(), rank)).backward()
            sharded.finish_gradient_synchronization()
            assert_same_gradients(sharded, reference)


def case_compute_dtype_leaves_shards_alone(rank: Rank) -> None:
    reference = stack(2).float()
    sharded = FSDP(copy.deepcopy(reference), compute_dtype=torch.bfloat16)
    x = torch.linspace(-1, 1, 8 * 16).view(8, 16)
    output = sharded(share(x, rank))
    assert output.dtype == torch.bfloat16
    output.float().square().mean().backward()
    sharded.finish_gradient_synchronization()
    assert {p.dtype for p in sharded.parameters()} == {p.grad.dtype for p in sharded.parameters()}
    assert {p.dtype for p in sharded.parameters()} == {torch.float32}
    reference(x).square().mean().backward()
    gradients = sharded.gather({name: p.grad for name, p in sharded.pieces.items()})
    for name, parameter in reference.named_parameters():
        # bfloat16 keeps 8 bits: 4e-3 for each product.
        assert (gradients[name] - parameter.grad).abs().max() < 3e-2 * parameter.grad.abs().max(), name


class Watch(TorchDispatchMode):
    """The most bytes of whole parameters at once."""

    def __init__(self, sharded: FSDP):
        super().__init__()
        self.storages = [flat.untyped_storage() for flat in sharded.transient]
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages))
        return func(*args, **(kwargs or {}))


def case_peak_is_the_shard_and_two_units(rank: Rank) -> None:
    layers, width = 8, 64
    sharded = FSDP(stack(layers, width))
    unit = (width * width + width) * 8
    x = torch.ones(1, width, dtype=double)
    for _ in range(2):
        sharded.zero_grad()
        shards = resident_bytes(sharded.parameters())
        watch = Watch(sharded)
        with StorageMode([x, *sharded.parameters()], sharded.transient) as memory, watch:
            sharded(x).sum().backward()
            sharded.finish_gradient_synchronization()
        assert watch.peak == 2 * unit, watch.peak / unit
        # Gradients: a unit's buffer and a layer's gradient on its way in, a unit under way and its exchange.
        activations = 8 * width * 4 * layers
        assert memory.peak <= 2 * shards + (2 + 4) * unit + activations
    assert shards == pytest.approx(layers * unit / RANKS, rel=0.01)
    with StorageMode([x, *sharded.parameters()], sharded.transient) as memory, torch.no_grad():
        sharded(x)
    assert memory.peak <= shards + 2 * unit + activations


def case_a_unit_is_gathered_while_the_one_before_runs(rank: Rank) -> None:
    module = stack(3)
    sharded = FSDP(module)
    order: list[str] = []
    start = Flat.start_gather

    def log(flat: Flat) -> None:
        order.append(f"gather {flat.names[0][0]}")
        start(flat)

    for index, layer in enumerate(module):
        layer.register_forward_hook(lambda *_, index=index: order.append(f"forward {index}"))
        layer.register_full_backward_hook(lambda *_, index=index: order.append(f"backward {index}"))
    with patch.object(Flat, "start_gather", log):
        for _ in range(2):
            order.clear()
            sharded(torch.ones(1, 16, dtype=double, requires_grad=True)).sum().backward()
            sharded.finish_gradient_synchronization()
    assert order == [
        *("gather 0", "gather 1", "forward 0", "gather 2", "forward 1", "forward 2"),
        *("gather 1", "backward 2", "gather 0", "backward 1", "backward 0"),
    ]


def case_native_collectives_agree_with_sends(rank: Rank) -> None:
    """What NCCL would run, on gloo: equal pieces as they are, uneven ones through a padded copy."""
    axis = Axis.of(None)
    for count in (1, 3, 8, 10, 1000):
        cut = pieces(count, RANKS)[rank.rank]
        mine = torch.arange(count, dtype=double) * (rank.rank + 1)
        for sends in (True, False):
            with patch.object(Axis, "_sends_to_each", sends):
                summed = torch.empty(cut.stop - cut.start, dtype=double)
                axis.reduce_scatter(summed, mine.clone())
                close(summed, (torch.arange(count, dtype=double) * 10)[cut])
                full = torch.empty(count, dtype=double)
                axis.all_gather(full, summed)
                close(full, torch.arange(count, dtype=double) * 10)
                received = torch.empty(RANKS, 2, dtype=double)
                axis.all_to_all(received, torch.full((RANKS, 2), float(rank.rank), dtype=double))
                close(received[:, 1], torch.arange(RANKS, dtype=double))


def optimizers(
    module: nn.Module, *, reduces: bool, make: type[torch.optim.Optimizer] = torch.optim.AdamW, **kwargs
) -> tuple[nn.Module, ShardedOptimizer, Callable[[], None]]:
    """A ShardedOptimizer that reduces gradients itself or behind a DataParallel, and what reduces them."""
    if reduces:
        optimizer = ShardedOptimizer(module.parameters(), make, reduce_gradients=True, **kwargs)
        return module, optimizer, optimizer.finish_gradient_synchronization
    replicas = DataParallel(module)
    optimizer = ShardedOptimizer(module.parameters(), make, **kwargs)
    return replicas, optimizer, replicas.finish_gradient_synchronization


def assert_same_weights(module: nn.Module, reference: nn.Module) -> None:
    assert_same(dict(module.named_parameters()), dict(reference.named_parameters()))


def case_sharded_optimizer_with_schedule_and_later_group(rank: Rank) -> None:
    for reduces in (False, True):
        reference, module = Odd(), Odd()
        late = [nn.Parameter(torch.ones(5, dtype=double)) for _ in range(2)]
        replicas, optimizer, reduce = optimizers(module, reduces=reduces, lr=1e-2)
        alone = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        schedules = [torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5) for o in (alone, optimizer)]
        for step in range(4):
            if step == 2:
                for each, extra in zip((alone, optimizer), late, strict=True):
                    each.add_param_group(
                        {"params": [extra], "lr": 0.3, "weight_decay": 0.0, "initial_lr": 1.0}
                    )
            reference(ids(step)).backward()
            replicas(share(ids(step), rank)).backward()
            for extra in late:
                extra.square().sum().backward()
            reduce()
            for each in (alone, optimizer, *schedules):
                each.step()
            for each in (alone, optimizer):
                each.zero_grad()
            for extra in late:
                extra.grad = None
        assert optimizer.param_groups[0]["lr"] == 1e-2 / 16
        assert_same_weights(module, reference)
        close(late[1], late[0])
        state = resident_bytes(t for entry in optimizer.state.values() for t in entry.values() if t.dim())
        whole = 2 * sum(p.nbytes for p in [*reference.parameters(), late[0]] if p.requires_grad)
        assert sum(Axis.of(None).all_gather_objects(state)) == whole


def case_sharded_optimizer_resumes_from_its_state(rank: Rank) -> None:
    for reduces in (False, True):
        reference, module = Odd(), Odd()
        alone = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.3)
        replicas, optimizer, reduce = optimizers(module, reduces=reduces, lr=1e-2, weight_decay=0.3)
        for step in range(4):
            if step == 2:  # go on in a new module and optimizer
                saved = copy.deepcopy(optimizer.state_dict())
                module = Odd(seed=1)
                module.load_state_dict(reference.state_dict())
                replicas, optimizer, reduce = optimizers(module, reduces=reduces, lr=9.0)
                optimizer.load_state_dict(saved)
                assert optimizer.param_groups[0]["weight_decay"] == 0.3
                wrong = {**saved, "shard": {"rank": rank.rank, "size": RANKS + 1}}
                with pytest.raises(ValueError, match="cannot be loaded into"):
                    optimizer.load_state_dict(wrong)
            reference(ids(step)).backward()
            replicas(share(ids(step), rank)).backward()
            reduce()
            for each in (alone, optimizer):
                each.step()
                each.zero_grad()
        assert_same_weights(module, reference)


def case_sharded_optimizer_of_any_class(rank: Rank) -> None:
    choices = [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.RMSprop, {"lr": 1e-2}),
        (torch.optim.NAdam, {"lr": 1e-2}),
        (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    ]
    for make, options in choices:
        for reduces in (False, True):
            reference, module = Odd(), Odd()
            alone = make(reference.parameters(), **options)
            replicas, optimizer, reduce = optimizers(module, reduces=reduces, make=make, **options)
            for step in range(3):

                def closure(step=step, replicas=replicas, reduce=reduce) -> torch.Tensor:
                    loss = replicas(share(ids(step), rank))
                    loss.backward()
                    reduce()
                    return loss

                reference(ids(step)).backward()
                alone.step()
                assert optimizer.step(closure) is not None
                alone.zero_grad()
                optimizer.zero_grad()
            assert_same_weights(module, reference)


def case_sharded_optimizer_clips_by_the_global_norm(rank: Rank) -> None:
    reference, module = Odd(), Odd()
    axis = Axis.of(None)
    optimizer = ShardedOptimizer(
        module.parameters(), torch.optim.SGD, lr=0.1, group=axis, reduce_gradients=True
    )
    axis.traffic.clear()
    for _ in range(2):  # accumulates, and reduces once
        reference(ids()).backward()
        module(share(ids(), rank)).backward()
    optimizer.finish_gradient_synchronization()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 1e-2)
    close(optimizer.clip_grad_norm_(1e-2).double(), norm.double(), rtol=1e-6)
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    optimizer.step()
    assert_same_weights(module, reference)
    trainable = sum(p.nbytes for p in reference.parameters() if p.requires_grad)
    assert axis.traffic.bytes[Call("reduce_scatter", "world", "gradients")] == trainable


def case_the_examples_run(rank: Rank) -> None:
    for example in (FSDP, ShardedOptimizer):
        names = {"torch": torch, "nn": nn, "DataParallel": DataParallel, example.__name__: example}
        for test in doctest.DocTestFinder(recurse=False).find(example, globs=names):
            assert len(test.examples) > 3
            result = doctest.DocTestRunner().run(test)
            assert result.failed == 0


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


def run_cases(rank: Rank) -> None:
    torch.set_num_threads(1)
    collectives.join_group(
        rank=rank.rank,
        world_size=RANKS,
        device=torch.device("cpu"),
        rendezvous=rank.rendezvous,
        timeout_s=60,
    )
    for case in CASES:
        case(rank)
        Axis.of(None).all_reduce(torch.zeros(1))  # in step, so that a failure is one case's own
        if rank.rank == 0:
            print(case.__name__, flush=True)
    collectives.leave_group()


def test_fully_sharded_on_four_ranks(tmp_path):
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == [case.__name__ for case in CASES]


@pytest.mark.parametrize("count", [0, 1, 3, 4, 10, 4097])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_pieces_cover_everything_once_and_are_equal_but_for_the_last(count, ranks):
    cuts = pieces(count, ranks)
    assert [i for cut in cuts for i in range(cut.start, cut.stop)] == list(range(count))
    sizes = [cut.stop - cut.start for cut in cuts]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == ranks
    assert sizes[0] == -(-count // ranks)


def test_stages_that_fsdp_does_not_have_are_named():
    with pytest.raises(ValueError, match="use ShardedOptimizer"):
        FSDP(nn.Linear(1, 1), zero=1)


@pytest.mark.parametrize("make", [FSDP, lambda m: ShardedOptimizer(m.parameters(), torch.optim.SGD, lr=1.0)])
def test_without_a_process_group_it_says_so(make):
    with pytest.raises(ValueError, match="init_process_group"):
        make(nn.Linear(1, 1))


if __name__ == "__main__":
    bind_to_loopback()
    launch(run_cases, world_size=RANKS, folder=Path(sys.argv[1]), timeout_s=60)
