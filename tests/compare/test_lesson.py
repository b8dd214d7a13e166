"""`shardpair lesson`: who holds what, rings; pages whose links lead to lines and rows."""

import contextlib
import html
import itertools
import re
from pathlib import Path

import msgspec
import pytest

from compare.commands.ledger.chips import Program
from compare.commands.lesson import holdings, rings
from compare.commands.lesson.listing import read_file
from compare.commands.lesson.page import write_lesson
from compare.contract.chips import ChipProgram
from compare.contract.communication import GRADIENTS, PARAMETERS, Communication, ring_wire_bytes
from compare.contract.ledger import Ledger
from compare.contract.record import read_record
from compare.numerics.optimizer import moment_names
from compare.numerics.parameters import parameter_count, storage_dtype
from compare.setup.lessons import FOLDERS, LESSONS, SHARED_FILES, source_files
from compare.setup.presets import PRESETS, spread
from compare.show.figures import svg
from compare.spec.axes import DP_SHARD
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, load
from compare.theory.memory import KINDS, bytes_at_rest
from tests.support.outline import require_alone
from tests.support.records import make_run
from tests.walls.test_import_walls import imports

ROOT = Path(__file__).parents[2]
STRATEGY = "fully_sharded"
SENT = (("all_gather", PARAMETERS), ("reduce_scatter", GRADIENTS))


def layouts() -> list[tuple[str, Experiment]]:
    """Every engine of the grid under every preset that it expresses."""
    found = []
    for name, preset in PRESETS.items():
        named = load("experts" if preset.ranks_per_ep else "check")
        experiment = spread(named, name)
        for engine in FOLDERS:
            with contextlib.suppress(ExperimentError):
                ENGINES[engine].require_experiment(experiment)
                found.append((engine, experiment))
    return found


def wrong_shares(cases: list[tuple[str, Experiment]]) -> list[str]:
    """Devices whose share of a kind differs from the closed form of memory."""
    wrong = []
    for engine, experiment in cases:
        expected = bytes_at_rest(engine, experiment)
        copies = {"optimizer": len(moment_names(experiment.optimizer))}
        model_bytes = parameter_count(experiment.model) * storage_dtype(experiment).itemsize
        for kind, device in itertools.product(KINDS, range(experiment.layout.devices)):
            share = holdings.share_of(kind, engine, experiment, device)
            held = share * model_bytes * copies.get(kind, 1)
            if held != pytest.approx(expected[kind][device], rel=1e-9):
                wrong.append(f"{engine} {experiment.layout.axes} {kind} {device}")
    return wrong


def test_positions_cover_each_sequence_once():
    for name, first in (("cp", [(0, 0.125), (0.125, 0.25)]), ("cp_ring", [(0, 0.125), (0.875, 1)])):
        experiment = spread(load("check"), name, 4)
        held = [holdings.positions_of(device, experiment) for device in range(4)]
        assert held[0] == first
        assert sorted(itertools.chain(*held)) == [(part / 8, (part + 1) / 8) for part in range(8)]


def test_shares_equal_closed_form_of_memory(monkeypatch):
    cases = layouts()
    assert len(cases) > 80
    assert wrong_shares(cases) == []
    late = {"optimizer": 1, "gradients": 3, "parameters": 3}
    engines = {
        name: msgspec.structs.replace(one, sharded_from=late) for name, one in holdings.ENGINES.items()
    }
    monkeypatch.setattr(holdings, "ENGINES", engines)
    assert any("gradients" in line for line in wrong_shares(cases))  # of ZeRO-2


def wrong_rings() -> list[str]:
    """Collectives whose result is not their definition, or whose bytes are not the ring's closed form."""
    wrong = []
    for n in (2, 3, 4, 8):
        everybody, nothing = frozenset(range(n)), rings.NOTHING
        results = {
            "all_reduce": [[everybody] * n] * n,
            "reduce_scatter": [[everybody if i == d else nothing for i in range(n)] for d in range(n)],
            "all_gather": [[frozenset({place}) for place in range(n)]] * n,
            "all_to_all": [[frozenset({place}) for place in range(n)]] * n,
            "permute": [[frozenset({d - 1}) if d else nothing] for d in range(n)],
        }
        assert results.keys() == rings.RINGS.keys()
        for kind, result in results.items():
            ring = rings.RINGS[kind](n)
            size = 840 * len(ring.states[0][0])
            if ring.states[-1] != result or ring.sent * 840 != ring_wire_bytes(kind, size, n):
                wrong.append(f"{kind} on {n}")
    return wrong


