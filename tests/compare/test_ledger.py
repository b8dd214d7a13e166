"""Ledgers beside textbook and snapshot, without a run: ratios, what does not fit, how it is shown."""

import msgspec
from msgspec.structs import replace

from compare.commands.ledger import Ledger as Command
from compare.commands.ledger.table import EngineLedger, engine_ledger, layouts_of, sentence, table_of_layout
from compare.contract.communication import Communication, of_busiest_stage, summed
from compare.contract.ledger import Ledger
from compare.judge.ledger import (
    line_up,
    mismatches,
    read_snapshot,
    recorded_rows,
    snapshot_rows,
    unlike_textbook,
)
from compare.numerics.parameters import block_parameters
from compare.setup.presets import spread
from compare.spec.engines.registry import ENGINES, STUDIED
from compare.spec.experiment import Experiment, Layout, Model, Train, edited, load
from compare.theory.communication import is_plain
from tests.support.records import make_ledger, make_record

EXPERIMENT = Experiment(
    model=Model(n_layer=4, n_head=4, n_embd=32, block_size=16, vocab_size=64, bias=True),
    train=Train(batch_size=16, gradient_accumulation_steps=2),
    layout=Layout(remat="none"),
)
FSDP = spread(EXPERIMENT, "fsdp", 4)
DEVICES = {"ddp": 2, "fsdp": 2, "zero1": 2, "tp_sp": 2, "cp": 2, "pp": 2, "fsdp_tp_pp": 8}


def layouts(engine: str) -> list[tuple[str, Experiment]]:
    cases, _ = Command(presets=("all",), engines=(engine,)).cases(EXPERIMENT)
    return [(case.coordinates["layout"], case.experiment) for case in cases.values()]


def objections(engine: str, experiment: Experiment, rows: list[Communication]) -> list[str]:
    return list(mismatches(engine, experiment, line_up(engine, experiment, rows)))


