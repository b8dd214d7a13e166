"""Support matrix of the documentation: which engine can express which strategy, and why an engine cannot.

Every cell is from `Engine.why_not_train`, the check that a run makes before it starts.
"""

import re
from collections.abc import Mapping

from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import Layout, edited, load

Fields = Mapping[str, Mapping[str, object]]


def layout(**fields: object) -> Fields:
    """Fields of an experiment that change its layout only."""
    return {"layout": fields}


STRATEGIES: dict[str, Fields] = {
    "data parallel (`ddp`)": layout(dp_replicate=4),
    "all-reduce per parameter (`gradient_sync=naive`)": layout(dp_replicate=4, gradient_sync="naive"),
    "one all-reduce (`flat`)": layout(dp_replicate=4, gradient_sync="flat"),
    "all-reduce per parameter, during backward (`overlapped`)": layout(
        dp_replicate=4, gradient_sync="overlapped"
    ),
    "ZeRO-1": layout(dp_shard=4, zero=1),
    "ZeRO-2": layout(dp_shard=4, zero=2),
    "ZeRO-3 (`fsdp`)": layout(dp_shard=4, zero=3),
    "FSDP inside replicas (`hsdp`)": layout(dp_replicate=2, dp_shard=2, zero=3),
    "tensor parallel (`tp`)": layout(tp=4),
    "with sequence parallelism (`tp_sp`)": layout(tp=4, sequence_parallel=True),
    "tensor parallel with ZeRO-1": layout(dp_shard=2, zero=1, tp=2),
    "tensor parallel with FSDP": layout(dp_shard=2, zero=3, tp=2),
    "context parallel, all-gather": layout(cp=4),
    "context parallel, ring with zigzag": layout(cp=4, context="ring", zigzag=True),
    "context parallel, Ulysses": layout(cp=4, context="ulysses"),
    "expert parallel with ZeRO-1": layout(dp_shard=4, ep=4, zero=1),
    "expert parallel with FSDP": layout(dp_shard=4, ep=4, zero=3),
    "expert parallel, 2 of 4 ranks": layout(dp_shard=4, ep=2, zero=3),
    "expert with tensor parallel": layout(dp_shard=2, ep=2, tp=2),
    "pipeline, GPipe": layout(pp=4, schedule="gpipe", microbatches=4),
    "pipeline, 1F1B": layout(pp=4, schedule="1f1b", microbatches=4),
    "pipeline, interleaved": layout(pp=2, schedule="interleaved", chunks=2, microbatches=2),
    "pipeline, zero bubble": layout(pp=4, schedule="zero_bubble", microbatches=4),
    "pipeline with FSDP": layout(dp_shard=2, zero=3, pp=2, schedule="gpipe", microbatches=4),
    "pipeline with tensor parallel": layout(tp=2, pp=2, schedule="gpipe", microbatches=4),
    "pipeline with a ring": layout(cp=2, context="ring", zigzag=True, pp=2, schedule="gpipe", microbatches=4),
    "moments in host memory (`offload`)": layout(dp_shard=4, zero=3, offload="optimizer"),
    "recomputation (`remat=full`)": layout(dp_shard=4, zero=3, remat="full"),
    "float16 with loss scaling": {"layout": {"dp_shard": 4, "zero": 3}, "precision": {"dtype": "float16"}},
    "dropout": {"layout": {"dp_shard": 4, "zero": 3}, "model": {"dropout": 0.1}},
}


def reason(engine: str, fields: Fields) -> str:
    """Reason why an engine rejects a strategy, without the field's name; '' if it supports the strategy."""
    experts = "ep" in fields.get("layout", {})
    base = edited(load("experts" if experts else "check"), {"layout": _plain()})
    return re.sub(r"^layout\.\w+ = \w+: ", "", STUDIED[engine].why_not_train(edited(base, fields)))


def _plain() -> dict[str, object]:
    """The default layout, as fields."""
    return {name: getattr(Layout(), name) for name in Layout.__struct_fields__}


def page() -> str:
    """The page docs/generated/support.md."""
    notes: dict[str, int] = {}
    head = ["strategy", *(f"[`{name}`](../../{e.side}/{e.folder})" for name, e in STUDIED.items())]
    lines = [head, ["---", *([":-:"] * len(STUDIED))]]
    for title, fields in STRATEGIES.items():
        reasons = [reason(engine, fields) for engine in STUDIED]
        cells = ["yes" if not why else f"[{notes.setdefault(why, len(notes) + 1)}]" for why in reasons]
        if "gradient_sync" in fields["layout"]:
            offers = [engine.offers_choice for engine in STUDIED.values()]
            cells = [cell if has else "own" for cell, has in zip(cells, offers, strict=True)]
        lines.append([title, *cells])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n".join(
        [
            "# Which engine supports what",
            "",
            "`make docs` writes this page from the checks that a run makes before it starts. A number refers",
            "to a reason below. *own*: the engine chooses its own all-reduces.",
            "",
            table,
            "",
            *(f"{number}. {why}" for why, number in notes.items()),
            "",
        ]
    )
