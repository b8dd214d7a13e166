"""`shardpair lesson`: pages from records, without dangling links, machine paths or anything to fetch."""

import html
import re
import shlex
import shutil
from pathlib import Path

import msgspec
import pytest
from outline import Outline
from records import make_run

from compare.cli import main
from compare.contract.communication import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    GRADIENTS,
    PARAMETERS,
    Communication,
)
from compare.contract.ledger import Ledger
from compare.contract.record import Record, read_record
from compare.host.tensors import RecordError
from compare.judge.outcome import Outcome
from compare.pipeline.instructions import Instruction, SourceLine
from compare.present.lesson import sources, worked
from compare.present.lesson.marks import find_marks
from compare.present.lesson.names import NAMES
from compare.present.lesson.page import lesson_page
from compare.spec.engines.registry import ENGINES
from compare.studies.fitting import fitting
from compare.studies.lessons import FOLDERS, LESSONS, lesson_experiment, source_file, source_root

ROOT = Path(__file__).parents[2]
COMPILED = [name for name, folder in FOLDERS.items() if folder.startswith("jaxpar/")]
ROWS = {
    "data_parallel": [("all_reduce", GRADIENTS)],
    "fully_sharded": [("all_gather", PARAMETERS), ("reduce_scatter", GRADIENTS)],
    "tensor_parallel": [("all_reduce", ACTIVATIONS), ("all_reduce", ACTIVATION_GRADIENTS)],
    "pipeline_parallel": [("permute", ACTIVATIONS), ("permute", ACTIVATION_GRADIENTS)],
}
"""What a person sends; the purposes of PyTorch's wrappers are other words for some of it."""
MOST_BYTES = 300_000


def sent(strategy: str) -> list[Communication]:
    return [
        Communication(
            kind=kind, axis=LESSONS[strategy].axis, calls=2, bytes=4000, wire_bytes=4000, purpose=purpose
        )
        for kind, purpose in ROWS[strategy]
    ]


def compiled(engine: str, strategy: str) -> list[Instruction]:
    """An instruction for each row, from the first marked line of the engine's file."""
    path = source_file(engine, strategy)
    source = sources.read_sources(strategy, [engine])[0]
    line = source.marks[0].line
    place = SourceLine(path, line, source.functions.get(line, ""))
    return [
        Instruction(
            kind=one.kind,
            axis=one.axis,
            purpose=one.purpose,
            operation=one.kind.replace("_", "-"),
            result="f64[4,8]",
            groups="{{0,1}}",
            op_name="jit(step)/jvp(<lambda>)",
            calls=one.calls,
            bytes=one.bytes,
            stack=(place,),
        )
        for one in sent(strategy)
    ]


def made_by_hand(folder: Path, strategy: str) -> tuple[Outcome, dict[str, Record]]:
    """A run of all four engines under the lesson's layout that nobody has run; a shorter ledger is shown."""
    engines, experiment = engines_of(strategy), lesson_experiment(strategy)
    outcome = make_run(folder, experiment, names=engines)
    records = {}
    for engine in engines:
        instructions = compiled(engine, strategy) if engine in COMPILED else None
        records[engine] = msgspec.structs.replace(
            read_record(folder / engine), ledger=Ledger(rows=sent(strategy)), instructions=instructions
        )
    return outcome, records


def engines_of(strategy: str) -> list[str]:
    return fitting(list(FOLDERS), lesson_experiment(strategy).layout, platform="cpu")[0]


