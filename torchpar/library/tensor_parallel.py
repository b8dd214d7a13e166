"""Tensor parallelism by PyTorch: `parallelize_module` gives each module a style, and DTensor moves the data.

                          forward                               backward
    enters attn, mlp      - (split T: all-gather)               all-reduce (split T: reduce-scatter)
    leaves c_proj, wte    all-reduce (split T: reduce-scatter)  - (split T: all-gather)
    loss                  all-reduces of single numbers a token
    head                  - (split T: all-gather)               all-reduce (split T: reduce-scatter)
    norms, once a step    - (split T: all-reduce of their gradients, by `complete_gradients`)

Every rank uses x for its own heads or features, so the gradients of x are added. c_proj multiplies a rank's
features by their columns of the weight, a partial sum, so the outputs are added. Between the two a rank needs
only its own features. T is split with sequence parallelism.

All parameters become DTensors, also the replicated ones, because an optimizer does not mix both kinds.

Two things are left to the user:

- A fused q, k, v is one weight, and `Shard(0)` would cut it across q, k and v. `qkv_order` permutes its rows.
  Three separate projections, as in torchtitan, need no permutation, but three all-reduces in backward.
- `loss_parallel` computes the loss of logits that are split by vocabulary. It is a context, and backward has
  to run inside of it too: the training loop enters `Engine.step_context`.
"""

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
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from torchpar.dtensors import from_local, local_weight
from torchpar.model import GPT
from torchpar.positions import set_dropout_rows
from torchpar.qkv_order import permute_qkv_by_rank
from torchpar.sharding import divide_gradient


def split_layers(model: GPT, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Split a GPT by heads, by the MLP's inner features and by vocabulary. Names of parameters stay.

    With sequence parallelism the residual stream and the LayerNorms are split along the sequence.

    Raises:
        ValueError: a rank would have no row of the vocabulary. `loss_parallel` would skip its all-reduce
            there, and all other ranks would hang.
    """
    ranks, vocab = mesh.size(), model.config.vocab_size
    if -(-vocab // ranks) * (ranks - 1) >= vocab:
        raise ValueError(
            f"tp = {ranks} leaves a rank without any of vocab_size = {vocab}: loss_parallel would hang. "
            "Choose a smaller tp"
        )
    permute_qkv_by_rank(model, ranks)
    stream = Shard(1) if sequence_parallel else Replicate()  # (B, T, C) between the split layers
    column = partial(ColwiseParallel, input_layouts=stream)  # f: backward sums the gradients of x
    row = partial(RowwiseParallel, output_layouts=stream)  # g: forward sums the outputs
    norm = SequenceParallel(use_local_output=True) if sequence_parallel else NoParallel()
    mlp = {"transformer.h.*.mlp.c_fc": column(), "transformer.h.*.mlp.c_proj": row()}
    experts = {"transformer.h.*.mlp": ExpertsParallel(stream)}
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
            **(experts if model.balance else mlp),
            "transformer.ln_f": norm,
            "lm_head": column(output_layouts=Shard(-1), use_local_output=False),
            "loss": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate()),
        },
    )
    model.transformer["wte"].weight = model.lm_head.weight  # tie them again: each was distributed by itself
    if model.balance:
        model.balance.register_forward_hook(lambda module, args, loss: divide_gradient(loss, ranks))
    set_dropout_rows(model, mesh.get_local_rank(), sequence_parallel=sequence_parallel)


class NoParallel(ParallelStyle):
    """Replicated parameters, with plain tensors in and out. `scatter` splits the input along dim 0 first."""

    def __init__(self, *, scatter: bool = False):
        super().__init__()
        self.input_layout = Shard(0) if scatter else Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def wrap(module: nn.Module, inputs: tuple, mesh: DeviceMesh) -> Any:
            return from_local(inputs[0], mesh, (Replicate(),)).redistribute(placements=[self.input_layout])

        def unwrap(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, None, wrap, unwrap)


class ExpertsParallel(ParallelStyle):
    """Experts whose inner features are split.

    DTensor has no rule for rows that are sorted by expert, so the experts compute on local tensors. The
    output is a partial sum. So are the gradients of the input and of the router, which every rank has.
    """

    def __init__(self, stream: Placement):
        super().__init__()
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: tuple) -> tuple:
            # f: backward sums the gradients of x. With sequence parallelism forward gathers positions.
            x_BTC = from_local(inputs[0], device_mesh, (self.stream,)).redistribute(placements=[Replicate()])
            return x_BTC.to_local(grad_placements=[Partial()]), *inputs[1:]

        def leave(_: nn.Module, inputs: tuple, y_BTC: torch.Tensor) -> torch.Tensor:
            # g: forward sums the outputs.
            partial_sum = from_local(y_BTC, device_mesh, (Partial(),))
            return partial_sum.redistribute(placements=[self.stream]).to_local()

        for name, placement in {"router": Replicate(), "c_fc": Shard(2), "c_proj": Shard(1)}.items():
            child = module.get_submodule(name)
            weight = distribute_tensor(child.get_parameter("weight").detach(), device_mesh, [placement])
            child.register_parameter("weight", nn.Parameter(weight))
            child.register_forward_hook(lambda _, inputs, weight: local_weight(weight))
        module.register_forward_pre_hook(enter)
        module.get_submodule("core").register_forward_hook(leave)
        return module


def complete_gradients(model: nn.Module) -> None:
    """Give each gradient its parameter's placements, once a step.

    DTensor leaves some gradients as partial sums, and the embedding's replicated on every rank.
    """
    for parameter in model.parameters():
        gradient = parameter.grad
        assert isinstance(parameter, DTensor)
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
            # A partial sum: an all-reduce. A replicated gradient of the embedding: a slice.
            parameter.grad = gradient.redistribute(placements=parameter.placements)
