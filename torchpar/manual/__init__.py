"""torch-manual: we decide where data moves, with the collectives of `torch.distributed`."""

from functools import partial

from torch import nn

from compare.spec.axes import DP_REPLICATE, DP_SHARD, PP, TP
from compare.spec.experiment import Layout
from torchpar.comm.mesh import Mesh
from torchpar.gpt_stages import TIED, GPTStages, cut, units_of
from torchpar.manual.data_parallel import DataParallel
from torchpar.manual.flat_parameters import gather_pieces, pieces_of
from torchpar.manual.fully_sharded import FSDP
from torchpar.manual.megatron import VocabParallelEmbedding
from torchpar.manual.pipeline_parallel import run_stages
from torchpar.manual.sharded_optimizer import ShardedOptimizer
from torchpar.manual.tensor_parallel import split_layers
from torchpar.model import GPT
from torchpar.parallel_model import (
    Fill,
    OptimizerMaker,
    ParallelModel,
    Parameters,
    Strategy,
    TensorsByName,
    keep_values,
)
from torchpar.remat import apply_remat, resolve_remat


def parallelize(
    model: GPT, *, mesh: Mesh, layout: Layout, make_optimizer: OptimizerMaker, fill: Fill = keep_values
) -> ParallelModel:
    """The model under the layout. The order: tensor parallelism, recomputation, the cut into a pipeline's
    stages, what is done to this rank's share of all that, and the pipeline that runs it. The share is filled
    when it is cut so far; a fully sharded one unit by unit.

    One device gets the plain module: the reference that every other run is held against.
    """
    tensor = None
    if mesh[TP].size > 1:
        tensor = split_layers(model, mesh[TP], sequence_parallel=layout.sequence_parallel)
    apply_remat(model.blocks, resolve_remat(layout))
    part = cut(model, rank=mesh[PP].rank, layout=layout) if mesh[PP].size > 1 else model
    if layout.zero < 2:
        fill(part)
    share = (_replicated, _sharded_optimizer, _fully_sharded, _fully_sharded)[layout.zero]
    parallel = share(part, mesh, layout, make_optimizer, fill)
    if isinstance(part, GPTStages):
        parallel = run_stages(part, parallel, mesh[PP], layout)
    return parallel.under(tensor) if tensor else parallel


def _replicated(
    model: GPT | GPTStages, mesh: Mesh, layout: Layout, make_optimizer: OptimizerMaker, fill: Fill
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
    parallel = ParallelModel(
        module=replicas, optimizer=optimizer, parameters=parameters, skip_sync=replicas.no_sync
    )
    return parallel.under(Strategy(finish=lambda parameters: replicas.finish_gradient_synchronization()))


def _sharded_optimizer(
    model: GPT | GPTStages, mesh: Mesh, layout: Layout, make_optimizer: OptimizerMaker, fill: Fill
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
    separate = {TIED} if isinstance(model, GPTStages) else ()
    optimizer = make_optimizer(full, wrap=wrap, separate_groups=separate)
    assert isinstance(optimizer, ShardedOptimizer)
    strategy, pieces, elements = shards(optimizer, full)
    return ParallelModel(
        module=model,
        optimizer=optimizer,
        parameters=pieces,
        elements=elements,
        skip_sync=optimizer.no_sync,
    ).under(strategy)


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
        zero=layout.zero,
        reshard_after_forward=layout.reshard_after_forward,
        inputs_only=(nn.Embedding, VocabParallelEmbedding),
        fill=partial(fill, model),
    )
    strategy, pieces, elements = shards(sharded, full)
    return ParallelModel(
        module=sharded,
        optimizer=make_optimizer(pieces),
        parameters=pieces,
        elements=elements,
        skip_sync=sharded.no_sync,
        transient=tuple(flat.full for flat in sharded.flats if flat.zero == 3),
    ).under(strategy)


def shards(
    sharding: FSDP | ShardedOptimizer, full: Parameters
) -> tuple[Strategy, dict[str, nn.Parameter], dict[str, slice]]:
    """Ranks that update pieces of flat buffers: the strategy, and by name pieces and the elements of each."""
    piece_of = pieces_of(sharding.flats)
    elements = {p: flat.elements_of(n) for flat in sharding.flats for n, p in enumerate(flat.parameters)}

    def gather(pieces: TensorsByName) -> TensorsByName:
        whole = gather_pieces(sharding.flats, {full[name]: piece for name, piece in pieces.items()})
        return {name: whole[full[name]] for name in pieces}

    def finish(parameters: Parameters) -> None:
        sharding.finish_gradient_synchronization()

    strategy = Strategy(axis=sharding.axis, spread=full, finish=finish, gather=gather)
    pieces = {name: piece_of[parameter] for name, parameter in full.items()}
    return strategy, pieces, {name: elements[parameter] for name, parameter in full.items()}
