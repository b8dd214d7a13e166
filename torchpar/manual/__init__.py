"""torch-manual: we decide where data moves, with the collectives of `torch.distributed`."""

from functools import partial
from typing import Any

from torch import nn

from compare.spec.axes import CP, DATA, EP, PP, REPLICAS, SHARDS, TP
from compare.spec.experiment import Experiment
from torchpar.comm.mesh import Mesh
from torchpar.engine import Engine, Fill
from torchpar.gpt_stages import TIED, GPTStages, stages_of, units_of
from torchpar.manual.context_parallel import split_sequence
from torchpar.manual.data_parallel import DataParallel
from torchpar.manual.expert_parallel import share_out_experts
from torchpar.manual.flat import ranks_of
from torchpar.manual.flat_parameters import gather_pieces, pieces_of
from torchpar.manual.fully_sharded import FSDP
from torchpar.manual.megatron import VocabParallelEmbedding
from torchpar.manual.pipeline_parallel import run_stages
from torchpar.manual.sharded_optimizer import ShardedOptimizer
from torchpar.manual.tensor_parallel import split_layers
from torchpar.model import GPT
from torchpar.optimizer import make_optimizer
from torchpar.remat import apply_remat
from torchpar.sharding import Sharding, TensorsByName


def make_engine(model: GPT, experiment: Experiment, mesh: Mesh, fill: Fill) -> Engine:
    """The model under the layout. The order: tensor, expert and context parallelism, recomputation, the
    stages of a pipeline, data parallelism or ZeRO, and the schedule of the pipeline.

    `fill` gives this rank's parameters their values; ZeRO-2 and 3 fill unit by unit. One device gets the
    plain module, the reference for every other run.
    """
    layout, shardings = experiment.layout, []
    if mesh[TP].size > 1:
        shardings.append(split_layers(model, mesh[TP], sequence_parallel=layout.sequence_parallel))
    if mesh[EP].size > 1:
        shardings.append(share_out_experts(model, mesh, layout))
    if mesh[CP].size > 1:
        split_sequence(model, mesh[CP], layout, mesh.device)
    apply_remat(model.blocks, layout.remat)
    part = GPTStages(model, layout, stages_of(layout, mesh[PP].rank)) if mesh[PP].size > 1 else model
    if layout.zero < 2:
        fill(part)
    engine = (_sharded if layout.zero else _replicated)(part, experiment, mesh, fill)
    if isinstance(part, GPTStages):
        engine = run_stages(part, engine, mesh[PP], layout)
    for sharding in reversed(shardings):  # gathering undoes the last split first
        engine = engine.with_sharding(sharding)
    return engine


def _replicated(model: GPT | GPTStages, experiment: Experiment, mesh: Mesh, fill: Fill) -> Engine:
    parameters, layout = dict(model.named_parameters()), experiment.layout
    optimizer, data = make_optimizer(parameters, experiment), mesh.joined(*DATA)
    if data.size == 1:
        return Engine(module=model, optimizer=optimizer, parameters=parameters)
    sync, size = layout.gradient_sync, layout.bucket_mb
    replicas = DataParallel(model, gradient_sync=sync, bucket_size_mb=size, axis=data)
    return Engine(
        module=replicas,
        optimizer=optimizer,
        parameters=parameters,
        sharding=Sharding(finish_gradients=lambda _: replicas.finish_gradient_synchronization()),
        no_sync=replicas.no_sync,
    )


def _sharded(model: GPT | GPTStages, experiment: Experiment, mesh: Mesh, fill: Fill) -> Engine:
    """ZeRO-1: the optimizer reduces gradients itself, each to the rank that needs it. ZeRO-2 and 3: FSDP."""
    full, layout = dict(model.named_parameters()), experiment.layout
    axes = {"axis": mesh.joined(*SHARDS), "replicas": mesh.joined(*REPLICAS)}
    if layout.zero == 1:
        wrap = partial(ShardedOptimizer, **axes, bucket_size_mb=layout.bucket_mb)
        # Both stages that have a copy of the tied weight must cut it alike.
        separate = {TIED} if isinstance(model, GPTStages) else ()
        zero: Any = make_optimizer(full, experiment, wrap=wrap, separate_groups=separate)
    else:
        zero = FSDP(
            model,
            **axes,
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
        whole = gather_pieces(flats, {full[name]: piece for name, piece in pieces.items()})
        return {name: whole[full[name]] for name in pieces}

    return Engine(
        module=model if layout.zero == 1 else zero,
        optimizer=zero if isinstance(zero, ShardedOptimizer) else make_optimizer(pieces, experiment),
        parameters=pieces,
        sharding=Sharding(
            axes={name: (ranks_of(p, axes["axis"]),) for name, p in full.items()},
            elements={name: elements[parameter] for name, parameter in full.items()},
            finish_gradients=lambda _: zero.finish_gradient_synchronization(),
            gather=gather,
        ),
        no_sync=zero.no_sync,
        resized_buffers=tuple(flat.full for flat in flats if layout.zero == 3),
    )
