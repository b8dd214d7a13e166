"""torch-compiler: parameters and the batch are placed, and DTensor decides what moves.

The model is written as for one device. Each strategy places some of its tensors.
"""

from dataclasses import replace
from functools import partial

from torch.distributed.tensor import DTensor

from compare.spec.axes import DATA, REPLICAS, SHARDED_FROM
from compare.spec.experiment import Experiment
from torchpar.comm.mesh import Mesh
from torchpar.compilation import compile_forward, resolve_backend
from torchpar.compiler import context_parallel, data_parallel, expert_parallel, fully_sharded, tensor_parallel
from torchpar.compiler.placement import ORDER, place_parameters, placements_of_parameters
from torchpar.dtensors import dtensor_optimizer, engine_of_dtensors, make_device_mesh
from torchpar.engine import Engine, Fill
from torchpar.model import GPT
from torchpar.optimizer import make_optimizer
from torchpar.private import flatten_mesh
from torchpar.qkv_order import permute_qkv_by_rank
from torchpar.remat import apply_remat


def make_engine(model: GPT, experiment: Experiment, mesh: Mesh, fill: Fill) -> Engine:
    """Place the model by the layout, and compile it as a whole. One device has the plain module.

    Raises ValueError: the layout names a backend that this machine does not have.
    """
    layout = experiment.layout
    backend = resolve_backend(layout, mesh.device, sizes_are_data=model.balance is not None)
    if mesh.world.size > 1:
        engine = _place(model, experiment, mesh, fill)
    else:
        fill(model)
        apply_remat(model.blocks, layout.remat)
        parameters = dict(model.named_parameters())
        optimizer = make_optimizer(parameters, experiment)
        engine = Engine(module=model, optimizer=optimizer, parameters=parameters)
    return engine if backend == "none" else replace(engine, compiled=compile_forward(model, backend, layout))


def _place(model: GPT, experiment: Experiment, mesh: Mesh, fill: Fill) -> Engine:
    """Place parameters, then the batch, the regions of split work, and the shards."""
    layout = experiment.layout
    devices = make_device_mesh(mesh, [name for name in ORDER if mesh[name].size > 1])
    # DTensor sums over several axes at once along a flattened one.
    for names in dict.fromkeys((REPLICAS, REPLICAS if layout.zero else DATA)):  # alike on all ranks
        if len(several := [name for name in ORDER if name in names and mesh[name].size > 1]) > 1:
            flatten_mesh(devices, several, mesh.joined(*names).name)
    is_sharded = {role: layout.zero >= stage for role, stage in SHARDED_FROM.items()}
    if layout.tp > 1:
        permute_qkv_by_rank(model, layout.tp)
    at_rest = placements_of_parameters(model, devices, sharded=is_sharded["parameters"])
    place_parameters(model, devices, at_rest)
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
    gathered = None
    if is_sharded["parameters"]:
        gathered = fully_sharded.shard_parameters(model, devices, experiment)
    else:
        apply_remat(model.blocks, layout.remat)

    # `read` by the modules, `updated` by the optimizer: with ZeRO-1 and 2 the latter are shards.
    read = dict(model.named_parameters())
    updated, updated_at = read, placements_of_parameters(model, devices, sharded=is_sharded["optimizer"])
    if is_sharded["optimizer"] and not is_sharded["parameters"]:
        updated = fully_sharded.shards_of(read, updated_at)
    optimizer = make_optimizer(updated, experiment, wrap=dtensor_optimizer)
    if updated is not read:
        optimizer.register_step_post_hook(lambda *_: fully_sharded.gather_parameters(read, updated))
        if is_sharded["gradients"]:
            for name, parameter in read.items():
                # ZeRO-2: each pass's gradient is reduce-scattered.
                scatter = partial(fully_sharded.redistribute_shard_axis, placements=updated_at[name])
                parameter.register_hook(scatter)

    def finish_gradients() -> None:
        if gathered:
            gathered.free()
        for name, parameter in read.items():
            gradient, parameter.grad = parameter.grad, None
            assert isinstance(gradient, DTensor), f"{name} has no gradient"
            if updated is not read:  # reduce-scatter first, so that replicas sum shards
                gradient = fully_sharded.redistribute_shard_axis(gradient, updated_at[name])
            updated[name].grad = data_parallel.synchronize_gradients(gradient, updated_at[name])

    return engine_of_dtensors(
        updated,
        mesh,
        finish=finish_gradients,
        module=model,
        optimizer=optimizer,
        loss_is_global=True,
        **({"end_evaluation": gathered.free} if gathered else {}),
    )
