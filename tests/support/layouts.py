"""Layouts of the engines' tests, by name: a table for each group of engines. The matrix has PRESETS."""

from compare.spec.experiment import Layout

GPIPE = {"schedule": "gpipe", "microbatches": 4}

JAX = {
    "zero1": Layout(dp_shard=4, zero=1),
    "zero2_tp": Layout(dp_shard=2, zero=2, tp=2),
    "zero3": Layout(dp_shard=4, zero=3),
    "hsdp": Layout(dp_replicate=2, dp_shard=2, zero=3, remat="none"),
    "tp_sp": Layout(tp=2, sequence_parallel=True, remat="none"),
    "ddp_tp": Layout(dp_replicate=2, tp=2, remat="full"),
    "fsdp_tp_sp": Layout(dp_shard=2, zero=3, tp=2, sequence_parallel=True),
}
"""Both JAX engines: stages of ZeRO, tensor and sequence parallel, with each way of recomputation."""

JAX_MANUAL_PIPELINES = {
    "zero2_gpipe": Layout(pp=2, schedule="gpipe", dp_shard=2, zero=2, microbatches=2),
    "tp_sp": Layout(pp=2, tp=2, sequence_parallel=True, microbatches=2, remat="dots"),
    "shard_grad_op": Layout(pp=2, dp_shard=2, zero=3, reshard_after_forward=False, microbatches=2),
    "fsdp_interleaved": Layout(
        pp=2, schedule="interleaved", chunks=2, dp_shard=2, zero=3, microbatches=2, remat="none"
    ),
}
"""Pipelines of jax-manual with other axes, with each way of recomputation."""

JAX_COMPILER_PIPELINES = {
    "pp": Layout(pp=4, schedule="gpipe", microbatches=2, remat="none"),
    "ddp_pp": Layout(pp=2, dp_replicate=2, **GPIPE, remat="full"),
    "zero2_pp": Layout(pp=2, dp_shard=2, zero=2, **GPIPE),
    "fsdp_pp": Layout(pp=2, dp_shard=2, zero=3, **GPIPE),
    "shard_grad_op_pp": Layout(pp=2, dp_shard=2, zero=3, reshard_after_forward=False, **GPIPE),
    "fsdp_interleaved": Layout(
        pp=2, dp_shard=2, zero=3, schedule="interleaved", chunks=2, microbatches=2, remat="none"
    ),
    "tp_sp_pp": Layout(pp=2, tp=2, sequence_parallel=True, **GPIPE),
}
"""Pipelines of jax-compiler with other axes."""

TORCH_LIBRARY = {
    "zero1": Layout(dp_shard=4, zero=1),
    "zero2": Layout(dp_shard=4, zero=2),
    "zero3": Layout(dp_shard=4, zero=3, remat="full"),
    "shard_grad_op": Layout(dp_shard=4, zero=3, reshard_after_forward=False),
    "hsdp": Layout(dp_replicate=2, dp_shard=2, zero=3),
    "hybrid_zero1": Layout(dp_replicate=2, dp_shard=2, zero=1),
    "tp": Layout(tp=4, remat="dots"),
    "tp_sp": Layout(tp=4, sequence_parallel=True),
    "ddp_tp": Layout(dp_replicate=2, tp=2),
    "fsdp_tp": Layout(dp_shard=2, tp=2, zero=3),
    "fsdp_tp_sp": Layout(dp_shard=2, tp=2, zero=3, sequence_parallel=True),
}
"""torch-library without pipelines."""

TORCH_ZERO = {
    "zero1": Layout(dp_shard=4, zero=1),
    "zero2": Layout(dp_shard=4, zero=2),
    "zero3": Layout(dp_shard=4, zero=3),
    "zero3_remat": Layout(dp_shard=4, zero=3, remat="full"),
    "shard_grad_op": Layout(dp_shard=4, zero=3, reshard_after_forward=False, remat="dots"),
    "hsdp": Layout(dp_replicate=2, dp_shard=2, zero=3),
    "zero1_replicated": Layout(dp_replicate=2, dp_shard=2, zero=1),
}
"""torch-manual's stages of ZeRO."""

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
"""Both torch engines, whose state is spread over four ranks in as many ways."""

TORCH_COMPILER = {
    "ddp": Layout(dp_replicate=4),
    "zero1": Layout(dp_shard=4, zero=1),
    "zero2": Layout(dp_shard=4, zero=2),
    "zero3": Layout(dp_shard=4, zero=3),
    "zero3_remat": Layout(dp_shard=4, zero=3, remat="full"),
    "shard_grad_op": Layout(dp_shard=4, zero=3, reshard_after_forward=False, remat="dots"),
    "hsdp": Layout(dp_replicate=2, dp_shard=2, zero=3, remat="dots"),
    "hybrid_zero1": Layout(dp_replicate=2, dp_shard=2, zero=1),
    "tp": Layout(tp=4, remat="dots"),
    "tp_sp": Layout(dp_replicate=2, tp=2, sequence_parallel=True),
    "ddp_tp": Layout(dp_replicate=2, tp=2),
    "zero2_tp": Layout(dp_shard=2, tp=2, zero=2),
    "fsdp_tp": Layout(dp_shard=2, tp=2, zero=3),
    "fsdp_tp_sp": Layout(dp_shard=2, tp=2, zero=3, sequence_parallel=True),
}
"""torch-compiler."""
