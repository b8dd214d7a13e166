"""torch-manual: we decide where data moves, with the collectives of `torch.distributed`."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from compare.spec.axes import DP_REPLICATE, DP_SHARD, PP, TP
from compare.spec.experiment import Layout
from torchpar.comm.mesh import Mesh
from torchpar.gpt_stages import TIED, GPTStages, as_pipeline, cut, units_of
from torchpar.manual.data_parallel import DataParallel
from torchpar.manual.fully_sharded import FSDP
from torchpar.manual.megatron.gpt_parts import of_parts
from torchpar.manual.megatron.vocab_parallel import VocabParallelEmbedding
from torchpar.manual.pipeline.gpt_runner import make_evaluation, make_runner
from torchpar.manual.sharded_optimizer import ShardedOptimizer
from torchpar.manual.tensor_parallel import split_layers
from torchpar.model import GPT
from torchpar.parallel_model import Fill, OptimizerMaker, ParallelModel, TensorsByName, keep_values
from torchpar.remat import apply_remat, resolve_remat


def parallelize(
    model: GPT, *, mesh: Mesh, layout: Layout, make_optimizer: OptimizerMaker, fill: Fill = keep_values
) -> ParallelModel:
    """The model under the layout. The order: tensor parallelism, recomputation, the cut into a pipeline's
    stages, what is done to this rank's share of all that, and the pipeline that runs it. The share is filled
    when it is cut so far; a fully sharded one unit by unit.

    One device gets the plain module: the reference that every other run is held against.
    """
    split = None
    if mesh[TP].size > 1:
        split = split_layers(model, mesh[TP], sequence_parallel=layout.sequence_parallel)
    apply_remat(model.blocks, resolve_remat(layout))
    part = cut(model, rank=mesh[PP].rank, layout=layout) if mesh[PP].size > 1 else model
    if layout.zero < 2:
        fill(part)
    if layout.zero >= 2:
        parallel = _fully_sharded(part, mesh, layout, make_optimizer, fill)
    elif layout.zero == 1:
        parallel = _sharded_optimizer(part, mesh, layout, make_optimizer)
    else:
        parallel = _replicated(part, mesh, layout, make_optimizer)
    if isinstance(part, GPTStages):
        makers = (make_runner, make_evaluation)
        run, evaluate = (make(part, parallel, axis=mesh[PP], layout=layout) for make in makers)
        parallel = as_pipeline(parallel, axis=mesh[PP], run=run, evaluate=evaluate)
    return of_parts(parallel, split) if split else parallel


def _replicated(
    model: GPT | GPTStages, mesh: Mesh, layout: Layout, make_optimizer: OptimizerMaker
) -> ParallelModel:
    parameters = dict(model.named_parameters())
    optimizer = make_optimizer(parameters)
    if mesh[DP_REPLICATE].size == 1:
        return ParallelModel(module=model, optimizer=optimizer, parameters=parameters)
    replicas = DataParallel(
        model,
        gradient_sync=layout.gradient_sync,
        bucket_size_mb=layout.bucket_mb,
        group=mesh[DP_REPLICATE],
    )
    return ParallelModel(
        module=replicas,
        optimizer=optimizer,
        parameters=parameters,
        no_sync=replicas.no_sync,
        finish_gradient_synchronization=replicas.finish_gradient_synchronization,
    )


def _fully_sharded(
    model: GPT | GPTStages, mesh: Mesh, layout: Layout, make_optimizer: OptimizerMaker, fill: Fill
) -> ParallelModel:
    """ZeRO-2 and 3."""
    full = dict(model.named_parameters())
    sharded = FSDP(
        model,
        units=units_of(model),
        group=mesh[DP_SHARD],
        replicate_group=mesh[DP_REPLICATE],
        zero=3 if layout.zero == 3 else 2,
        reshard_after_forward=layout.reshard_after_forward,
        inputs_only=(nn.Embedding, VocabParallelEmbedding),
        fill=partial(fill, model),
    )
    pieces = _pieces(sharded, full)
    return _in_pieces(sharded, mesh, full, module=sharded, optimizer=make_optimizer(pieces))


def _sharded_optimizer(
    model: GPT | GPTStages, mesh: Mesh, layout: Layout, make_optimizer: OptimizerMaker
) -> ParallelModel:
    """ZeRO-1: the optimizer reduces gradients itself, each to the rank that needs it."""
    full = dict(model.named_parameters())
    wrap = partial(
        ShardedOptimizer,
        group=mesh[DP_SHARD],
        replicate_group=mesh[DP_REPLICATE],
        bucket_size_mb=layout.bucket_mb,
    )
    # Both stages that have a copy of the tied weight must cut it alike.
    optimizer = make_optimizer(
        full, wrap=wrap, separate_groups={TIED} if isinstance(model, GPTStages) else ()
    )
    assert isinstance(optimizer, ShardedOptimizer)
    return _in_pieces(optimizer, mesh, full, module=model, optimizer=optimizer)


def _pieces(sharding: FSDP | ShardedOptimizer, full: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    piece_of = sharding.piece_by_parameter
    return {name: piece_of[parameter] for name, parameter in full.items()}


def _in_pieces(
    sharding: FSDP | ShardedOptimizer,
    mesh: Mesh,
    full: Mapping[str, nn.Parameter],
    *,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> ParallelModel:
    """A model of whose parameters, given by name, this rank updates pieces."""
    elements = sharding.elements_by_parameter

    def gather(pieces: TensorsByName) -> TensorsByName:
        gathered = sharding.gather_by_parameter({full[name]: piece for name, piece in pieces.items()})
        return {name: gathered[full[name]] for name in pieces}

    return ParallelModel(
        module=module,
        optimizer=optimizer,
        parameters=_pieces(sharding, full),
        no_sync=sharding.no_sync,
        finish_gradient_synchronization=sharding.finish_gradient_synchronization,
        sharded_over=lambda name: (mesh[DP_SHARD],),
        elements=lambda name: elements[full[name]],
        gathers=(gather,),
        transient=tuple(flat.full for flat in sharding.flats if not flat.keeps_full),
    )
