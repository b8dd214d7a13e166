"""Tensor parallelism by PyTorch: `parallelize_module` says how each module is split, DTensor moves the data.

Every parameter becomes a DTensor, also those that stay whole, because an optimizer takes no mixture.

Two things are left to the user:

- A fused q, k, v is one (3 C, C) weight, and Shard(0) would cut it across the three. Its rows are reordered
  once, so that each rank's contiguous part holds the q, k and v of its own heads. It costs a weight whose
  order depends on the degree: a checkpoint has to be put back in order (`torchpar.dtensors`). Three
  projections instead, as torchtitan's models have, would keep their order, and all-reduce three times in
  backward.
- The custom operators of `loss_parallel` have to be there in backward too, which starts in the training
  loop: they stay switched on.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from torchpar.dropout import split_rows
from torchpar.dtensors import deal_heads, local_part, own_part
from torchpar.model import GPT
from torchpar.sharding import divide_gradient

loss_parallel_on = ExitStack()


def split_layers(model: GPT, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> None:
    """Split a GPT by head, by the MLP's inner features and by vocabulary; names of parameters stay.

    Under sequence parallelism residual stream and LayerNorms are split along the sequence.

    Raises:
        ValueError: a vocabulary so small that a rank would have none of it: `loss_parallel` skips its
            all-reduce there, and the others would hang.
    """
    ranks, vocab = mesh.size(), model.config.vocab_size
    if -(-vocab // ranks) * (ranks - 1) >= vocab:
        raise ValueError(
            f"tp = {ranks} leaves a rank without any of vocab_size = {vocab}: loss_parallel would hang"
        )
    deal_heads(model, ranks)
    stream = Shard(1) if sequence_parallel else Replicate()  # (B, T, C) between the split layers
    column = partial(ColwiseParallel, input_layouts=stream)
    row = partial(RowwiseParallel, output_layouts=stream)
    norm = SequenceParallel(use_local_output=True) if sequence_parallel else NoParallel()
    of_experts = {"transformer.h.*.mlp": ExpertsParallel(stream)}
    of_mlp = {"transformer.h.*.mlp.c_fc": column(), "transformer.h.*.mlp.c_proj": row()}
    has_positions = "wpe" in model.transformer
    positions = {"transformer.wpe": NoParallel(scatter=sequence_parallel)} if has_positions else {}
    parallelize_module(
        model,
        mesh,
        {
            "transformer.wte": row(input_layouts=Replicate()),
            **positions,
            "transformer.h.*.ln_1": norm,
            "transformer.h.*.attn.c_attn": column(),
            "transformer.h.*.attn.c_proj": row(),
            "transformer.h.*.ln_2": norm,
            **(of_experts if model.balance else of_mlp),
            "transformer.ln_f": norm,
            "lm_head": column(output_layouts=Shard(-1), use_local_output=False),
            "loss": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate()),
        },
    )
    model.transformer["wte"].weight = model.lm_head.weight  # each was distributed for itself: tied again
    if model.balance:
        model.balance.register_forward_hook(lambda module, args, loss: divide_gradient(loss, ranks))
    split_rows(model, mesh.get_local_rank(), sequence_parallel=sequence_parallel)
    loss_parallel_on.close()  # a model before this one
    loss_parallel_on.enter_context(loss_parallel())


class NoParallel(ParallelStyle):
    """Parameters that every rank keeps whole; the input is cut along dim 0 first where `scatter` says so.

    Plain tensors go in and come out: modules between two split layers need not know of DTensor.
    """

    def __init__(self, *, scatter: bool = False):
        super().__init__()
        self.input_layout = Shard(0) if scatter else Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def wrap(module: nn.Module, inputs: tuple, mesh: DeviceMesh) -> Any:
            return local_part(inputs[0], mesh, (Replicate(),)).redistribute(placements=[self.input_layout])

        def unwrap(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, None, wrap, unwrap)


class ExpertsParallel(ParallelStyle):
    """Experts whose inner features are split; DTensor has no rule for rows that are sorted by expert.

    So all of it works on a rank's own part. The stream comes in whole, and leaves as a part of a sum; the
    gradients of what comes in, and of the router, which each rank has, are parts of sums too.
    """

    def __init__(self, stream: Placement):
        super().__init__()
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: tuple) -> tuple:
            x_BTC = local_part(inputs[0], device_mesh, (self.stream,)).redistribute(placements=[Replicate()])
            return x_BTC.to_local(grad_placements=[Partial()]), *inputs[1:]

        def leave(_: nn.Module, inputs: tuple, y_BTC: torch.Tensor) -> torch.Tensor:
            part = local_part(y_BTC, device_mesh, (Partial(),))
            return part.redistribute(placements=[self.stream]).to_local()

        for name, at in {"router": Replicate(), "c_fc": Shard(2), "c_proj": Shard(1)}.items():
            part = module.get_submodule(name)
            weight = distribute_tensor(part.get_parameter("weight").detach(), device_mesh, [at])
            part.register_parameter("weight", nn.Parameter(weight))
            part.register_forward_hook(lambda _, inputs, weight: own_part(weight))
        module.register_forward_pre_hook(enter)
        module.get_submodule("core").register_forward_hook(leave)
        return module


def complete_gradients(model: nn.Module) -> None:
    """Give each gradient its parameter's placements, once a step.

    DTensor left some as a sum still to be made (Partial); an embedding's is whole on every rank.
    """
    for parameter in model.parameters():
        gradient = parameter.grad
        assert isinstance(parameter, DTensor)
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)
