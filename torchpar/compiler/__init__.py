"""The engine torch-compiler: parameters are placed, and DTensor decides what moves.

`make_engine` composes the strategies: the model is written as for one device, and each strategy has its say
about where its tensors live.
"""

from dataclasses import replace
from functools import partial

from torch.distributed.tensor import DTensor

from compare.spec.axes import DATA, REPLICAS, SHARDED_FROM
from compare.spec.experiment import Experiment
from torchpar.comm.mesh import Mesh
from torchpar.compiler import context_parallel, data_parallel, expert_parallel, fully_sharded, tensor_parallel
from torchpar.compiler.compilation import compile_forward, resolve_backend
from torchpar.compiler.placement import ORDER, of_parameters, place_parameters
from torchpar.dtensors import deal_heads, dtensor_optimizer, make_device_mesh, of_dtensors
from torchpar.engine import Engine, Fill
from torchpar.model import GPT
from torchpar.optimizer import make_optimizer
from torchpar.private import flatten_mesh
from torchpar.remat import apply_remat


def make_engine(model: GPT, experiment: Experiment, mesh: Mesh, fill: Fill) -> Engine:
    """The model under the layout: placed, and then compiled as a whole. One device gets the plain module.

    Raises ValueError: the layout asks for a backend that this machine does not have.
    """
    layout = experiment.layout
    backend = resolve_backend(layout, mesh.device, sizes_are_data=model.balance is not None)
    if mesh.world.size > 1:
        engine = _placed(model, experiment, mesh, fill)
    else:
        fill(model)
        apply_remat(model.blocks, layout.remat)
        own = dict(model.named_parameters())
        engine = Engine(module=model, optimizer=make_optimizer(own, experiment), parameters=own)
    return engine if backend == "none" else replace(engine, compiled=compile_forward(model, backend))


def _placed(model: GPT, experiment: Experiment, mesh: Mesh, fill: Fill) -> Engine:
    """The order: where parameters rest, where the batch comes in, where regions of split work begin and end,
    and when a shard is whole."""
    layout = experiment.layout
    devices = make_device_mesh(mesh, [name for name in ORDER if mesh[name].size > 1])
    # DTensor sums over several axes at once along a flattened one.
    for names in dict.fromkeys((REPLICAS, REPLICAS if layout.zero else DATA)):  # alike on all ranks
        if len(several := [name for name in ORDER if name in names and mesh[name].size > 1]) > 1:
            flatten_mesh(devices, several, mesh.joined(*names).name)
    is_sharded = {role: layout.zero >= stage for role, stage in SHARDED_FROM.items()}
    if layout.tp > 1:
        deal_heads(model, layout.tp)
    place_parameters(model, devices, of_parameters(model, devices, sharded=is_sharded["parameters"]))
    fill(model)
    if layout.tp > 1:
        data_parallel.split_batch(model, devices, cross_entropy=tensor_parallel.cross_entropy)
        tensor_parallel.split_layers(model, devices, sequence_parallel=layout.sequence_parallel)
    else:
        data_parallel.split_batch(model, devices)
    if layout.cp > 1:
        context_parallel.split_sequence(model, devices, layout)
    if model.balance:
        split = tensor_parallel.POSITION_DIM if layout.sequence_parallel else None
        expert_parallel.split_experts(model, devices, split=split)
    kept = None
    if is_sharded["parameters"]:
        kept = fully_sharded.shard_parameters(model, devices, layout)
    else:
        apply_remat(model.blocks, layout.remat)

    read = dict(model.named_parameters())
    updated, updated_at = read, of_parameters(model, devices, sharded=is_sharded["optimizer"])
    if is_sharded["optimizer"] and not is_sharded["parameters"]:
        updated = fully_sharded.shards_of(read, updated_at)
    optimizer = make_optimizer(updated, experiment, wrap=dtensor_optimizer)
    if updated is not read:
        optimizer.register_step_post_hook(lambda *_: fully_sharded.gather_parameters(read, updated))
        if is_sharded["gradients"]:
            for name, parameter in read.items():
                # A pass's gradient goes where the shard is.
                parameter.register_hook(partial(fully_sharded.moved, placements=updated_at[name]))

    def finish_gradient_synchronization() -> None:
        if kept:
            kept.free()
        for name, parameter in read.items():
            gradient, parameter.grad = parameter.grad, None
            assert isinstance(gradient, DTensor), f"{name} has no gradient"
            if updated is not read:  # scattered first: replicas then sum shards
                gradient = fully_sharded.moved(gradient, updated_at[name])
            updated[name].grad = data_parallel.synchronize_gradients(gradient, updated_at[name])

    return of_dtensors(
        updated,
        mesh,
        finish=finish_gradient_synchronization,
        module=model,
        optimizer=optimizer,
        loss_mean_ranks=mesh.joined(*DATA).size,
        **({"end_evaluation": kept.free} if kept else {}),
    )
