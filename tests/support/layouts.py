"""Layouts of torchpar's engines on four ranks, by name."""

from compare.spec.experiment import Layout

GPIPE = {"schedule": "gpipe", "microbatches": 4}

TORCH_ZERO = {
    "zero1": Layout(dp_shard=4, zero=1),
    "zero2": Layout(dp_shard=4, zero=2),
    "zero3": Layout(dp_shard=4, zero=3),
    "zero3_remat": Layout(dp_shard=4, zero=3, remat="full"),
    "shard_grad_op": Layout(dp_shard=4, zero=3, reshard_after_forward=False, remat="dots"),
    "hsdp": Layout(dp_replicate=2, dp_shard=2, zero=3),
    "hybrid_zero1": Layout(dp_replicate=2, dp_shard=2, zero=1),
}
"""Stages of ZeRO."""

TORCH_SHARED = {
    "ddp": Layout(dp_replicate=4),
    "tp": Layout(tp=4),
    "tp_sp": Layout(dp_replicate=2, tp=2, sequence_parallel=True),
    "fsdp_tp": Layout(dp_shard=2, zero=3, tp=2),
    "pp": Layout(pp=4, **GPIPE),
    "interleaved": Layout(pp=2, dp_replicate=2, schedule="interleaved", chunks=2, microbatches=2),
    "fsdp_pp": Layout(pp=2, dp_shard=2, zero=3, **GPIPE),
    "tp_sp_pp": Layout(pp=2, tp=2, sequence_parallel=True, **GPIPE),
}
"""torch-manual and torch-library, whose state is spread over four ranks in as many ways."""

TORCH_LIBRARY = TORCH_ZERO | {
    "ddp": Layout(dp_replicate=4),
    "tp": Layout(tp=4, remat="dots"),
    "tp_sp": Layout(tp=4, sequence_parallel=True),
    "ddp_tp": Layout(dp_replicate=2, tp=2),
    "fsdp_tp": Layout(dp_shard=2, tp=2, zero=3),
    "fsdp_tp_sp": Layout(dp_shard=2, tp=2, zero=3, sequence_parallel=True),
    "cp": Layout(cp=4),
    "ddp_cp": Layout(dp_replicate=2, cp=2, zigzag=True, remat="dots"),
    "zero1_cp": Layout(dp_shard=2, cp=2, zero=1),
    "fsdp_cp": Layout(dp_shard=2, cp=2, zero=3, zigzag=True),
    "cp_tp": Layout(cp=2, tp=2, zigzag=True, sequence_parallel=True),
}
"""torch-library without pipelines."""

TORCH_COMPILER = {name: layout for name, layout in TORCH_LIBRARY.items() if name != "zero1_cp"} | {
    "tp_sp": Layout(dp_replicate=2, tp=2, sequence_parallel=True),
    "zero2_tp": Layout(dp_shard=2, tp=2, zero=2),
    "zero2_cp": Layout(dp_shard=2, cp=2, zero=2),
}
"""torch-compiler."""
