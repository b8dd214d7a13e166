"""The tied weight in a pipeline: the first stage embeds with it, the last stage projects to logits with it.

Both stages have a copy. The gradient of the weight is the sum of the copies' gradients. The two ranks
exchange them after the last backward, and both add them up, so the copies stay equal.
"""

from collections.abc import Collection
from functools import partial

import torch
from torch import nn

from compare.contract.communication import TIED_GRADIENTS
from torchpar.comm.collectives import Axis
from torchpar.sharding import Parameters, Sharding, TensorsByName, local

TIED = "transformer.wte.weight"


def pipeline_sharding(axis: Axis, names: Collection[str]) -> Sharding:
    """The sharding of a pipeline: this rank has the parameters `names`, and other ranks have others.

    The first and the last stage each hold the tied weight. The norm counts the first copy, the record saves
    the last: a difference cannot hide.
    """

    def finish_gradients(parameters: Parameters) -> None:
        if TIED in parameters:
            sum_tied_gradients(parameters[TIED], axis)

    def gather(shards: TensorsByName) -> TensorsByName:
        stages = axis.all_gather_objects({name: tensor.cpu() for name, tensor in shards.items()})
        return {name: tensor for stage in stages for name, tensor in stage.items()}

    return Sharding(
        axes=dict.fromkeys(names, (axis,)),
        counted_elsewhere=frozenset({TIED} if axis.rank == axis.size - 1 else ()),
        finish_gradients=finish_gradients,
        gather=gather,
    )


def sum_tied_gradients(parameter: nn.Parameter, axis: Axis) -> None:
    """Replace the gradients of the two copies by their sum, on the first and the last rank of a pipeline.

    Equal copies stay equal to the last bit, since a + b is b + a.
    """
    assert parameter.grad is not None
    gradient, other = local(parameter.grad), axis.size - 1 - axis.rank
    mine, theirs = gradient.contiguous(), torch.empty_like(gradient, memory_format=torch.contiguous_format)
    send = partial(axis.start_send, mine, to=other, purpose=TIED_GRADIENTS)
    receive = partial(axis.start_receive, theirs, source=other)
    # One rank sends while the other receives. NCCL would deadlock if both sent first.
    for work in [start() for start in ((send, receive) if axis.rank == 0 else (receive, send))]:
        work.wait()
    gradient.add_(theirs)
