"""Layouts of the engines' tests, by name: a table for each group of engines. The matrix has PRESETS."""

from compare.spec.experiment import Layout

GPIPE = {"schedule": "gpipe", "microbatches": 4}
INTERLEAVED = Layout(pp=2, dp_shard=2, zero=3, schedule="interleaved", chunks=2, microbatches=2, remat="none")

JAX = {
    "jax-compiler zero2_tp": Layout(dp_shard=2, zero=2, tp=2),
    "jax-compiler ddp_tp": Layout(dp_replicate=2, tp=2, remat="full"),
    "jax-compiler fsdp_tp_sp": Layout(dp_shard=2, zero=3, tp=2, sequence_parallel=True),
    "jax-compiler ddp_pp": Layout(pp=2, dp_replicate=2, **GPIPE, remat="full"),
    "jax-compiler zero2_pp": Layout(pp=2, dp_shard=2, zero=2, **GPIPE),
    "jax-compiler shard_grad_op_pp": Layout(pp=2, dp_shard=2, zero=3, reshard_after_forward=False, **GPIPE),
    "jax-compiler fsdp_interleaved": INTERLEAVED,
    "jax-explicit ddp_tp": Layout(dp_replicate=2, tp=2, remat="full"),
    "jax-explicit hsdp": Layout(dp_replicate=2, dp_shard=2, zero=3, remat="none"),
    "jax-explicit tp_sp_pp": Layout(pp=2, tp=2, sequence_parallel=True, **GPIPE),
    "jax-manual zero1": Layout(dp_shard=4, zero=1),
    "jax-manual ddp_tp": Layout(dp_replicate=2, tp=2, remat="full"),
    "jax-manual hsdp": Layout(dp_replicate=2, dp_shard=2, zero=3, remat="none"),
    "jax-manual tp_sp": Layout(tp=2, sequence_parallel=True, remat="none"),
    "jax-manual zero2_gpipe": Layout(pp=2, schedule="gpipe", dp_shard=2, zero=2, microbatches=2),
    "jax-manual shard_grad_op_pp": Layout(
        pp=2, dp_shard=2, zero=3, reshard_after_forward=False, microbatches=2
    ),
    "jax-manual fsdp_interleaved": INTERLEAVED,
}
"""Layouts of jaxpar's engines: each strategy and each remat at least once."""

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
    "cp": Layout(cp=4),
    "ddp_cp": Layout(dp_replicate=2, cp=2, zigzag=True, remat="dots"),
    "zero1_cp": Layout(dp_shard=2, cp=2, zero=1),
    "fsdp_cp": Layout(dp_shard=2, cp=2, zero=3, zigzag=True),
    "cp_tp": Layout(cp=2, tp=2, zigzag=True, sequence_parallel=True),
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
    "cp": Layout(cp=4),
    "ddp_cp": Layout(dp_replicate=2, cp=2, zigzag=True, remat="dots"),
    "zero2_cp": Layout(dp_shard=2, cp=2, zero=2),
    "fsdp_cp": Layout(dp_shard=2, cp=2, zero=3, zigzag=True),
    "cp_tp": Layout(cp=2, tp=2, zigzag=True, sequence_parallel=True),
}
"""torch-compiler."""
