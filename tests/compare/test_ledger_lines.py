"""Ledgers beside closed forms, without running anything: what is named, in which order, what explains it.

`sent_otherwise.json` has what some engines sent in steps of `check`, of its own size and of others, where
that is not the closed form: logical bytes of the last stage.
"""

import itertools
import json
from pathlib import Path

import msgspec
import pytest
from records import make_record

from compare.contract.communication import Communication, of_busiest_stage, summed
from compare.contract.ledger import Ledger
from compare.judge.closed_forms.communication import Bytes, communication
from compare.judge.closed_forms.library import by_pytorch
from compare.judge.closed_forms.typed import by_types
from compare.judge.closed_forms.xla import by_xla
from compare.judge.known_deviations import PATTERNS
from compare.judge.ledger_lines import Line, line_up
from compare.judge.strategy import with_remat_resolved
from compare.judge.unexplained import read_seen, seen
from compare.present.ledger import findings_of_ledgers, layouts_of, rows_of
from compare.show.markdown import markdown
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, Layout, Model, Train, edited, load
from compare.studies.fitting import as_preset
from compare.studies.ledger import Ledger as Command
from compare.studies.ledgers import EngineLedger, LedgerStudy, engine_ledger
from compare.studies.presets import PRESETS, spread

RECORDED = json.loads(Path(__file__).with_name("sent_otherwise.json").read_text())
MODEL = Model(n_layer=4, n_head=4, n_embd=32, block_size=16, vocab_size=64, bias=True)
EXPERIMENT = Experiment(
    model=MODEL, train=Train(batch_size=16, gradient_accumulation_steps=2), layout=Layout(remat="none")
)
FSDP = spread(EXPERIMENT, "fsdp", 4)
GATHER = ("all_gather", "dp_shard", "parameters")


