"""Two steps of a small GPT on four ranks, by any engine of torchpar, and by the plain GPT on one rank.

The plain GPT trains on the whole batch, with PyTorch's clipping and optimizer.
"""

import copy
import functools
from collections.abc import Callable
from functools import partial

import torch
from msgspec.structs import replace

from compare.contract.communication import Communication, summed
from compare.numerics.context import order_of_positions
from compare.numerics.optimizer import learning_rate
from compare.spec.axes import CP, ROWS
from compare.spec.experiment import Experiment, Layout, Model, Optimizer
from tests.support.ranks import CPU
from torchpar.checkpoint import all_moments
from torchpar.comm.mesh import Mesh, make_mesh
from torchpar.engine import Engine
from torchpar.measure.ledger import LedgerSink
from torchpar.measure.watch import Watch
from torchpar.model import GPT
from torchpar.optimizer import clip_gradients, make_optimizer
from torchpar.weights import moment_keys

MakeEngine = Callable[..., Engine]
CONFIG = Model(n_layer=2, n_head=4, n_embd=12, block_size=8, vocab_size=50, bias=True)  # 50 does not divide
ADAM = Experiment(model=CONFIG, optimizer=Optimizer(warmup_iters=0, grad_clip=0.1))
SGD = replace(ADAM, optimizer=Optimizer(name="sgd", momentum=0.9, grad_clip=0.0))
# The order of the sums differs, and Adam divides a gradient by its own size.
close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)


def make_gpt(config: Model = CONFIG) -> GPT:
    model = GPT(config).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():  # biases too, to expose a doubled one
            p.copy_(torch.randn(p.shape, dtype=torch.float64, generator=generator) / 4)
    return model


def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (A, B, T): 2 passes of 4 sequences."""
    tokens = torch.randint(50, (2, 4, 9), generator=torch.Generator().manual_seed(step))
    return tokens[:, :, :-1], tokens[:, :, 1:]


@functools.cache
def reference(experiment: Experiment, steps: int = 2) -> dict[str, dict[str, torch.Tensor]]:
    """The gradients of the last step before clipping, and weights and moments after it."""
    model, config = make_gpt(experiment.model), experiment.optimizer
    named = dict(model.named_parameters())
    optimizer = make_optimizer(named, experiment)
    for step in range(steps):
        inputs, targets = batches(step)
        model(inputs.flatten(0, 1), targets.flatten(0, 1))[1].backward()
        gradients = {name: p.grad.clone() for name, p in named.items()}
        if config.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate
        optimizer.step()
        optimizer.zero_grad()
    result = {"gradients": gradients, "weights": {name: p.detach() for name, p in named.items()}}
    for key in moment_keys(experiment.optimizer).values():
        result[key] = {name: optimizer.state[p][key] for name, p in named.items()}
    return result


def keep_values(*_: object) -> None:
    """A `Fill` for a model that has values."""


def make_parallel(
    make_engine: MakeEngine, layout: Layout, rank: int, experiment: Experiment, model: GPT | None = None
) -> tuple[Engine, Mesh]:
    mesh, experiment = make_mesh(layout, rank=rank, device=CPU), replace(experiment, layout=layout)
    return make_engine(model or make_gpt(experiment.model), experiment, mesh, keep_values), mesh


def backward(engine: Engine, mesh: Mesh, step: int, layout: Layout = ADAM.layout) -> torch.Tensor:
    data, context = mesh.joined(*ROWS), mesh[CP]
    rows = slice(data.rank * 4 // data.size, (data.rank + 1) * 4 // data.size)
    order_T = torch.tensor(order_of_positions(CONFIG.block_size, layout)).chunk(context.size)[context.rank]
    (first, last), (first_targets, last_targets) = (tensor[:, rows][..., order_T] for tensor in batches(step))
    with engine.step_context():
        with engine.no_sync():
            (engine.module(first, first_targets)[1] / 2).backward()
        loss = engine.module(last, last_targets)[1]
        (loss / 2).backward()
    engine.finish_gradients()
    return loss.detach()


def update(engine: Engine, config: Optimizer, step: int) -> torch.Tensor:
    """Clip, update and drop the gradients. Returns the norm, ()."""
    norm = clip_gradients(engine, config.grad_clip)
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    engine.optimizer.step()
    engine.optimizer.zero_grad(set_to_none=True)
    return norm


def count(engine: Engine, mesh: Mesh) -> dict[tuple[str, str], Communication]:
    """The ledger's sums of a step, by kind and purpose."""
    axes = {axis.group.group_name: axis.name for axis in mesh.axes.values() if axis.group}
    sink = LedgerSink(axes, infers_purposes=True)
    with Watch(sink):
        backward(engine, mesh, 0)
    return {(row.kind, row.purpose): row for row in summed(sink.result().rows)}


def train(make_engine: MakeEngine, layout: Layout, rank: int, experiment: Experiment) -> tuple[dict, Engine]:
    engine, mesh = make_parallel(make_engine, layout, rank, experiment)
    config = replace(experiment.optimizer, decay_lr=False)
    for step in range(2):
        backward(engine, mesh, step, layout)
        gradients = copy.deepcopy(engine.gather(engine.gradients()))
        update(engine, config, step)
    result = {"gradients": gradients, "weights": engine.gather(engine.weights())}
    for key in moment_keys(experiment.optimizer).values():
        result[key] = engine.gather(all_moments(engine, key))
    return result, engine


def assert_same(got: dict, expected: dict, layout: str) -> None:
    for kind, tensors in expected.items():
        assert set(got[kind]) == set(tensors), f"{layout} {kind}"
        for name, tensor in tensors.items():
            close(got[kind][name], tensor, msg=lambda text, at=(layout, kind, name): f"{at}: {text}")
