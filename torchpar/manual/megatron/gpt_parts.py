"""A GPT after `split_layers` as a `ParallelModel`: gradients of whole parameters, and whole tensors again."""

from dataclasses import replace
from functools import partial

from torchpar.comm.collectives import Axis
from torchpar.manual.tensor_parallel import TensorParallel, synchronize_replicated_gradients
from torchpar.parallel_model import ParallelModel, TensorsByName


def of_parts(parallel: ParallelModel, split: TensorParallel) -> ParallelModel:
    """A rank's part of the model, parallel over the other axes, as a part of the whole model.

    Args:
        parallel: with the layers that `split` names.
        split: from `split_layers`.
    """

    def finish() -> None:
        parallel.finish_gradient_synchronization()
        # Each is whole, or a piece that all ranks of this axis cut alike.
        parameters = [parameter for name, parameter in parallel.parameters.items() if name in split.partial]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        synchronize_replicated_gradients(gradients, split.axis)

    def sharded_over(name: str) -> tuple[Axis, ...]:
        return (*parallel.sharded_over(name), *((split.axis,) if name in split.splits else ()))

    return replace(
        parallel,
        finish_gradient_synchronization=finish,
        sharded_over=sharded_over,
        gathers=(*parallel.gathers, partial(gather, split=split)),
    )


def gather(parts: TensorsByName, *, split: TensorParallel) -> TensorsByName:
    """Whole weights, gradients or moments by name, from every rank's part."""
    return {
        name: split.splits[name].gather(part, split.axis) if name in split.splits else part
        for name, part in parts.items()
    }
