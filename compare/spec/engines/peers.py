"""Peers: what users run today, declared like our engines, to be timed and compared beside them.

A peer trains the same experiment with a loop of its own, as its users would write it, and leaves the same
record. It runs when it is named, and refuses by name what it cannot express.
"""

from compare.spec.engines.engine import Engine, Layouts, Precisions
from compare.spec.experiment import Layout


def _one_device(layout: Layout) -> str:
    if layout.devices > 1:
        return f"it trains on one device, and the layout has {layout.devices}: give --preset single"
    return ""


def _one_device_eager(layout: Layout) -> str:
    return _one_device(layout) or _nothing_recomputed(layout)


def _nothing_recomputed(layout: Layout) -> str:
    if layout.remat in ("dots", "full"):
        return f"it recomputes nothing in backward (layout.remat = {layout.remat}): choose none or auto"
    return ""


def _only_zero(layout: Layout) -> str:
    if layout.dp_shard == 1:
        return "it is here for ZeRO: give layout.dp_shard = 2 or more, and layout.zero = 1, 2 or 3"
    if layout.dp_replicate > 1:
        return f"it shards over all ranks (layout.dp_replicate = {layout.dp_replicate}): leave it at 1"
    if not layout.reshard_after_forward:
        return (
            "it decides by itself how long gathered parameters stay (layout.reshard_after_forward = false): "
            "leave it true"
        )
    return _nothing_recomputed(layout)


TORCH_PEERS = (
    Engine(
        name="nanogpt-loop",
        side="torchpar",
        folder="peers.nanogpt_loop",
        gradient_sync=("none",),
        decides="one device: a plain loop in nanoGPT's style, on PyTorch's own threads",
        layouts=Layouts(refuses=_one_device_eager),
    ),
    Engine(
        name="nanogpt-loop-compiled",
        side="torchpar",
        folder="peers.nanogpt_loop_compiled",
        gradient_sync=("none",),
        decides="the same loop, its model compiled by torch.compile",
        layouts=Layouts(refuses=_one_device_eager),
    ),
    Engine(
        name="deepspeed",
        side="torchpar",
        folder="peers.deepspeed_zero",
        needs="deepspeed",
        gradient_sync=("zero",),
        decides="DeepSpeed: ZeRO-1, 2 and 3 by deepspeed.initialize",
        layouts=Layouts(zero=(1, 2, 3), refuses=_only_zero),
        precisions=Precisions(
            dtypes=("float32",),
            no_other="DeepSpeed keeps its own copy of the weights in float32, and its bfloat16 is another "
            "recipe than nanoGPT's",
        ),
    ),
)
JAX_PEERS = (
    Engine(
        name="plain-jit",
        side="jaxpar",
        folder="peers.plain_jit",
        gradient_sync=("none",),
        decides="one device: jax.jit of value_and_grad and optax, without mesh or sharding",
        layouts=Layouts(refuses=_one_device),
    ),
)
