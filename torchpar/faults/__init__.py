"""Faults to plant on purpose, so that the ladder is seen to catch them: `FAULTS`, for `contract.faults`.

A fault holds for what is built and run inside.
"""

from contextlib import AbstractContextManager
from functools import partial

from compare.contract.communication import ACTIVATIONS, GRADIENTS, REPLICATED_GRADIENTS, TIED_GRADIENTS
from compare.contract.faults import (
    ANY_LAYOUT,
    IGNORED,
    REPEATED_PARAMETERS,
    REPLICAS,
    SHARDS,
    SPLIT_LAYERS,
    SPLIT_SEQUENCE,
    STAGES,
    PlantedFault,
    find_fault,
)
from compare.spec.axes import DP_REPLICATE, PP, TP
from compare.spec.experiment import Layout
from torchpar.faults import library_faults, manual_faults, run_faults
from torchpar.faults.collective_faults import (
    contributions_times_ranks,
    left_out_reductions,
    sent_zeros,
)
from torchpar.faults.library_faults import BY_DDP, SHARDED_PARAMETERS, SUMMED_BY_AUTOGRAD

MANUAL, LIBRARY = ("manual",), ("library",)
BOTH = MANUAL + LIBRARY
_gradients = {"axis": DP_REPLICATE, "purpose": GRADIENTS}
_row_products = {"axis": TP, "purpose": ACTIVATIONS}
_partial_gradients = {"axis": TP, "purpose": REPLICATED_GRADIENTS}
_tied_gradients = {"axis": PP, "purpose": TIED_GRADIENTS}

FAULTS = (
    PlantedFault("dropped_all_reduce", MANUAL, REPLICAS, partial(left_out_reductions, **_gradients)),
    PlantedFault("dropped_all_reduce", LIBRARY, BY_DDP, library_faults.dropped_all_reduce),
    PlantedFault("sum_for_mean", MANUAL, REPLICAS, partial(contributions_times_ranks, **_gradients)),
    PlantedFault("sum_for_mean", LIBRARY, BY_DDP, library_faults.sum_for_mean),
    PlantedFault("moved_weight", BOTH, ANY_LAYOUT, run_faults.moved_weight),
    PlantedFault("kept_gradients", BOTH, ANY_LAYOUT, run_faults.kept_gradients),
    PlantedFault(
        "dropped_tp_all_reduce", MANUAL, SPLIT_LAYERS, partial(left_out_reductions, **_row_products)
    ),
    PlantedFault("dropped_tp_all_reduce", LIBRARY, SPLIT_LAYERS, library_faults.dropped_tp_all_reduce),
    PlantedFault("doubled_row_bias", MANUAL, SPLIT_LAYERS, manual_faults.doubled_row_bias),
    PlantedFault(
        "missing_norm_psum", MANUAL, SPLIT_SEQUENCE, partial(left_out_reductions, **_partial_gradients)
    ),
    PlantedFault("missing_norm_psum", LIBRARY, SPLIT_SEQUENCE, library_faults.missing_norm_psum),
    PlantedFault(
        "norm_counts_replicas_twice", BOTH, REPEATED_PARAMETERS, run_faults.norm_counts_replicas_twice
    ),
    PlantedFault("wrong_optimizer_shard", MANUAL, SHARDS, run_faults.wrong_optimizer_shard),
    PlantedFault("wrong_optimizer_shard", LIBRARY, SHARDED_PARAMETERS, run_faults.wrong_optimizer_shard),
    PlantedFault("overwritten_microbatch", MANUAL, ANY_LAYOUT, manual_faults.overwritten_microbatch),
    PlantedFault(
        "overwritten_microbatch", LIBRARY, SUMMED_BY_AUTOGRAD, library_faults.overwritten_microbatch
    ),
    PlantedFault("stale_tied_copy", BOTH, STAGES, partial(sent_zeros, **_tied_gradients)),
    PlantedFault("unscaled_dropout", BOTH, ANY_LAYOUT, run_faults.unscaled_dropout),
    PlantedFault("same_dropout_on_every_rank", BOTH, SPLIT_LAYERS, run_faults.same_dropout_on_every_rank),
    PlantedFault("reversed_update", BOTH, REPLICAS, run_faults.reversed_update),
    PlantedFault("rounded_weights", BOTH, REPLICAS, run_faults.rounded_weights),
    PlantedFault("skipped_last_update", BOTH, ANY_LAYOUT, run_faults.skipped_last_update),
    *(PlantedFault(name, BOTH, one.need, partial(run_faults.ignored, one)) for name, one in IGNORED.items()),
)


def plant(fault: str, *, engine: str, layout: Layout) -> AbstractContextManager:
    """The fault as a context manager.

    Raises:
        ExperimentError: an unknown fault, or one that this engine or layout cannot express.
    """
    return find_fault(FAULTS, fault, engine=engine, layout=layout).plant()
