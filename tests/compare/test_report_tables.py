"""The parts of a report: layouts in words, ratios, memory by kind, ledgers side by side, pictures."""

import msgspec
import pytest
from records import FEW_ROWS, finished_of, make_record

from compare.contract.communication import Communication
from compare.contract.ledger import Ledger
from compare.judge.closed_forms.memory import closed_form
from compare.judge.costs import Cost, cost_of
from compare.judge.outcome import Outcome
from compare.present.report import pictures, tables
from compare.present.report.bars import memory_at_rest
from compare.present.report.memory import at_rest, device_table, memory_table
from compare.present.report.traffic import ledger_table
from compare.spec.experiment import Experiment, edited
from compare.studies.presets import spread
from compare.terminal import human_bytes, human_seconds, layout_in_words

pytestmark = pytest.mark.usefixtures("with_pictures")
BIG = {"model": {"n_layer": 4, "n_head": 4}, "train": {"batch_size": 16}}


@pytest.mark.parametrize(
    ("preset", "devices", "words"),
    [
        ("single", 1, "nothing split: 1 CPU device"),
        ("ddp", 4, "data parallel over 4: 4 CPU devices"),
        ("ddp_flat", 4, "data parallel over 4 (one reduction for all gradients): 4 CPU devices"),
        ("zero1", 4, "optimizer state split over 4 (ZeRO-1): 4 CPU devices"),
        ("zero2", 4, "optimizer state and gradients split over 4 (ZeRO-2): 4 CPU devices"),
        ("hsdp", 4, "2 replicas, each fully sharded over 2: 4 CPU devices"),
        ("tp_sp", 2, "tensor and sequence parallel over 2: 2 CPU devices"),
        (
            "shard_grad_op",
            2,
            "fully sharded over 2 (gathered parameters kept until backward): 2 CPU devices",
        ),
        (
            "fsdp_tp_pp",
            8,
            "fully sharded over 2, tensor parallel over 2, pipeline of 2 stages, 1F1B with 4 microbatches: "
            "8 CPU devices",
        ),
        (
            "pp_interleaved",
            2,
            "pipeline of 2 ranks with 2 stages each, interleaved 1F1B with 2 microbatches: 2 CPU devices",
        ),
    ],
)
def test_layouts_in_words(tiny, preset, devices, words):
    assert layout_in_words(spread(edited(tiny, BIG), preset, devices), "cpu") == words


def test_accumulated_passes_share_a_schedule_in_words_too(tiny):
    accumulating = edited(tiny, BIG | {"train": {"batch_size": 16, "gradient_accumulation_steps": 3}})
    words = layout_in_words(spread(accumulating, "pp", 2), "gpu")
    assert words == (
        "pipeline of 2 stages, 1F1B with 6 microbatches (2 in each of 3 accumulated passes): 2 GPU devices"
    )


def compared(experiment: Experiment, costs: list[Cost]) -> Outcome:
    """A comparison with these costs, and nothing else that matters."""
    return finished_of(experiment, dict(zip("ab", costs, strict=True)))


def test_every_ratio_belongs_to_a_row_of_the_cost_table(tmp_path, tiny):
    record = make_record(tmp_path / "run", edited(tiny, {"layout": {"dp_replicate": 2}}))
    cost = cost_of(record)
    twice = msgspec.structs.replace(
        cost, comm_calls=2 * cost.comm_calls, peak_mem_bytes=cost.peak_mem_bytes // 2
    )
    none = msgspec.structs.replace(cost, comm_calls=0)
    table = tables.cost_table(compared(tiny, [cost, twice]))
    notes = {row.head.text: [cell.note for cell in row.cells] for row in table.rows}
    assert tables.RATIOS.keys() <= notes.keys()
    assert "tokens/s, at the median step" in notes  # while it runs, the mean is shown
    assert notes["collectives per step"] == ["", f"{tables.TIMES}2.00"]
    assert notes["peak memory per device"] == ["", f"{tables.TIMES}0.50"]
    against_nothing = tables.cost_table(compared(tiny, [none, cost]))
    (calls,) = (row for row in against_nothing.rows if row.head.text == "collectives per step")
    assert [cell.note for cell in calls.cells] == ["", ""]


