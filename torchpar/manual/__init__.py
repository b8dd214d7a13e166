"""torch-manual: we decide where data moves, with the collectives of `torch.distributed`."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from compare.spec.axes import CP, DATA, EP, PP, REPLICAS, SHARDS, TP
from compare.spec.experiment import Layout
from torchpar.comm.mesh import Mesh
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
from torchpar.parallel_model import Fill, OptimizerMaker, ParallelModel, Strategy, TensorsByName
from torchpar.remat import apply_remat


def parallelize(
    model: GPT, *, mesh: Mesh, layout: Layout, make_optimizer: OptimizerMaker, fill: Fill
) -> ParallelModel:
    """The model under the layout. The order: tensor, expert and context parallelism, recomputation, the cut
    into a pipeline's stages, what is done to this rank's share of all that, and the pipeline that runs it.
    The share is filled when it is cut so far; a fully sharded one unit by unit.

    One device gets the plain module: the reference that every other run is held against.
    """
    splits = []
    if mesh[TP].size > 1:
        splits.append(split_layers(model, mesh[TP], sequence_parallel=layout.sequence_parallel))
    if mesh[EP].size > 1:
        splits.append(share_out_experts(model, mesh, layout))
    if mesh[CP].size > 1:
        split_sequence(model, mesh[CP], layout, mesh.device)
    apply_remat(model.blocks, layout.remat)
    part = GPTStages(model, layout, stages_of(layout, mesh[PP].rank)) if mesh[PP].size > 1 else model
    if layout.zero < 2:
        fill(part)
    parallel = (_sharded if layout.zero else _replicated)(part, mesh, layout, make_optimizer, fill)
    if isinstance(part, GPTStages):
        parallel = run_stages(part, parallel, mesh[PP], layout)
    for split in reversed(splits):  # the last cut is the first to be joined again
        parallel = parallel.under(split)
    return parallel


def _replicated(
    model: GPT | GPTStages, mesh: Mesh, layout: Layout, make_optimizer: OptimizerMaker, fill: Fill
) -> ParallelModel:
    parameters = dict(model.named_parameters())
    parallel = ParallelModel(module=model, optimizer=make_optimizer(parameters), parameters=parameters)
    data = mesh.joined(*DATA)
    if data.size == 1:
        return parallel
    sync, size = layout.gradient_sync, layout.bucket_mb
    replicas = DataParallel(model, gradient_sync=sync, bucket_size_mb=size, axis=data)
    parallel = replace(parallel, module=replicas, skip_sync=replicas.no_sync)
    return parallel.under(Strategy(finish=lambda _: replicas.finish_gradient_synchronization()))


def _sharded(
    model: GPT | GPTStages, mesh: Mesh, layout: Layout, make_optimizer: OptimizerMaker, fill: Fill
) -> ParallelModel:
    """ZeRO-1: the optimizer reduces gradients itself, each to the rank that needs it. ZeRO-2 and 3: FSDP."""
    full = dict(model.named_parameters())
    axes = {"axis": mesh.joined(*SHARDS), "replicas": mesh.joined(*REPLICAS)}
    if layout.zero == 1:
        wrap = partial(ShardedOptimizer, **axes, bucket_size_mb=layout.bucket_mb)
        # Both stages that have a copy of the tied weight must cut it alike.
        separate = {TIED} if isinstance(model, GPTStages) else ()
        sharding: Any = make_optimizer(full, wrap=wrap, separate_groups=separate)
    else:
        sharding = FSDP(
            model,
            **axes,
            units=units_of(model),
            zero=layout.zero,
            reshard_after_forward=layout.reshard_after_forward,
            inputs_only=(nn.Embedding, VocabParallelEmbedding),
            fill=partial(fill, model),
        )
    piece_of, flats = pieces_of(sharding.flats), sharding.flats
    pieces = {name: piece_of[parameter] for name, parameter in full.items()}
    elements = {p: flat.elements_of(index) for flat in flats for index, p in enumerate(flat.parameters)}

    def gather(pieces: TensorsByName) -> TensorsByName:
        whole = gather_pieces(flats, {full[name]: piece for name, piece in pieces.items()})
        return {name: whole[full[name]] for name in pieces}

    parallel = ParallelModel(
        module=model if layout.zero == 1 else sharding,
        optimizer=sharding if isinstance(sharding, ShardedOptimizer) else make_optimizer(pieces),
        parameters=pieces,
        elements={name: elements[parameter] for name, parameter in full.items()},
        skip_sync=sharding.no_sync,
        transient=tuple(flat.full for flat in flats if layout.zero == 3),
        sharded_over={name: (ranks_of(p, axes["axis"]),) for name, p in full.items()},
    )
    return parallel.under(
        Strategy(finish=lambda _: sharding.finish_gradient_synchronization(), gather=gather)
    )