@pytest.fixture(scope="module", params=LESSONS)
def lesson(request, tmp_path_factory) -> tuple[str, str]:
    """A strategy and its page."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, lesson_page(request.param, *made_by_hand(folder, request.param))


def targets(page: str) -> list[str]:
    return re.findall(r'href="#([^"]*)"', page)


def anchors(page: str) -> list[str]:
    return re.findall(r'\bid="([^"]*)"', page)


def written(page: str) -> list[str]:
    """The sources as they stand on a page, without what is written behind lines."""
    blocks = re.findall(r'<pre class="code"[^>]*><code>(.*?)</code></pre>', page, re.DOTALL)
    without_labels = (re.sub(r'<a class="to".*?</a>', "", block) for block in blocks)
    return [html.unescape(re.sub(r"<[^>]*>", "", block)) for block in without_labels]


def require_alone(page: str) -> None:
    """Nothing is fetched, no link leads nowhere, and no folder of a machine is named."""
    assert not re.search(r"\bsrc=|@import|url\((?!#)|<link|<script", page)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', page))
    assert len(anchors(page)) == len(set(anchors(page)))
    assert set(targets(page)) <= set(anchors(page))
    assert str(ROOT) not in page
    assert not re.search(r"(?<![\w.])/(?:home|root|tmp|work|usr|Users)/", page)
    assert len(page.encode()) < MOST_BYTES


def test_page_stands_alone(lesson, tmp_path_factory):
    _, page = lesson
    require_alone(page)
    assert str(tmp_path_factory.getbasetemp()) not in page


def test_pictures_come_before_the_code(lesson):
    strategy, page = lesson
    places = [page.index(f'<h2 id="{anchor}">') for anchor in ("holds", "moves", "costs", "source")]
    assert places == sorted(places)
    pictures = Outline(page[: places[-1]]).pictures
    assert pictures[0] == f"Who holds what: {LESSONS[strategy].devices} devices of {COMPILED[0]}"
    for kind, _ in ROWS[strategy]:
        assert f"{kind} on 4 devices, hop by hop" in pictures
    assert "broadcast" not in page[: places[-1]]  # nobody sends one
    before = html.unescape(page[places[2] : places[3]])
    for line in (*worked.derivation(strategy), *worked.when_it_pays(strategy), worked.SOURCES):
        assert line in before


def test_page_has_the_four_files_as_they_are(lesson):
    strategy, page = lesson
    engines = engines_of(strategy)
    files = [(ROOT / source_file(engine, strategy)).read_text() for engine in engines]
    assert [text + "\n" for text in written(page)] == files


def test_the_reader_chooses_the_columns(lesson):
    """A box for each engine; three are checked at first; what is not checked is shown nowhere."""
    strategy, page = lesson
    engines = engines_of(strategy)
    boxes = re.findall(
        r'<input type="checkbox" id="show-(\d+)"( checked)?><label for="show-\1">([^<]*)', page
    )
    assert [engine for _, _, engine in boxes] == engines
    assert [engine for _, checked, engine in boxes if checked] == [
        engine for engine in engines if engine == engines[0] or ENGINES[engine].folder == "manual"
    ]
    for number, _, engine in boxes:
        (hidden,) = re.findall(rf"main:has\(#show-{number}:not\(:checked\)\) :is\((.*)\) {{", page)
        assert f".codes > :nth-child({number}):not(:has(:target))" in hidden
        assert f".by-engine tr > :nth-child({int(number) + 1})" in hidden
        assert (f'<section class="made-{number}">' in page) is (engine in COMPILED)
        assert f"<strong>{engine}</strong>: {html.escape(ENGINES[engine].checks, quote=False)}" in (
            page.replace("&#39;", "'")
        )


def test_forward_and_backward_of_a_library_s_tensor_parallelism_come_from_different_lines():
    """A sum in forward is of the rows, a sum in backward of the columns."""
    (source,) = sources.read_sources("tensor_parallel", ["torch-library"])
    text = source.text.splitlines()
    forward, backward = (
        {mark.line for mark in source.marks if mark.causes("all_reduce", purpose)}
        for purpose in (ACTIVATIONS, ACTIVATION_GRADIENTS)
    )
    assert forward
    assert backward
    assert not forward & backward
    assert all("row" in text[line - 1].lower() for line in forward)
    assert all("column" in text[line - 1].lower() for line in backward)


def test_every_row_of_a_ledger_leads_to_its_source_and_back(lesson):
    strategy, page = lesson
    for engine in FOLDERS:
        if engine not in COMPILED and not ENGINES[engine].observed.counts_own_calls:
            continue  # PyTorch's wrappers: other purposes than a person says
        for kind, purpose in ROWS[strategy]:
            row = f"row-{kind}-{LESSONS[strategy].axis}-{purpose.replace(' ', '-')}"
            cells = re.findall(rf'<td id="({row}-[-\d]*{engine})">(.*?)</td>', page, re.DOTALL)
            anchor, cell = cells[0]  # of a pipeline that of its first stages
            lines = re.findall(rf'href="#({engine}-L\d+)"', cell)
            assert lines, (engine, anchor)
            for line in lines:
                (text,) = re.findall(rf'<span class="l" id="{line}"[^>]*>.*', page)
                assert f'href="#{anchor}"' in text


def test_instructions_lead_to_their_lines_and_their_rows(lesson):
    strategy, page = lesson
    for engine in COMPILED:
        for number in range(1, len(ROWS[strategy]) + 1):
            (row,) = re.findall(rf'<tr id="{engine}-hlo-{number}">.*', page)
            assert f'href="#{engine}-L' in row
            assert re.search(rf'href="#row-[-\w]*-{engine}"', row)
        assert f'href="#{engine}-hlo-1"' in page  # which stands for all of its line
    assert html.escape("jvp(<lambda>)") in page


def test_page_says_which_gradients_rest(lesson):
    """By hand they are dropped after the step, and the table has them as they are before it."""
    _, page = lesson
    assert "gradients as they are just before the optimizer's, of which only DDP's buckets outlive" in page


def test_page_says_what_to_try(lesson):
    strategy, page = lesson
    for trial in LESSONS[strategy].trials:
        assert html.escape(trial.command) in page
    assert f"shardpair lesson {strategy}\n" in page
    assert "PASS" in page


@pytest.mark.parametrize("command", [t.command for one in LESSONS.values() for t in one.trials])
def test_every_trial_can_be_run(command, capsys):
    program, *options = shlex.split(command)
    assert program == "shardpair"
    assert main([*options, "--dry_run"]) == 0
    assert "nothing was started; all of it can run" in capsys.readouterr().out


def test_same_records_give_the_same_page(tmp_path):
    strategy = "tensor_parallel"
    first, again = (lesson_page(strategy, *made_by_hand(tmp_path / name, strategy)) for name in "ab")
    assert first == again


def test_a_lesson_that_shows_nothing_is_refused_by_name(tmp_path, monkeypatch):
    for engine in FOLDERS:
        path = tmp_path / source_file(engine, "data_parallel")
        path.parent.mkdir(parents=True)
        shutil.copy(ROOT / source_file(engine, "data_parallel"), path)
    empty = "torchpar/library/data_parallel.py"
    (tmp_path / empty).write_text('"""Data parallelism by PyTorch: all_reduce."""\nimport torch\n')
    monkeypatch.setattr(sources, "source_root", lambda: tmp_path)
    with pytest.raises(RecordError, match=rf"^{empty} uses none of DistributedDataParallel, .* show nothing"):
        lesson_page("data_parallel", *made_by_hand(tmp_path / "run", "data_parallel"))


def test_a_file_that_has_changed_since_the_run_is_said(tmp_path):
    strategy, engine = "fully_sharded", COMPILED[0]
    comparison, records = made_by_hand(tmp_path, strategy)
    moved = SourceLine(source_file(engine, strategy), 1, "somewhere.else")
    old = [msgspec.structs.replace(one, stack=(moved,)) for one in records[engine].instructions or []]
    records[engine] = msgspec.structs.replace(records[engine], instructions=old)
    page = lesson_page(strategy, comparison, records)
    assert page.count("has changed since the run") == 1
    assert set(targets(page)) <= set(anchors(page))


def test_marks_know_aliases_bindings_and_purposes():
    source = "\n".join(
        (
            "from functools import partial",
            "from side import collectives as c",
            "from jax.sharding import PartitionSpec as P",
            "join = partial(c.all_gather, purpose=PARAMETERS)",
            "def gathered(x: P) -> P:",
            "    «é» = 'é'; return join(x, 'é', c.shift(x, purpose=ACTIVATIONS))".replace("«é»", "é"),
            "c.all_reduce(x, purpose=how); c.to_varying(x)",
        )
    )
    names = NAMES["jaxpar/manual"] | {"PartitionSpec": ()}
    marks = find_marks(source, names, path="")
    lines = source.splitlines()
    assert [(lines[m.line - 1][m.column : m.end], m.name, m.sends) for m in marks] == [
        ("all_gather", "all_gather", (("all_gather", PARAMETERS), ("reduce_scatter", GRADIENTS))),
        ("join", "all_gather", (("all_gather", PARAMETERS), ("reduce_scatter", GRADIENTS))),
        ("shift", "shift", (("permute", ACTIVATIONS),)),
        ("all_reduce", "all_reduce", (("all_reduce", ""),)),
        ("to_varying", "to_varying", ()),
    ]


def test_names_are_those_of_the_grid():
    assert NAMES.keys() == set(FOLDERS.values())
    for strategy in LESSONS:
        for source in sources.read_sources(strategy, list(FOLDERS)):
            assert source.summary.endswith("."), source.path


def test_what_cannot_be_a_lesson_is_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for options, said in {
        ("--results", str(tmp_path / "empty")): "has no outcome.json",
        ("--results", str(tmp_path), "--run_dir", "other"): "has no effect",
        ("--output", str(tmp_path / "page.pdf")): "end it in one of .html",
    }.items():
        assert main(["lesson", "fully_sharded", *options]) == 2
        assert said in capsys.readouterr().err


def test_lesson_of_a_real_run(shardpair, grid, tmp_path):
    run = grid.run("fsdp")
    done = shardpair("lesson", "fully_sharded", "--results", str(run), "--output", "page.html")
    assert done.returncode == 0, done.stderr
    assert "lesson: page.html" in done.stdout
    page = (tmp_path / "page.html").read_text()
    require_alone(page)
    assert "has changed since the run" not in page
    records = {engine: read_record(run / engine) for engine in FOLDERS}
    for engine in COMPILED:
        record = records[engine]
        assert record.instructions
        keys = {(one.kind, one.axis, one.purpose) for one in record.ledger.rows}
        for key in keys:
            own = [one for one in record.instructions if (one.kind, one.axis, one.purpose) == key]
            rows = [one for one in record.ledger.rows if (one.kind, one.axis, one.purpose) == key]
            for figure in ("calls", "bytes"):
                totals = [sum(getattr(one, figure) for one in found) for found in (own, rows)]
                assert totals[0] == totals[1], (engine, key, figure)
        for one in record.instructions:
            assert one.stack, one
            assert all((source_root() / place.file).is_file() for place in one.stack)
            assert re.search(r"f64\[|s64\[|pred\[", one.result)
            assert one.groups == "{{0,1}}"
    assert all(records[engine].instructions is None for engine in FOLDERS if engine not in COMPILED)
    manual = "jax-manual"
    for kind, purpose in ROWS["fully_sharded"]:
        (cell,) = re.findall(
            rf'<td id="row-{kind}-dp_shard-{purpose}-0-{manual}">(.*?)</td>', page, re.DOTALL
        )
        lines = [int(line) for line in re.findall(rf'href="#{manual}-L(\d+)"', cell)]
        text = (ROOT / source_file(manual, "fully_sharded")).read_text().splitlines()
        assert any(f"collectives.{kind}" in text[line - 1] for line in lines)