def test_rings_equal_collectives(monkeypatch):
    assert wrong_rings() == []
    for kind in rings.RINGS:
        assert svg(rings.figure(kind, ["x"], 9)).count("hop ") >= len(rings.RINGS[kind](4).states) - 1
    scattered = rings.reduce_scatter
    monkeypatch.setitem(rings.RINGS, "all_reduce", lambda n: rings.Ring(scattered(n).states, 2 * (n - 1)))
    assert "all_reduce on 4" in wrong_rings()  # a sum that is not passed on


def made_by_hand(folder: Path, *places: str):
    """A written run of two engines; the ledger of torch-manual has source lines, for each of `SENT`."""
    outcome = make_run(folder, spread(load("check"), "fsdp", 2), names=["jax-manual", "torch-manual"])
    rows = [
        Communication(
            kind=kind, axis=DP_SHARD, calls=2, bytes=4000, wire_bytes=4000, purpose=purpose, source=place
        )
        for (kind, purpose), place in zip(SENT, places, strict=False)
    ]
    records = {name: read_record(folder / name) for name in outcome.finished}
    records["torch-manual"] = msgspec.structs.replace(records["torch-manual"], ledger=Ledger(rows=rows))
    return outcome, records


def text_of(page: str, path: str) -> str:
    """The text of a source file on a page, without line numbers."""
    (code,) = re.findall(rf'<div class="code"[^>]* aria-label="{path}"[^>]*>(.*?)</div>', page, re.DOTALL)
    code = re.sub(r"<summary>.*?</summary>|<a href[^>]*>\d+</a>", "", code, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", "", code))


@pytest.mark.usefixtures("with_pictures")
def test_lines_lead_to_rows_and_rows_to_lines(tmp_path):
    number, other = 125, "sharded_optimizer.py"
    outcome, records = made_by_hand(tmp_path / "run", f"{STRATEGY}.py:{number} (f)", f"{other}:60 (g)")
    write_lesson(STRATEGY, outcome, records, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    outline = require_alone(page)
    assert str(ROOT) not in page
    assert "Who holds what: jax-manual, torch-manual" in outline.pictures
    assert "reduce_scatter on 2 devices, hop by hop" in outline.pictures
    assert set(re.findall('href="#([^"]*)"', page)) <= set(re.findall(' id="([^"]*)"', page))
    lines = [f"{STRATEGY}-{number}", "sharded_optimizer-60"]
    for (kind, purpose), line, words in zip(SENT, lines, (f"line {number}", f"{other}:60"), strict=True):
        (row,) = re.findall(rf'<tr id="(row-{kind}-{DP_SHARD}-{purpose})">.*?</tr>', page, re.DOTALL)
        link = f'<a href="#torch-manual-{line}">{words}</a>'
        assert f'<a href="#{row}">{kind} {purpose}</a> {link}' in page
        (cells,) = re.findall(rf'<tr id="{row}">(.*?)</tr>', page, re.DOTALL)
        assert link in cells
        assert f'class="line hll" id="torch-manual-{line}"' in page
    for path in (path for engine in outcome.finished for path in source_files(engine, STRATEGY)):
        assert text_of(page, path).split() == (ROOT / path).read_text().split()


@pytest.mark.parametrize(
    ("strategy", "sends"), [("tensor_parallel", "all_reduce_copy"), ("pipeline_parallel", "way.start_send")]
)
def test_files_start_at_the_first_line_that_sends(strategy, sends):
    path = source_files("torch-manual", strategy)[0]
    text = (ROOT / path).read_text().splitlines()
    sending = next(number for number, line in enumerate(text, 1) if sends in line)
    head, *others = read_file(path, "torch-manual", {sending}, is_main=True).blocks
    shown = "".join(block.html for block in itertools.takewhile(lambda block: block.is_open, others))
    assert not head.is_open
    assert head.title.startswith("lines 1 to ")
    assert "docstring and imports" in head.title
    assert shown.count('class="line') < 40
    assert f'class="line hll" id="torch-manual-{strategy}-{sending}"' in shown


def test_files_without_a_line_that_sends():
    path = source_files("torch-manual", "tensor_parallel")[0]
    assert not read_file(path, "torch-manual", (), is_main=False).is_open
    quiet = read_file(source_files("torch-manual", "tensor_parallel")[1], "torch-manual", (), is_main=True)
    assert [block.is_open for block in quiet.blocks] == [False, True]  # no line sends: all but the head


def test_every_file_of_an_engine_is_in_a_lesson():
    """Also those that a strategy's file imports from the engine's folder."""
    for engine, folder in FOLDERS.items():
        files = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).glob("*.py")}
        shared = {f"{folder}/{name}" for name in SHARED_FILES}
        lessons = {strategy: source_files(engine, strategy) for strategy in LESSONS}
        assert files - shared <= {path for paths in lessons.values() for path in paths}, engine
        for strategy, paths in lessons.items():
            assert all((ROOT / path).is_file() for path in paths)
            main = {f"{name.replace('.', '/')}.py" for name in imports(ROOT / paths[0])}
            assert main & files - shared <= set(paths), (engine, strategy)


