"""The engine torch-compiler: parameters are placed, and DTensor decides what moves.

`parallelize` composes the strategies: the model is written as for one device, and each strategy has its say
about where its tensors live.
"""

from collections.abc import Mapping
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compare.numerics.parameters import parameter_table
from compare.spec.experiment import Layout
from torchpar.comm.mesh import Mesh
from torchpar.compiler import data_parallel, fully_sharded, tensor_parallel
from torchpar.compiler.placement import Placements, device_mesh, of_parameter, placed
from torchpar.dtensors import axes_of, dtensor_optimizer, elements_of, full_tensors
from torchpar.head_order import deal_heads, restore_order
from torchpar.model import GPT
from torchpar.parallel_model import OptimizerMaker, ParallelModel
from torchpar.remat import apply_remat, resolve_remat
from torchpar.weights import nanogpt_name


def parallelize(model: GPT, *, mesh: Mesh, layout: Layout, make_optimizer: OptimizerMaker) -> ParallelModel:
    """The model under the layout. The order: parameters, the batch, tensor parallelism, shards.

    One device gets the plain module.
    """
    if mesh.world.size == 1:
        apply_remat(model.blocks, resolve_remat(layout))
        own = dict(model.named_parameters())
        return ParallelModel(module=model, optimizer=make_optimizer(own), parameters=own)
    devices, remat = device_mesh(mesh), resolve_remat(layout)
    at_rest, shard = (
        {
            nanogpt_name(row.name): of_parameter(row, devices, split=tensor_parallel.SPLIT, sharded=sharded)
            for row in parameter_table(model.config)
        }
        for sharded in (layout.zero == 3, layout.zero > 0)
    )
    if layout.tp > 1:
        for block in model.blocks:
            deal_heads(block.get_submodule("attn.c_attn"), layout.tp)
    place_parameters(model, devices, at_rest)
    loss = {"cross_entropy": tensor_parallel.cross_entropy} if layout.tp > 1 else {}
    data_parallel.split_batch(model, devices, **loss)
    if layout.tp > 1:
        tensor_parallel.split_layers(model, devices, sequence_parallel=layout.sequence_parallel)
    kept = None
    if layout.zero == 3:
        kept = fully_sharded.shard_parameters(
            model, devices, remat=remat, reshard_after_forward=layout.reshard_after_forward
        )
    else:
        apply_remat(model.blocks, remat)
    whole = dict(model.named_parameters())
    updated = fully_sharded.shards_of(whole, shard) if layout.zero in (1, 2) else whole
    optimizer = make_optimizer(updated, wrap=dtensor_optimizer)
    if layout.zero in (1, 2):
        gather = partial(fully_sharded.gather_parameters, whole, updated)
        optimizer.register_step_post_hook(lambda *_: gather())
    if layout.zero == 2:
        for name, parameter in whole.items():
            parameter.register_hook(partial(fully_sharded.scatter, placements=shard[name]))

    def free() -> None:
        if kept:
            kept.free()

    def finish() -> None:
        free()
        for name, parameter in whole.items():
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            updated[name].grad = data_parallel.synchronize_gradients(gradient, shard[name])

    axes = {name: axes_of(parameter, mesh) for name, parameter in updated.items()}
    return ParallelModel(
        module=model,
        optimizer=optimizer,
        parameters=updated,
        finish_gradient_synchronization=finish,
        end_evaluation=free,
        sharded_over=axes.__getitem__,
        elements=lambda name: elements_of(updated[name], mesh),
        gathers=(full_tensors, partial(restore_order, ranks=mesh.tp.size)),
    )


def place_parameters(model: nn.Module, devices: DeviceMesh, placements: Mapping[str, Placements]) -> None:
    """Put DTensors in the place of a model's parameters; tied ones stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                full = f"{path}.{name}"
                made[parameter] = nn.Parameter(placed(parameter.detach(), devices, placements[full]))
            setattr(module, name, made[parameter])
