"""The engine torch-compiler: parameters are placed, and DTensor decides what moves.

`parallelize` composes the strategies: the model is written as for one device, and each strategy has its say
about where its tensors live.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compare.numerics.parameters import parameter_table
from compare.spec.axes import ROWS, SHARDED_FROM
from compare.spec.experiment import Layout
from torchpar.comm.mesh import Mesh
from torchpar.compiler import data_parallel, fully_sharded, tensor_parallel
from torchpar.compiler.compilation import compile_forward, resolve_backend
from torchpar.compiler.placement import Placements, device_mesh, of_parameter, placed
from torchpar.dtensors import deal_heads, dtensor_optimizer, of_dtensors
from torchpar.model import GPT
from torchpar.parallel_model import Fill, OptimizerMaker, ParallelModel, keep_values
from torchpar.remat import apply_remat, resolve_remat
from torchpar.weights import nanogpt_name


def parallelize(
    model: GPT, *, mesh: Mesh, layout: Layout, make_optimizer: OptimizerMaker, fill: Fill = keep_values
) -> ParallelModel:
    """The model under the layout: placed, and then compiled as a whole. One device gets the plain module.

    Raises:
        ValueError: the layout asks for a backend that this machine does not have.
    """
    backend = resolve_backend(layout.compile, mesh.device)
    if mesh.world.size > 1:
        parallel = _placed(model, mesh=mesh, layout=layout, make_optimizer=make_optimizer, fill=fill)
    else:
        fill(model)
        apply_remat(model.blocks, resolve_remat(layout))
        own = dict(model.named_parameters())
        parallel = ParallelModel(module=model, optimizer=make_optimizer(own), parameters=own)
    return parallel if backend == "none" else replace(parallel, compiled=compile_forward(model, backend))


def _placed(
    model: GPT, *, mesh: Mesh, layout: Layout, make_optimizer: OptimizerMaker, fill: Fill
) -> ParallelModel:
    """The order: where parameters rest, where the batch comes in, where regions of split work begin and end,
    and when a shard is whole."""
    devices, remat = device_mesh(mesh), resolve_remat(layout)
    is_sharded = {what: layout.zero >= stage for what, stage in SHARDED_FROM.items()}
    place = partial(_placements, model, devices)
    if layout.tp > 1:
        for block in model.blocks:
            deal_heads(block.get_submodule("attn.c_attn"), layout.tp)
    _place_parameters(model, devices, place(sharded=is_sharded["parameters"]))
    fill(model)
    loss = {"cross_entropy": tensor_parallel.cross_entropy} if layout.tp > 1 else {}
    data_parallel.split_batch(model, devices, **loss)
    if layout.tp > 1:
        tensor_parallel.split_layers(model, devices, sequence_parallel=layout.sequence_parallel)
    kept = None
    if is_sharded["parameters"]:
        kept = fully_sharded.shard_parameters(
            model, devices, remat=remat, reshard_after_forward=layout.reshard_after_forward
        )
    else:
        apply_remat(model.blocks, remat)

    read, updated_at = dict(model.named_parameters()), place(sharded=is_sharded["optimizer"])
    updated = read
    if is_sharded["optimizer"] and not is_sharded["parameters"]:
        updated = fully_sharded.shards_of(read, updated_at)
    optimizer = make_optimizer(updated, wrap=dtensor_optimizer)
    if updated is not read:
        optimizer.register_step_post_hook(lambda *_: fully_sharded.gather_parameters(read, updated))
        if is_sharded["gradients"]:
            for name, parameter in read.items():
                parameter.register_hook(partial(fully_sharded.scatter, placements=updated_at[name]))

    def end_forwards() -> None:
        if kept:
            kept.free()

    def finish_gradient_synchronization() -> None:
        end_forwards()
        for name, parameter in read.items():
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None, f"{name} has no gradient"
            updated[name].grad = data_parallel.synchronize_gradients(gradient, updated_at[name])

    return of_dtensors(
        updated,
        mesh,
        finish=finish_gradient_synchronization,
        module=model,
        optimizer=optimizer,
        end_evaluation=end_forwards,
        means_of=mesh.joined(*ROWS).size,
    )


def _placements(model: GPT, devices: DeviceMesh, *, sharded: bool) -> dict[str, Placements]:
    """Those of each parameter, by nanoGPT's names."""
    return {
        nanogpt_name(row.name): of_parameter(row, devices, sharded=sharded)
        for row in parameter_table(model.config)
    }


def _place_parameters(model: nn.Module, devices: DeviceMesh, placements: Mapping[str, Placements]) -> None:
    """Put DTensors in the place of a model's parameters; tied ones stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                whole = parameter.detach()
                made[parameter] = nn.Parameter(placed(whole, devices, placements[f"{path}.{name}"]))
            setattr(module, name, made[parameter])