def test_headline_is_one_line(tmp_path):
    outcome, records = made_by_hand(tmp_path / "run", "")
    assert outcome.passed
    verdicts = [
        msgspec.structs.replace(one, uncompared={"bytes sent": "no closed form; yet"})
        for one in outcome.verdicts
    ]
    outcome = msgspec.structs.replace(outcome, verdicts=verdicts)
    write_lesson(STRATEGY, outcome, records, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    (headline,) = re.findall('<p class="verdict pass">(.*?)</p>', page)
    assert "not compared" not in headline
    assert "<li>not compared: bytes sent (no closed form; yet).</li>" in page


def test_chip_has_a_column(tmp_path):
    outcome, records = made_by_hand(tmp_path / "run", "")
    gather = Communication(
        kind="all_gather",
        axis=DP_SHARD,
        calls=28,
        bytes=12_600_000,
        wire_bytes=0,
        purpose="parameters",
        dtype="bf16",
        is_async=True,
    )
    facts = {"state_bytes": 1, "peak_bytes": 1, "compile_s": 1.0, "is_cached": False, "device": "TPU"}
    program = Program(
        case="jax-manual",
        engine="jax-manual",
        chip="v5e:2x4",
        experiment=outcome.experiment,
        program=ChipProgram(ledger=Ledger(rows=[gather]), versions={}, **facts),
    )
    write_lesson(STRATEGY, outcome, records, tmp_path / "page.html", [program])
    page = (tmp_path / "page.html").read_text()
    assert '<th scope="col">jax-manual on v5e:2x4</th>' in page
    (row,) = re.findall(rf'<tr id="row-all_gather-{DP_SHARD}-parameters">(.*?)</tr>', page, re.DOTALL)
    assert row.endswith("<td>12.6 MB bf16 in 28; 28 asynchronous</td>")
    assert page.count("28 asynchronous") == 1


def test_ring_has_the_devices_of_the_run():
    assert rings.figure("all_reduce", ["x"], 2).title == "all_reduce on 2 devices, hop by hop"
    many = rings.figure("all_reduce", ["x"], 8)
    assert many.title == "all_reduce on 4 devices, hop by hop"
    assert "The run has 8 devices in a group." in many.caption


def test_summary_shows_code():
    path = source_files("torch-compiler", STRATEGY)[0]
    assert "<code>Shard(0)</code>" in read_file(path, "torch-compiler", (), is_main=True).summary


def test_lesson_of_a_real_run(shardpair, grid, tmp_path):
    run = grid.run("fsdp")
    done = shardpair("lesson", STRATEGY, "--results", str(run), "--output", "page.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    for engine in FOLDERS:  # XLA has the source line of each collective
        rows = read_record(run / engine).ledger.rows
        assert any(row.places for row in rows) == FOLDERS[engine].startswith("jaxpar/")
    for engine in ("jax-manual", "torch-manual"):
        for kind, purpose in SENT:
            (row,) = re.findall(rf'<tr id="row-{kind}-{DP_SHARD}-{purpose}">(.*?)</tr>', page, re.DOTALL)
            assert f'href="#{engine}-' in row


def test_reduction_of_gradients_is_no_forward(grid):
    for engine in ("torch-manual", "torch-library", "torch-compiler"):
        for device in read_record(grid.run("fsdp") / engine).memory.devices:
            phases = [phase for _, phase in device.curve.marks]
            assert phases == ["forward", "backward"] * 2 + ["update"], engine