def test_memory_stands_beside_its_closed_form(tmp_path, tiny):
    experiment = spread(edited(tiny, BIG), "fsdp_tp_pp", 8)
    record = make_record(tmp_path / "run", experiment)
    silent = msgspec.structs.replace(record.manifest, resident_bytes={})
    assert at_rest(msgspec.structs.replace(record, manifest=silent)) is None
    assert memory_table(["a"], [None]).rows[0].cells == [tables.Text("not recorded")]
    assert "not recorded" in memory_at_rest(["a"], [None])

    expected = closed_form("torch-manual", experiment)
    measured = {kind: [int(size) for size in sizes] for kind, sizes in expected.items()}
    measured["optimizer"][7] *= 2
    manifest = msgspec.structs.replace(record.manifest, resident_bytes=measured)
    held = at_rest(msgspec.structs.replace(record, manifest=manifest))
    assert held is not None
    assert held.device == 7
    parameters, _, optimizer, whole = (row.cells[0] for row in memory_table(["a"], [held]).rows)
    assert parameters.note == f"of {human_bytes(expected['parameters'][7])}"
    assert optimizer.note.endswith(", +100.0%")
    assert whole.text == human_bytes(sum(sizes[7] for sizes in measured.values()))
    table = device_table("a", held, experiment.layout.axes)
    assert [row.head.note for row in table.rows][:3] == [
        "pp 0, dp_shard 0, tp 0",
        "pp 0, dp_shard 0, tp 1",
        "pp 0, dp_shard 1, tp 0",
    ]


def test_ledgers_stand_side_by_side(tmp_path, tiny):
    record = make_record(tmp_path / "run", edited(tiny, {"layout": {"dp_replicate": 2}}))
    record = msgspec.structs.replace(record, ledger=Ledger(rows=FEW_ROWS))
    gather = Communication(kind="all_gather", axis="tp", calls=3, bytes=3000, wire_bytes=1500)
    other = msgspec.structs.replace(record, ledger=Ledger(rows=[record.ledger.rows[0], gather]))
    both = record, other
    table = ledger_table(["a", "b"], [one.ledger.rows for one in both], [cost_of(one) for one in both])
    rows = {(row.head.text, row.head.note): [cell.text for cell in row.cells] for row in table.rows}
    nothing = [tables.NONE] * 3
    assert list(rows.items()) == [
        (("all_reduce over dp_replicate", ""), ["2", "4 kB", "6 kB"] * 2),
        (("all_reduce over dp_replicate", "loss"), ["1", "4 B", "6 B", *nothing]),
        (("all_gather over tp", ""), [*nothing, "3", "3 kB", "1.5 kB"]),
        (("all", ""), ["3", "4 kB", "6.01 kB", "5", "7 kB", "7.5 kB"]),
    ]


def test_a_table_of_many_cases_stands_upright():
    names = [f"case {number}" for number in range(tables.MANY + 1)]
    rows = [tables.Row(tables.Text("loss"), [tables.Text(name) for name in names])]
    table = tables.upright(tables.Table(name="t", corner="figure", columns=names, rows=rows))
    assert table.columns == ["loss"]
    assert [(row.head.text, row.cells[0].text) for row in table.rows] == [(name, name) for name in names]


def test_each_schedule_is_drawn_once_and_a_huge_one_is_told(tmp_path, tiny):
    pipeline = spread(edited(tiny, BIG), "pp", 2)
    one, other = (make_record(tmp_path / name, pipeline) for name in ("one", "other"))
    alone = make_record(tmp_path / "alone", tiny)
    assert [picture.title for picture in pictures.timelines([alone, one, other])] == [
        "1F1B, 2 ranks, 2 microbatches"
    ]
    wide = edited(pipeline, {"layout": {"microbatches": 800}})
    manifest = msgspec.structs.replace(one.manifest, experiment=wide)
    (huge,) = pictures.timelines([msgspec.structs.replace(one, manifest=manifest)])
    assert huge.svg == ""
    assert "Too many tasks to draw" in huge.caption


def test_numbers_as_people_read_them():
    assert [human_bytes(count) for count in (0, 999, 999_600, 1_234_000)] == [
        "0 B",
        "999 B",
        "1 MB",
        "1.23 MB",
    ]
    assert [human_seconds(count) for count in (0.04, 9.97, 59.6, 125, 4330)] == [
        "0.0 s",
        "10 s",
        "1 min 0 s",
        "2 min 5 s",
        "1 h 12 min",
    ]
