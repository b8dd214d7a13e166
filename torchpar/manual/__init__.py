"""torch-manual: our own code decides what moves and when, with the collectives of `torch.distributed`."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from compare.spec.axes import CP, DATA, EP, PP, REPLICAS, SHARDS, TP
from compare.spec.experiment import Experiment
from torchpar.comm.collectives import Axis
from torchpar.comm.mesh import Mesh
from torchpar.compilation import compile_blocks
from torchpar.engine import Engine, Fill
from torchpar.gathered import gathered_dtype
from torchpar.gpt_stages import GPTStages, stages_of
from torchpar.manual.context_parallel import split_sequence
from torchpar.manual.data_parallel import DataParallel
from torchpar.manual.expert_parallel import shard_experts
from torchpar.manual.fully_sharded import FSDP, gather_pieces, pieces_of, units_of
from torchpar.manual.pipeline_parallel import run_stages
from torchpar.manual.sharded_optimizer import ShardedOptimizer
from torchpar.manual.tensor_parallel import split_layers
from torchpar.manual.vocab_parallel import VocabParallelEmbedding, split_vocabulary
from torchpar.model import GPT
from torchpar.optimizer import make_optimizer
from torchpar.remat import apply_remat
from torchpar.sharding import Sharding, TensorsByName
from torchpar.tied_weights import TIED

ExpertAxes = dict[nn.Parameter, Axis]


def make_engine(model: GPT, experiment: Experiment, mesh: Mesh, fill: Fill) -> Engine:
    """Parallelize the model by the layout. One device has the plain module, the reference of all runs.

    `fill` gives parameters their values once they are split; ZeRO-2 and 3 fill unit by unit.
    """
    layout, shardings, expert_axes = experiment.layout, [], ExpertAxes()
    if mesh[TP].size > 1:
        shardings.append(split_layers(model, mesh[TP], sequence_parallel=layout.sequence_parallel))
        shardings.append(split_vocabulary(model, mesh[TP], sequence_parallel=layout.sequence_parallel))
    if mesh[EP].size > 1:
        sharding, expert_axes = shard_experts(model, mesh, layout)
        shardings.append(sharding)
    if mesh[CP].size > 1:
        split_sequence(model, mesh[CP], layout, mesh.device)
    apply_remat(model.blocks, layout.remat)
    compiled = compile_blocks(model.blocks, layout, mesh.device)
    part = GPTStages(model, layout, stages_of(layout, mesh[PP].rank)) if mesh[PP].size > 1 else model
    if layout.zero < 2:
        fill(part)
    if layout.zero:
        engine = _shard(part, experiment, mesh, fill, expert_axes)
    else:
        engine = _replicate(part, experiment, mesh, expert_axes)
    for sharding in reversed(shardings):  # gathering undoes the last split first
        engine = engine.with_sharding(sharding)
    if isinstance(part, GPTStages):  # gathered last: the stages of other ranks come on the CPU
        engine = run_stages(part, engine, mesh, layout)
    return replace(engine, compiled=compiled)


def _replicate(model: GPT | GPTStages, experiment: Experiment, mesh: Mesh, expert_axes: ExpertAxes) -> Engine:
    parameters, layout, data = dict(model.named_parameters()), experiment.layout, mesh.joined(*DATA)
    optimizer = make_optimizer(parameters, experiment)
    if data.size == 1:
        return Engine(module=model, optimizer=optimizer, parameters=parameters)
    replicas = DataParallel(
        model,
        gradient_sync=layout.gradient_sync,
        bucket_size_mb=layout.bucket_mb,
        axis_of=dict.fromkeys(parameters.values(), data) | expert_axes,
        ranks=data.size,
    )
    return Engine(
        module=replicas,
        optimizer=optimizer,
        parameters=parameters,
        sharding=Sharding(finish_gradients=lambda _: replicas.finish_gradient_synchronization()),
        no_sync=partial(no_sync, replicas),
    )


def _shard(
    model: GPT | GPTStages, experiment: Experiment, mesh: Mesh, fill: Fill, expert_axes: ExpertAxes
) -> Engine:
    """ZeRO-1: the optimizer reduces gradients to the rank that needs them. ZeRO-2 and 3: FSDP."""
    full, layout = dict(model.named_parameters()), experiment.layout
    axis_of = dict.fromkeys(full.values(), mesh.joined(*SHARDS)) | expert_axes
    how = {"axis_of": axis_of, "shards": mesh.joined(*SHARDS), "replicas": mesh.joined(*REPLICAS)}
    if layout.zero == 1:
        wrap = partial(ShardedOptimizer, **how, bucket_size_mb=layout.bucket_mb)
        # The first and the last stage of a pipeline must shard their copies of the tied weight alike.
        separate = {TIED} if isinstance(model, GPTStages) else ()
        zero: Any = make_optimizer(full, experiment, wrap=wrap, separate_groups=separate)
    else:
        zero = FSDP(
            model,
            **how,
            gathered={p: d for name, p in full.items() if (d := gathered_dtype(name, experiment))},
            units=units_of(model),
            zero=layout.zero,
            reshard_after_forward=layout.reshard_after_forward,
            inputs_only=(nn.Embedding, VocabParallelEmbedding),
            fill=partial(fill, model),
        )
    piece_of, flats = pieces_of(zero.flats), zero.flats
    pieces = {name: piece_of[parameter] for name, parameter in full.items()}
    elements = {p: flat.elements_of(index) for flat in flats for index, p in enumerate(flat.parameters)}

    def gather(pieces: TensorsByName) -> TensorsByName:
        gathered = gather_pieces(flats, {full[name]: piece for name, piece in pieces.items()})
        return {name: gathered[full[name]] for name in pieces}

    return Engine(
        module=model if layout.zero == 1 else zero,
        optimizer=zero if isinstance(zero, ShardedOptimizer) else make_optimizer(pieces, experiment),
        parameters=pieces,
        sharding=Sharding(
            axes={name: (axis_of[parameter],) for name, parameter in full.items()},
            elements={name: elements[parameter] for name, parameter in full.items()},
            finish_gradients=lambda _: zero.finish_gradient_synchronization(),
            gather=gather,
        ),
        no_sync=partial(no_sync, zero),
        resized_buffers=tuple(flat.full for flat in flats if layout.zero == 3),
    )


@contextmanager
def no_sync(wrapper: DataParallel | FSDP | ShardedOptimizer) -> Generator[None]:
    """Only accumulate gradients: around every forward and backward of a step except the last."""
    wrapper.is_synchronizing = False
    try:
        yield
    finally:
        wrapper.is_synchronizing = True
