"""The gradient synchronisation, read off observed messages for the rung "strategy"."""

from collections.abc import Iterator

from compare.contract.communication import GRADIENTS
from compare.judge.observed import Finding, Observed
from compare.numerics.parameters import block_parameters, storage_dtype
from compare.spec.axes import REPLICAS, joined_of
from compare.spec.engines.engine import Engine
from compare.spec.experiment import Experiment
from compare.theory.memory import padded_size, parameters_of_stage


def read_gradient_sync(run: Observed) -> Iterator[Finding]:
    """How gradients are reduced over replicas, from the number, sizes and times of the all-reduces.

    Only where the layout's choice is carried out: FSDP, sharded optimizers and experts reduce unit by unit.
    """
    layout, engine = run.experiment.layout, run.engine
    by_ddp = engine.sends_by == "pytorch" and layout.tp == 1
    if (
        layout.replicas == 1
        or layout.ep > 1
        or not (engine.offers_choice or by_ddp)
        or (layout.zero and not engine.is_jax)
    ):
        return
    if by_ddp and run.record.steps[0].instrumented:
        raise ValueError("DDP forms its buckets after the first step, which was observed")
    asked = layout.gradient_sync if engine.offers_choice else engine.gradient_sync[0]
    calls, replicas = [0] * layout.pp, joined_of(REPLICAS, layout.axes)
    for row in run.record.ledger.rows:
        if (row.kind, row.axis, row.purpose) == ("all_reduce", replicas, GRADIENTS):
            calls[row.stage] += row.calls
    messages = run.work.gradient_messages
    early = {is_early for stage in messages for _, is_early in stage}
    when = "partly within" if len(early) > 1 else "within" if True in early else "after"
    found = f"all-reduces: {'/'.join(map(str, calls))}" + (f", {when} backward" if messages else "")
    may_be_early = not (layout.pp > 1 and layout.schedule == "zero_bubble")  # no backward is the last
    words = f"{asked} of {layout.bucket_mb:g} MB" if asked == "bucketed" or by_ddp else asked
    for sync in dict.fromkeys((asked, *engine.gradient_sync)):
        is_early = may_be_early and sync in ("overlapped", "bucketed")
        if messages and early != {is_early}:
            continue
        if all(_fits(run, sync, stage, calls[stage]) for stage in range(layout.pp)):
            found = words if sync == asked else f"{sync} ({'/'.join(map(str, calls))} calls)"
            break
    yield Finding("layout.gradient_sync", words, found)


def _fits(run: Observed, sync: str, stage: int, calls: int) -> bool:
    """True if all-reduces have the properties of a synchronisation.

    naive and overlapped send each gradient alone, flat sends all at once. Buckets are filled from the last
    gradient on, up to `bucket_mb`. If sizes are unknown (DDP, JAX), the number of calls is bounded: gradients
    of a quarter of a bucket may go alone, and other buckets are half full.
    """
    layout, leaves = run.experiment.layout, leaves_of(run.engine, run.experiment, stage)
    # JAX joins gradients that are split alike.
    groups = (1 + (layout.pp > 1)) * (1 + (layout.tp > 1)) if run.engine.is_jax else 1
    if sync in ("naive", "overlapped", "flat"):
        return calls == (groups if sync == "flat" else len(leaves))
    limit = layout.bucket_mb * 1e6
    if run.work.gradient_messages:
        sizes, buckets = [size for size, _ in run.work.gradient_messages[stage]], list[float]()
        for leaf in reversed(leaves):
            if not buckets or buckets[-1] + leaf > limit:
                buckets.append(0.0)
            buckets[-1] += leaf
        return calls == len(sizes) and sizes == buckets
    alone, others = sum(leaf >= limit / 4 for leaf in leaves), sum(x for x in leaves if x < limit / 4)
    most = alone + 2 * others / limit + groups * layout.chunks
    return sum(leaves) / (limit + max(leaves)) <= calls <= most


def leaves_of(engine: Engine, experiment: Experiment, stage: int) -> list[float]:
    """Bytes of each gradient that a device reduces. JAX stacks the gradients of a stage's layers."""
    layout, model = experiment.layout, experiment.model
    itemsize = storage_dtype(experiment).itemsize / (layout.dp_shard if layout.zero else 1)
    parameters, copies = parameters_of_stage(engine.name, experiment, stage=stage), 1
    if engine.is_jax:
        block, copies = block_parameters(model, 0), model.n_layer // layout.pp
        parameters = [*block, *(p for p in parameters if p not in block)]
    return [
        itemsize * (copies if p.name.startswith("blocks.") else 1) * padded_size(p, "flat", layout, 1)
        for p in parameters
    ]
