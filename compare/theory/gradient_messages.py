"""All-reduces that carry a step's gradients over the replicas, in closed form, by gradient synchronisation.

    naive        one a leaf, after backward
    flat         one, after backward
    overlapped   one a leaf, within backward
    bucketed     leaves in reverse, a bucket closed before it would pass layout.bucket_mb; within backward in
                 PyTorch. In JAX a leaf of a quarter of a bucket or more goes alone, so that it is not copied

torch-library's DDP closes a bucket as it passes layout.bucket_mb. From the second step on its buckets follow
the order in which gradients arrived; in a pipeline they keep that of the parameters.

A leaf is a parameter of torch-manual, or an array of jax-manual, which stacks what its layers have in common.

Source: buckets as in PyTorch's DDP (Li et al., arXiv 2006.15704, section 3.2.3).
"""

import math

from msgspec import Struct
from msgspec.structs import replace

from compare.numerics.parameters import Parameter, block_parameters, end_parameters, storage_dtype
from compare.spec.axes import TP
from compare.spec.engines.registry import ENGINES, JAX
from compare.spec.experiment import Experiment
from compare.theory.memory import is_split_by, largest_part, parameters_of_stage

ALONE = 1 / 4
"""Share of a bucket, in JAX, from which a leaf has a message of its own."""


class GradientMessages(Struct, frozen=True, kw_only=True):
    """Messages in which a device's gradients leave it."""

    by_stage: list[list[int]]
    """Bytes of a step's all-reduces, in order, for each rank of the pipeline."""
    overlap: bool | None
    """Whether they begin before backward has ended; None where no observer of ours sees it."""


def gradient_messages(engine: str, experiment: Experiment, *, gradient_sync: str) -> GradientMessages | None:
    """The messages of one synchronisation; None where the layout's choice is not what is carried out.

    Raises:
        ValueError: the leaves of ZeRO's shards or of a pipeline's stages have no closed form.
    """
    layout, is_jax = experiment.layout, ENGINES[engine].side == JAX.name
    by_ddp = not ENGINES[engine].offers_choice  # or by FSDP2: shards, and what tp splits, block by block
    if layout.replicas == 1 or (by_ddp and (ENGINES[engine].sends_by != "pytorch" or layout.tp > 1)):
        return None
    if layout.ep > 1 or (layout.zero and not is_jax):
        return None  # FSDP and the sharded optimizer reduce unit by unit, and experts go for themselves
    stages, apart = layout.pp, experiment
    if by_ddp:
        stages = layout.pp * layout.chunks  # each is a module, with a DDP of its own
        apart = replace(experiment, layout=replace(layout, pp=stages, chunks=1))
    limit = {"naive": 0.0, "overlapped": 0.0, "flat": math.inf}.get(gradient_sync, layout.bucket_mb * 1e6)
    by_stage: list[list[int]] = [[] for _ in range(layout.pp)]
    for stage in range(stages):
        for sizes in _leaves(engine, apart, stage, is_jax=is_jax):
            alone = [size for size in sizes if is_jax and size >= ALONE * limit]
            together = [size for size in sizes if not is_jax or size < ALONE * limit]
            in_order = together if by_ddp and layout.pp > 1 else together[::-1]
            by_stage[stage % layout.pp] += alone + _buckets(in_order, limit, passes_limit=by_ddp)
    in_halves = layout.pp > 1 and layout.schedule == "zero_bubble"  # no backward is a gradient's last
    is_early = not is_jax and not in_halves and gradient_sync in ("overlapped", "bucketed")
    # DDP's begin below the dispatcher, on autograd's thread.
    return GradientMessages(by_stage=by_stage, overlap=None if by_ddp else is_early)


def _leaves(engine: str, experiment: Experiment, stage: int, *, is_jax: bool) -> list[list[int]]:
    """Bytes of each leaf on the first device, in the order of the engine's tree; by what may share a bucket.

    In JAX those are leaves that are split over the same axes: joined with one that is split, a repeated one
    would count as split.
    """
    layout, model = experiment.layout, experiment.model
    itemsize, shards = storage_dtype(experiment).itemsize, layout.dp_shard if layout.zero else 1

    def size(parameter: Parameter, layers: int = 1) -> int:
        elements = layers * int(largest_part(parameter, "flat", layout, 1))
        if elements % shards:
            raise ValueError(
                f"{parameter.name} is padded, to be cut in {shards}: no closed form of its bucket"
            )
        return itemsize * elements // shards

    if not is_jax:
        return [[size(parameter) for parameter in parameters_of_stage(engine, experiment, stage=stage)]]
    embeddings, norm = end_parameters(model)
    layers = model.n_layer // layout.pp
    groups: dict[tuple[bool, bool], dict[str, int]] = {}
    for parameter in (*block_parameters(model, 0), *embeddings, *norm):
        is_stacked = parameter.name.startswith("blocks.")
        kind = is_stacked and layout.pp > 1, is_split_by(TP, parameter) and layout.tp > 1
        alike = groups.setdefault(kind, {})
        alike[parameter.name] = size(parameter, layers if is_stacked else 1)
    return [  # in JAX's order: keys sorted at each level, and no level for the layer, which is a dim
        [named[name] for name in sorted(named, key=lambda name: name.replace(".0.", ".").split("."))]
        for named in groups.values()
    ]


def _buckets(sizes: list[int], limit: float, *, passes_limit: bool) -> list[int]:
    """Bytes of the buckets that leaves fill in order: closed before they would pass the limit, or when they
    have."""
    buckets: list[int] = []
    for size in sizes:
        if not buckets or (buckets[-1] >= limit if passes_limit else buckets[-1] + size > limit):
            buckets.append(0)
        buckets[-1] += size
    return buckets
