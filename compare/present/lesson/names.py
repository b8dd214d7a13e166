"""Names that make data move: what a lesson's source is searched for, and what each of them sends.

A call says its purpose with `purpose=`, a name of `compare.contract.communication`; where it cannot, the
purposes stand here. Autodiff's part is told apart: the derivative of a gather scatters.
"""

from msgspec import Struct

from compare.contract.communication import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    ACTIVATIONS_AND_GRADIENTS,
    GRADIENTS,
    LOSS,
    PARAMETERS,
    REPLICATED_GRADIENTS,
)


class Sends(Struct, frozen=True):
    """A kind of collective that a name causes."""

    kind: str
    """As in the ledger."""
    purposes: tuple[str, ...] = ()
    """Purposes, if the call does not name one; () for any."""
    in_derivative: bool = False
    """The collective is in the backward pass, not in the call."""


Names = dict[str, tuple[Sends, ...]]
"""By the last part of a dotted name; () for what only says where data live."""

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, PERMUTE, BROADCAST = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "permute",
    "broadcast",
)

_REGIONS: Names = {  # Megatron's f and g
    "copy_to_region": (Sends(ALL_REDUCE, (ACTIVATION_GRADIENTS,)),),
    "reduce_from_region": (Sends(ALL_REDUCE, (ACTIVATIONS,)),),
    "all_gather_to_region": (
        Sends(ALL_GATHER, (ACTIVATIONS,)),
        Sends(REDUCE_SCATTER, (ACTIVATION_GRADIENTS,)),
    ),
    "reduce_scatter_from_region": (
        Sends(REDUCE_SCATTER, (ACTIVATIONS,)),
        Sends(ALL_GATHER, (ACTIVATION_GRADIENTS,)),
    ),
    "gather_from_region": (Sends(ALL_GATHER, (ACTIVATIONS,)),),
    "scatter_to_region": (Sends(ALL_GATHER, (ACTIVATION_GRADIENTS,)),),
}
_EITHER_WAY = Sends(PERMUTE, (ACTIVATIONS, ACTIVATION_GRADIENTS))
_BETWEEN_STAGES = (Sends(PERMUTE, (ACTIVATIONS_AND_GRADIENTS,)),)
# Of PyTorch's wrappers the ledger infers the purpose (`torchpar/measure/ledger.py`). A column's input is
# whole, or gathered from parts of a sequence, and its gradient summed; a row's result is summed, its gradient
# gathered.
_COLUMN = (
    Sends(ALL_GATHER, (ACTIVATIONS,)),
    Sends(ALL_REDUCE, (ACTIVATION_GRADIENTS,)),
    Sends(REDUCE_SCATTER, (ACTIVATION_GRADIENTS,)),
)
_ROW = (
    Sends(ALL_REDUCE, (ACTIVATIONS,)),
    Sends(REDUCE_SCATTER, (ACTIVATIONS,)),
    Sends(ALL_GATHER, (ACTIVATION_GRADIENTS,)),
)

NAMES: dict[str, Names] = {
    "jaxpar/compiler": {
        "with_sharding_constraint": (),
        "NamedSharding": (),
        "PartitionSpec": (),
        "roll": (_EITHER_WAY,),
    },
    "jaxpar/explicit": {
        "reshard": (Sends(ALL_REDUCE), Sends(ALL_GATHER), Sends(REDUCE_SCATTER)),
        "product": (Sends(ALL_REDUCE, (ACTIVATIONS, ACTIVATION_GRADIENTS)),),
        "get": (Sends(ALL_REDUCE, (ACTIVATIONS,)),),
        "roll": (_EITHER_WAY,),
        "auto_axes": (),
        "copies": (),
        "own_copy": (),
        "PartitionSpec": (),
    },
    "jaxpar/manual": {
        "all_reduce": (Sends(ALL_REDUCE),),
        "all_reduce_mean": (Sends(ALL_REDUCE),),
        "all_reduce_max": (Sends(ALL_REDUCE),),
        "all_gather": (Sends(ALL_GATHER), Sends(REDUCE_SCATTER, in_derivative=True)),
        "all_gather_equal": (Sends(ALL_GATHER),),
        "reduce_scatter": (Sends(REDUCE_SCATTER), Sends(ALL_GATHER, in_derivative=True)),
        "to_varying": (Sends(ALL_REDUCE, in_derivative=True),),
        "shift": (Sends(PERMUTE),),
        **_REGIONS,
    },
    "torchpar/manual": {
        "all_reduce": (Sends(ALL_REDUCE),),
        "start_all_reduce": (Sends(ALL_REDUCE),),
        "all_gather": (Sends(ALL_GATHER),),
        "start_all_gather": (Sends(ALL_GATHER),),
        "reduce_scatter": (Sends(REDUCE_SCATTER),),
        "start_reduce_scatter": (Sends(REDUCE_SCATTER),),
        "broadcast": (Sends(BROADCAST),),
        "start_send": (_EITHER_WAY,),
        "start_receive": (_EITHER_WAY,),
        "VocabParallelEmbedding": (
            Sends(ALL_REDUCE, (ACTIVATIONS,)),
            Sends(REDUCE_SCATTER, (ACTIVATIONS,)),
            Sends(ALL_GATHER, (ACTIVATION_GRADIENTS,)),
        ),
        "VocabParallelCrossEntropy": (Sends(ALL_GATHER, (LOSS,)),),
        **_REGIONS,
    },
    "torchpar/library": {
        "DistributedDataParallel": (Sends(ALL_REDUCE, (GRADIENTS,)),),
        "ZeroRedundancyOptimizer": (Sends(BROADCAST, (PARAMETERS,)),),
        "fully_shard": (
            Sends(ALL_GATHER, (PARAMETERS,)),
            Sends(REDUCE_SCATTER, (GRADIENTS,)),
            Sends(ALL_REDUCE, (GRADIENTS,)),
        ),
        "parallelize_module": (),
        "ColwiseParallel": _COLUMN,
        "RowwiseParallel": _ROW,
        "SequenceParallel": (),  # each device has its own tokens, and a norm needs no others
        "PrepareModuleOutput": (),  # the loss is whole when it comes
        "distribute_module": (),
        "redistribute": (
            Sends(ALL_GATHER, (ACTIVATION_GRADIENTS,)),
            Sends(ALL_REDUCE, (REPLICATED_GRADIENTS,)),
        ),
        "loss_parallel": (Sends(ALL_REDUCE, (LOSS,)),),
        "PipelineStage": _BETWEEN_STAGES,
        "ScheduleGPipe": _BETWEEN_STAGES,
        "Schedule1F1B": _BETWEEN_STAGES,
        "ScheduleInterleaved1F1B": _BETWEEN_STAGES,
        "ScheduleInterleavedZeroBubble": _BETWEEN_STAGES,
        "all_reduce": (Sends(ALL_REDUCE),),
    },
    "torchpar/compiler": {
        # From where a tensor is to where it is said to be: which of these, the placements decide.
        "redistribute": (Sends(ALL_REDUCE), Sends(ALL_GATHER), Sends(REDUCE_SCATTER)),
        "of_activation": (),
        "along": (),
        "local_part": (),
        "Replicate": (),
    },
}
"""By the folder of the engine's lessons."""