def test_what_is_of_the_textbook_fits_and_half_as_much_does_not():
    """Of the engine that makes its own calls a byte more does not fit either."""
    for engine in STUDIED:
        for preset, experiment in layouts(engine):
            rows = make_ledger(engine, experiment)
            assert objections(engine, experiment, rows) == [], (engine, preset)
            kept = rows if experiment.layout.pp == 1 else [row for row in rows if row.axis != "pp"]
            for flow in line_up(engine, experiment, kept):
                less = [
                    replace(row, bytes=row.bytes * 2 // 5) if row.axis == flow.axis else row for row in rows
                ]
                assert objections(engine, experiment, less), (engine, preset, flow)
            if engine == "torch-manual" and is_plain(experiment) and preset != "single":
                most = max(range(len(rows)), key=lambda place: rows[place].bytes)
                more = [replace(row, bytes=row.bytes + 2 * (place == most)) for place, row in enumerate(rows)]
                assert objections(engine, experiment, more), preset


def test_ddp_sums_once_over_replicas_and_shards():
    """Under ZeRO-1, measured: one sum of all gradients over both axes, and the parameters over shards."""
    hybrid = edited(EXPERIMENT, {"layout": {"dp_replicate": 2, "dp_shard": 2, "zero": 1}})
    (row,) = (row for row in make_ledger("torch-library", hybrid) if row.purpose == "gradients")
    gathers = [row for row in make_ledger("torch-library", hybrid) if row.purpose == "parameters"]
    assert objections("torch-library", hybrid, [row, *gathers]) == []
    (said,) = objections("torch-library", hybrid, [replace(row, bytes=row.bytes * 3 // 2), *gathers])
    assert "reduce over dp_replicate+dp_shard" in said


def test_xla_joins_axes_otherwise_than_the_textbook():
    """ZeRO-1 over replicas, shards and cp, measured: over cp in each pass, and over the other two at once."""
    three = edited(EXPERIMENT, {"layout": {"dp_replicate": 2, "dp_shard": 2, "zero": 1, "cp": 2}})
    rows = make_ledger("jax-compiler", three)
    others = [row for row in rows if row.purpose != "gradients"]
    whole = sum(row.bytes for row in rows if row.purpose == "gradients" and row.axis == "dp_shard")
    over_two = Communication(
        kind="all_reduce",
        axis="dp_replicate+dp_shard",
        calls=1,
        bytes=whole,
        wire_bytes=1,
        purpose="gradients",
    )
    assert objections("jax-compiler", three, [*others, over_two, replace(over_two, axis="cp")]) == []
    assert len(objections("jax-compiler", three, others)) == 2, "over shards, and over replicas with cp"


def test_backward_need_not_gather_the_biases_of_a_block():
    """Nor are they a smaller part of it where experts, which stay where they are, are the larger part."""
    model = replace(EXPERIMENT.model, n_experts=8)
    experts = edited(replace(EXPERIMENT, model=model), {"layout": {"dp_shard": 2, "zero": 3, "ep": 2}})
    dense = [p for p in block_parameters(model, 0) if "expert" not in p.axes]
    spared = sum(p.size for p in dense if p.name.endswith(".bias")) / sum(p.size for p in dense)
    for share, fits in ((spared, True), (2 * spared + 0.02, False)):
        rows = [
            replace(row, bytes=int(row.bytes * (1 - share))) if row.purpose == "parameters" else row
            for row in make_ledger("jax-explicit", experts)
        ]
        assert (objections("jax-explicit", experts, rows) == []) is fits, (share, rows)


def test_scalars_are_left_out_and_surprises_are_not():
    rows = make_ledger("torch-manual", FSDP)
    loss = Communication(kind="all_reduce", axis="dp_shard", purpose="loss", calls=2, bytes=16, wire_bytes=16)
    surprise = Communication(kind="all_to_all", axis="dp_shard", calls=2, bytes=999, wire_bytes=9)
    assert objections("torch-manual", FSDP, [*rows, loss]) == []
    (said,) = objections("torch-manual", FSDP, [*rows, surprise])
    assert said == "999 bytes of all_to_all over dp_shard, where the textbook has 0"


def test_a_compiler_may_reduce_over_stages_where_the_textbook_does_not():
    """XLA holds both ends of the model on every stage, and adds their gradients up."""
    pipeline = spread(EXPERIMENT, "pp_gpipe", 4)
    ends = Communication(kind="all_reduce", axis="pp", stage=1, calls=1, bytes=8192, wire_bytes=8192)
    for engine, fits in (("jax-compiler", True), ("jax-explicit", True), ("torch-manual", False)):
        said = objections(engine, pipeline, [*make_ledger(engine, pipeline), ends])
        assert (said == []) is fits, (engine, said)


def test_a_compiler_may_do_a_little_in_other_ways():
    """As an exchange of rows; not gather what the textbook leaves where it is."""
    tp = spread(EXPERIMENT, "tp", 2)
    textbook_of = sum(row.bytes for row in make_ledger("jax-explicit", tp))
    for engine, share, fits in (
        ("jax-explicit", 0.1, True),
        ("jax-explicit", 0.4, False),
        ("torch-compiler", 0.1, False),
    ):
        heads = Communication(
            kind="all_gather",
            axis="tp",
            calls=1,
            bytes=int(share * textbook_of),
            wire_bytes=1,
            purpose="activations",
        )
        assert (objections(engine, tp, [*make_ledger(engine, tp), heads]) == []) is fits, (engine, share)


def test_what_dp_shard_does_not_divide_is_padded_and_no_more():
    """Of a vocabulary of 37 two ranks have 38 rows."""
    odd = edited(spread(EXPERIMENT, "fsdp", 2), {"model": {"vocab_size": 37}})
    for engine in STUDIED:
        for more, fits in (
            (1.0, True),
            (1.001, ENGINES[engine].holds.cuts != "flat"),
            (1.2, ENGINES[engine].sent_by_xla),
        ):
            rows = [replace(row, bytes=int(row.bytes * more)) for row in make_ledger(engine, odd)]
            said = [*unlike_textbook(engine, odd, rows)]
            assert (said == []) is (fits or engine == "jax-manual"), (engine, more, said)


def test_what_is_written_by_hand_is_of_the_kind_that_it_is():
    """A slice of an all-reduce has the bytes of a reduce-scatter, and twice as many on the wire."""
    for engine in STUDIED:
        rows = [
            replace(row, kind="all_reduce") if row.kind == "reduce_scatter" else row
            for row in make_ledger(engine, FSDP)
        ]
        assert bool([*unlike_textbook(engine, FSDP, rows)]) is engine.endswith("manual"), engine


def test_what_is_summed_over_two_axes_at_once_counts_for_both():
    hsdp = spread(EXPERIMENT, "hsdp", 4)
    rows = [
        replace(row, axis="dp_replicate+dp_shard") if row.kind == "reduce_scatter" else row
        for row in make_ledger("jax-compiler", hsdp)
        if row.axis != "dp_replicate"
    ]
    assert objections("jax-compiler", hsdp, rows) == []
    assert objections("jax-compiler", hsdp, [row for row in rows if "+" not in row.axis])


def test_one_layer_of_a_loop_may_be_gathered_once():
    """XLA unrolls a loop of one layer, and moves its gather out of the passes."""
    for layers, fits in ((1, True), (4, False)):
        experiment = edited(FSDP, {"model": {"n_layer": layers}})
        once = [
            replace(row, bytes=row.bytes // 4) if row.kind == "all_gather" else row
            for row in make_ledger("jax-manual", experiment)
        ]
        assert (not objections("jax-manual", experiment, once)) == fits


def check(preset: str) -> Experiment:
    whole = edited(load("check"), read_snapshot().experiment)
    return spread(whole, preset, DEVICES[preset])


def test_the_snapshot_is_of_its_own_experiment_and_versions():
    versions = read_snapshot().versions
    assert DEVICES.keys() == read_snapshot().layouts.keys()
    for preset in DEVICES:
        assert recorded_rows("torch-manual", check(preset), versions), preset
    ddp = check("ddp")
    assert recorded_rows("torch-manual", ddp, versions | {"torch": "2.13.0+cpu"})
    assert not recorded_rows("torch-manual", ddp, versions | {"torch": "2.12.0"})
    for fields in ({"model": {"n_layer": 4}}, {"precision": {"dtype": "float32"}}, {"layout": {"tp": 2}}):
        assert not recorded_rows("torch-manual", edited(ddp, fields), versions), fields


def test_what_is_not_as_recorded_is_named(tmp_path):
    experiment, versions = check("ddp"), read_snapshot().versions
    record = make_record(tmp_path / "run", experiment)
    record = replace(record, manifest=replace(record.manifest, versions=versions))
    ((kind, axis, calls, size, wire),) = recorded_rows("torch-manual", experiment, versions)
    loss = Communication(kind=kind, axis=axis, purpose="loss", calls=1, bytes=8, wire_bytes=8)
    for more, fits in ((0, True), (1, False)):
        row = replace(loss, purpose="gradients", calls=calls - 1 + more, bytes=size - 8, wire_bytes=wire - 8)
        ledger = engine_ledger("mine", replace(record, ledger=Ledger(rows=[row, loss])))
        assert ledger.is_recorded
        assert (ledger.unexpected == []) == fits, ledger.unexpected
    assert "not as recorded: sent ('all_reduce', 'dp_replicate', 8, " in ledger.unexpected[0]
    unread = engine_ledger(
        "mine", replace(record, ledger=Ledger(rows=[row], problems=["a loop, at mine.py:3"]))
    )
    assert unread.unexpected[0] == "incomplete: a loop, at mine.py:3"


def test_sums_are_of_the_stage_that_has_most_and_costs_of_the_busiest():
    send = Communication(kind="permute", axis="pp", calls=1, bytes=100, wire_bytes=1)
    gather = Communication(kind="all_gather", axis="dp_shard", calls=1, bytes=30, wire_bytes=2, stage=1)
    rows = [send, replace(send, bytes=40, stage=1), gather]
    assert [(row.kind, row.bytes) for row in summed(rows)] == [("all_gather", 30), ("permute", 100)]
    assert {row.stage for row in of_busiest_stage(rows)} == {1}
    assert snapshot_rows(rows) == [("all_gather", "dp_shard", 1, 30, 2), ("permute", "pp", 1, 100, 1)]


def test_no_engine_hides_another_and_no_case_goes_unnamed():
    """Two ledgers of one engine under one layout are both shown; who has none is named, with the reason."""
    first = EngineLedger(
        case="one",
        engine="torch-manual",
        experiment=FSDP,
        platform="gpu",
        flows=line_up("torch-manual", FSDP, []),
    )
    fsdp = [first, msgspec.structs.replace(first, case="two", unexpected=["nothing"])]
    assert [[ledger.case for ledger in group] for group in layouts_of(fsdp)] == [["one"], ["two"]]
    assert table_of_layout([first]).name.endswith(f"{FSDP.layout.devices} GPU devices")
    two = sentence(fsdp, {"torch-library.pp": "died"})
    assert two == (
        "2 cases; 0 of 4 flows are the textbook's to the byte, the others 0.00 to 0.00 times; "
        "UNEXPECTED: two; MISSING: torch-library.pp"
    )
