"""Tensor parallelism by placements: a table lists the split dims, and DTensor does Megatron's split.

                          forward                               backward
    enters attn, mlp      - (split T: all-gather)               all-reduce (split T: reduce-scatter)
    leaves c_proj, wte    all-reduce (split T: reduce-scatter)  - (split T: all-gather)
    loss                  all-reduces of single numbers a token
    head                  - (split T: all-gather)               all-reduce (split T: reduce-scatter)
    norms, once a step    - (split T: all-reduce of their gradients, by `data_parallel.synchronize_gradients`)

Every rank uses x for its own heads or features, so the gradients of x are added. c_proj multiplies a rank's
features by their columns of the weight, a partial sum, so the outputs are added. Between the two a rank needs
only its own features. T is split with sequence parallelism.

The parameters' placements follow from the table of axes. The code adds where activations live at both ends of
a region of split work. Without that DTensor keeps a partial sum up to the next operator that is not linear:
into the LayerNorm, and through every residual stream before it.

Two more things are needed, which XLA does by itself. A placement cuts rows into contiguous shards, but the
rows of a fused q, k, v belong to three tensors: `qkv_order` permutes them, and in the region each rank has
its own heads. And DTensor has no rule for the loss of a split vocabulary: `cross_entropy` reduces only three
numbers a position. Shards may be uneven, so no logit is padding.

N tokens, V vocabulary.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from compare.spec.axes import TP
from torchpar.compiler.placement import placements, placements_of_activation
from torchpar.dtensors import Placements, from_local
from torchpar.model import GPT
from torchpar.positions import set_dropout_rows

POSITION_DIM, FEATURE_DIM = 1, 2  # of (B, T, C)


def split_layers(model: GPT, devices: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Place activations at both ends of every region of split work.

    With sequence parallelism positions are split between the regions.
    """
    replicated = placements_of_activation(devices)
    split = placements_of_activation(devices, split=FEATURE_DIM)
    stream = placements_of_activation(devices, split=POSITION_DIM) if sequence_parallel else replicated

    # f. Forward: nothing, or an all-gather of T. Backward: DTensor sums the gradients of all ranks.
    def enters(module: nn.Module, *, to: Placements) -> None:
        module.register_forward_pre_hook(lambda _, inputs: (_at(inputs[0], devices, to), *inputs[1:]))

    # g. Forward: a partial sum becomes the stream, by an all-reduce, or a reduce-scatter of T.
    def leaves(module: nn.Module, *, to: Placements) -> None:
        module.register_forward_hook(lambda _, inputs, y: _at(y, devices, to))

    leaves(model.transformer["wte"], to=stream)
    for block in model.blocks:
        for region in ("attn",) if model.balance else ("attn", "mlp"):
            enters(block.get_submodule(region), to=replicated)
            leaves(block.get_submodule(f"{region}.c_proj"), to=stream)
        # A rank has the q, k and v of its heads: no view of a full tensor describes them.
        c_attn = block.get_submodule("attn.c_attn")
        c_attn.register_forward_hook(lambda _, inputs, y: _at(y, devices, split).to_local())
        enters(block.get_submodule("attn.c_proj"), to=split)
    enters(model.lm_head, to=replicated)
    set_dropout_rows(model, devices.get_local_rank(TP), sequence_parallel=sequence_parallel)


def cross_entropy(logits_NV: DTensor, targets_N: DTensor) -> torch.Tensor:
    """The mean cross-entropy in nats, (), of logits that are split by vocabulary.

    Per token it reduces the largest logit, the sum of exponentials and the target's logit.
    """
    devices, (_, V) = logits_NV.device_mesh, logits_NV.shape
    replicated = placements_of_activation(devices)

    def reduce(x_N: torch.Tensor) -> DTensor:
        assert isinstance(x_N, DTensor)
        return x_N.redistribute(placements=replicated)

    # Three all-reduces of (N,): the largest logit, then the sum of exponentials and the target's logit.
    max_N1 = reduce(logits_NV.detach().amax(dim=-1, keepdim=True))
    shifted_NV = logits_NV - max_N1
    all_V = from_local(torch.arange(V, device=targets_N.device), devices, placements(devices))
    id_V = all_V.redistribute(placements=placements(devices, tp=0))
    target_NV = torch.where(id_V == targets_N[:, None], shifted_NV, 0.0)
    return (reduce(shifted_NV.exp().sum(-1)).log() - reduce(target_NV.sum(-1))).mean()


def _at(x: torch.Tensor, devices: DeviceMesh, placements: Placements) -> DTensor:
    """x with these placements: a DTensor is redistributed, and in backward its gradient; a plain tensor has
    them already."""
    if isinstance(x, DTensor):
        return x.redistribute(placements=placements)
    return from_local(x, devices, placements)