def rows(form: Bytes, *, stage: int = 0) -> list[Communication]:
    """A ledger that has just these bytes, in two places each."""
    return [
        Communication(
            kind=kind,
            axis=axis,
            purpose=purpose,
            calls=1,
            bytes=int(part),
            wire_bytes=1,
            source=source,
            stage=stage,
        )
        for (kind, axis, purpose), size in form.items()
        for source, part in (("here", size // 2), ("there", size - size // 2))
    ]


def laid_out(preset: str) -> Experiment:
    return spread(EXPERIMENT, preset, PRESETS[preset].devices)


def cells(*engines: str) -> pytest.MarkDecorator:
    """Every layout that an engine can express."""
    cases, _ = Command(presets=("all",), engines=engines).cases(EXPERIMENT)
    able = [(case.engine, case.layout) for case in cases.values()]
    return pytest.mark.parametrize(("engine", "preset"), able)


@cells("jax-manual", "torch-manual")
def test_every_layout_of_the_matrix_has_a_closed_form(engine, preset):
    experiment = laid_out(preset)
    everything = [
        row
        for stage in range(experiment.layout.pp)
        for row in rows(communication(engine, experiment, stage=stage), stage=stage)
    ]
    lines = line_up(engine, experiment, everything)
    assert {line.state for line in lines} == {"expected"}
    split = {axis for axis, degree in experiment.layout.axes.items() if degree > 1}
    assert {line.axis for line in lines} == split


def test_what_is_wrong_comes_first_and_by_name():
    form = communication("torch-manual", FSDP)
    surprise = Communication(kind="all_to_all", axis="dp_shard", purpose="", calls=2, bytes=999, wire_bytes=9)
    loss = Communication(kind="all_reduce", axis="dp_shard", purpose="loss", calls=2, bytes=16, wire_bytes=16)
    found = line_up(
        "torch-manual", FSDP, [*(row for row in rows(form) if row.kind != "all_gather"), surprise, loss]
    )
    states = [(line.state, line.kind, line.is_explained) for line in found]
    assert states == [
        ("unexpected", "all_to_all", False),
        ("missing", "all_gather", False),
        ("expected", "reduce_scatter", True),
    ]
    twice = line_up("torch-manual", FSDP, [*rows(form), *rows({GATHER: form[GATHER]})])
    assert [(line.state, line.found / line.expected) for line in twice] == [("different", 2), ("expected", 1)]


@cells("jax-compiler", "jax-explicit", "torch-library")
def test_a_pattern_explains_its_bytes_and_no_others(engine, preset):
    experiment = laid_out(preset)
    stage = experiment.layout.pp - 1
    expected = communication(engine, experiment, stage=stage)
    if ENGINES[engine].sends_by == "types":
        deviations = by_types(experiment, expected)
    elif engine == "jax-compiler":
        deviations = by_xla(experiment, expected)
    else:
        deviations = by_pytorch(engine, experiment, expected, stage=stage)
    for *_, pattern in deviations.values():
        assert set(pattern.split(", ")) <= PATTERNS.keys()
    changed = expected | {key: sizes[0] for key, sizes in deviations.items()}

    def unexplained(form: Bytes) -> list[Line]:
        lines = line_up(engine, experiment, rows({k: v for k, v in form.items() if v}, stage=stage))
        return [line for line in lines if line.stage == stage and line.is_new]

    assert unexplained(changed) == []
    # Half as much again of any row, and half of a row that should be gone, are found.
    for key, size in changed.items():
        wrong = size * 1.5 or expected[key] / 2
        assert [(line.kind, line.axis, line.purpose) for line in unexplained(changed | {key: wrong})] == [key]


@pytest.mark.parametrize(("dtype", "number"), [("float64", 8), ("float32", 4), ("bfloat16", 4)])
def test_numbers_that_are_sent_along_are_of_the_dtype_that_is_stored(dtype, number):
    experiment = edited(laid_out("ddp"), {"precision": {"dtype": dtype}})
    ((key, size),) = communication("jax-compiler", experiment).items()
    for more, is_explained in ((number, True), (number // 2, False), (number + 2, False)):
        (line,) = line_up("jax-compiler", experiment, rows({key: size + more}))
        assert (line.why == "numbers sent along") is is_explained, (dtype, more)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_under_dropout_types_sum_both_row_biases_at_each_use(dropout):
    experiment = edited(laid_out("tp_sp"), {"model": {"dropout": dropout}})
    key = ("all_reduce", "tp", "activation gradients")
    plain = edited(experiment, {"model": {"dropout": 0.0}})
    sizes = [by_types(one, communication("jax-explicit", one))[key][0] for one in (experiment, plain)]
    passes, of_bias = experiment.train.gradient_accumulation_steps, 4 * MODEL.n_embd
    assert sizes[0] - sizes[1] == (passes * MODEL.n_layer * of_bias if dropout else 0)


def lines_of(recorded: dict) -> list[Line]:
    """The lines of one stage of a recorded ledger, of which only what differs was recorded."""
    engine, preset, stage = recorded["engine"], recorded["preset"], recorded["stage"]
    check = edited(edited(load("check"), {"train": {"max_iters": 4}}), RECORDED["sizes"][recorded["size"]])
    laid = spread(check, preset, PRESETS[preset].devices)
    laid = edited(laid, {"layout": recorded.get("layout", {})})
    if not recorded.get("layout"):
        laid = as_preset(engine, laid)
    experiment = with_remat_resolved(engine, laid)
    sent = communication(engine, experiment, stage=stage) | {(*key,): size for *key, size in recorded["rows"]}
    lines = line_up(engine, experiment, rows({k: size for k, size in sent.items() if size}, stage=stage))
    return [line for line in lines if line.stage == stage]


def test_each_pattern_gives_the_bytes_of_recorded_ledgers_at_two_sizes():
    sizes: dict[str, set[str]] = {name: set() for name in PATTERNS if name != "padding"}
    for recorded in RECORDED["ledgers"]:
        lines = lines_of(recorded)
        assert [line for line in lines if not line.is_explained] == [], recorded
        assert len([line for line in lines if line.why]) == len(recorded["rows"])
        for name in {name for line in lines if line.why for name in line.why.split(", ")}:
            sizes[name].add(recorded["size"])
    assert {name: found for name, found in sizes.items() if len(found) < 2} == {}


def test_a_difference_that_was_seen_before_is_known_again_by_its_bytes():
    assert read_seen()
    for one in read_seen():
        assert ENGINES[one.engine].sends_by, "what we send ourselves is explained"
        layout = edited(load("check"), {"layout": one.layout}).layout
        expected, found = ({row[:3]: row[at] for row in one.rows} for at in (3, 4))
        known = dict.fromkeys(found, one.version)
        assert seen(one.engine, layout, expected=expected, found=found) == known
        assert seen("torch-manual", layout, expected=expected, found=found) == {}
        more = {key: size + 8 for key, size in found.items()}
        assert seen(one.engine, layout, expected=expected, found=more) == {}


def test_what_was_seen_before_is_unexplained_and_not_new():
    short = edited(load("check"), {"train": {"max_iters": 4}})
    experiment = with_remat_resolved("jax-compiler", spread(short, "fsdp_pp", 4))
    experiment = edited(experiment, {"layout": {"schedule": "gpipe"}})
    sent = communication("jax-compiler", experiment, stage=1)
    for size, new in ((3737600, False), (3737608, True)):
        lines = line_up("jax-compiler", experiment, rows(sent | {GATHER: size}, stage=1))
        line = next(line for line in lines if line.stage == 1 and line.purpose == "parameters")
        assert (line.is_explained, line.is_new, bool(line.seen)) == (False, new, not new)


def test_numbers_that_travel_along_are_explained_and_a_tensor_is_not():
    ddp = spread(EXPERIMENT, "ddp", 2)
    ((key, size),) = communication("jax-compiler", ddp).items()
    along, tensor = (line_up("jax-compiler", ddp, rows({key: size + more}))[0] for more in (8, 4 * 32 * 4))
    assert (along.state, along.why) == ("different", "numbers sent along")
    assert not tensor.is_explained
    by_hand = line_up("jax-manual", ddp, rows({key: size + 8}))[0]
    assert not by_hand.is_explained


def test_shards_that_do_not_divide_are_padded_along_every_axis_that_they_go():
    odd = Experiment(model=Model(n_embd=40, n_layer=2), layout=Layout(pp=2, dp_shard=3, zero=3))
    key = ("all_reduce", "pp", "tied gradients")
    size = communication("jax-manual", odd)[key]
    padded, far = (line_up("jax-manual", odd, rows({key: int(size) + more})) for more in (124, 10**6))
    assert [line.why for line in padded if line.purpose == "tied gradients" and line.stage == 0] == [
        "padding"
    ]
    assert not [line for line in far if line.purpose == "tied gradients" and line.why]


def test_sums_are_of_the_stage_that_has_most_and_costs_of_the_busiest():
    first = rows({("permute", "pp", "activations"): 100})
    last = [*rows({("permute", "pp", "activations"): 40}, stage=1), *rows({GATHER: 30}, stage=1)]
    assert [(row.kind, row.bytes) for row in summed([*first, *last])] == [
        ("all_gather", 30),
        ("permute", 100),
    ]
    assert {row.stage for row in of_busiest_stage([*first, *last])} == {1}


def test_what_has_no_closed_form_is_incomplete_and_said(tmp_path, tiny):
    record = make_record(tmp_path / "run", edited(tiny, {"layout": {"dp_replicate": 2}}))
    chunked = edited(
        tiny,
        {
            "layout": {
                "dp_shard": 2,
                "zero": 3,
                "pp": 2,
                "chunks": 2,
                "microbatches": 2,
                "schedule": "interleaved",
            }
        },
    )
    manifest = msgspec.structs.replace(record.manifest, experiment=chunked, engine="torch-manual")
    ledger = engine_ledger("mine", msgspec.structs.replace(record, manifest=manifest))
    assert not ledger.passed
    assert "layout.chunks = 2" in ledger.problems[0]
    unread = msgspec.structs.replace(record, ledger=Ledger(problems=["a loop, at mine.py:3"]))
    assert engine_ledger("mine", unread).problems == ["a loop, at mine.py:3"]
    study = LedgerStudy(ledgers=[ledger])
    assert study.sentence().endswith("incomplete: mine")
    assert "torch-manual is incomplete: layout.chunks = 2" in page_of(study)


def page_of(study):
    return markdown(findings_of_ledgers(study, Path(), places=False))


def test_engines_stand_side_by_side_and_unmatched_rows_first():
    ledgers = []
    for engine in ENGINES:
        if not engine.startswith(("jax-", "torch-")):
            continue
        form = communication(engine, FSDP)
        sent = form | ({GATHER: 3 * form[GATHER]} if engine == "torch-manual" else {})
        ledgers.append(
            EngineLedger(case=engine, engine=engine, experiment=FSDP, lines=line_up(engine, FSDP, rows(sent)))
        )
    first, *others = rows_of(ledgers)
    assert first.key == GATHER
    assert not first.lines["torch-manual"].is_explained
    assert all(row.key != GATHER or row is first for row in itertools.chain([first], others))
    text = page_of(LedgerStudy(ledgers=ledgers, versions="torch 2"))
    assert f"**{3 * communication('torch-manual', FSDP)[GATHER]:,.0f} unexplained (not seen before)" in text
    assert "FSDP2's root stays" not in text  # this torch-library sends what torch-manual should


def test_no_engine_hides_another_and_no_case_goes_unnamed():
    """Two ledgers of one engine under one layout are both shown; who has none is named, with the reason."""
    lines = line_up("torch-manual", FSDP, [])
    alone = EngineLedger(case="one", engine="torch-manual", experiment=FSDP, lines=lines)
    fsdp = [alone, msgspec.structs.replace(alone, case="two")]
    assert [[ledger.case for ledger in group] for group in layouts_of(fsdp)] == [["one"], ["two"]]
    study = LedgerStudy(
        ledgers=fsdp,
        missing={"torch-library.pp": "it died"},
        left_out={"jax-manual.pp_zero_bubble": "no such schedule", "jax-compiler.x": "no such schedule"},
    )
    assert not study.passed
    assert not LedgerStudy(ledgers=[], missing=study.missing).passed
    assert LedgerStudy(ledgers=[], left_out=study.left_out).passed
    assert study.sentence().startswith("2 cases: 0 of ")
    assert study.sentence().endswith("MISSING: torch-library.pp")
    text = page_of(study)
    assert "**torch-library.pp**: is MISSING: it died" in text
    assert "jax-manual.pp_zero_bubble, jax-compiler.x: no such schedule" in text
