"""Every layout of each engine in float64, with dropout, against one device; and the grid itself."""

import json

import pytest

from compare.commands.check import Check
from compare.setup.presets import PRESETS
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import load
from compare.theory.memory import bytes_held, excess
from tests.support import grid as grids
from tests.support.bounds import AT_REST, assert_bounded
from tests.support.grid import DEVICES, SOME
from tests.support.records import climbed


@pytest.mark.parametrize("preset", [*DEVICES, *SOME])
def test_layouts_equal_one_device(grid, preset):
    for engine, record in grid.records(preset).items():
        verdict = climbed(grid.reference(preset), record)
        assert [rung.rung for rung in verdict.rungs] == grids.CLIMBED
        assert max(rung.error for rung in verdict.rungs) <= 1e-10, (engine, verdict.sentence())
        held = record.manifest.resident_bytes
        assert abs(excess(held, bytes_held(engine, record.manifest.experiment))) <= AT_REST, engine
        if not (
            engine == "torch-manual" and "tp_sp" in preset
        ):  # whose loss holds a fourth copy of its logits
            assert_bounded(record)


def test_interleaved_schedule_of_pytorch(shardpair):
    asked = ("check", "--engines", "torch-library", "--presets", "pp_interleaved", "--model.dropout", "0.2")
    done = shardpair(*asked, "--train.max_iters", "3", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (verdict,) = json.loads(done.stdout)["verdicts"]
    assert max(rung["error"] for rung in verdict["rungs"]) <= 1e-10


def test_every_cell_is_a_case_or_has_a_reason():
    cases, left_out = Check(presets=("all",), variants=("all",)).cases(load("check"))
    layouts = [name for name, preset in PRESETS.items() if preset.axis and not preset.ranks_per_ep]
    names = {f"{engine}.{layout}" for engine in STUDIED for layout in layouts}
    assert {name for name in (*cases, *left_out) if "," not in name and "reference" not in name} == names
    assert not cases.keys() & left_out.keys()
    references = [name for name, case in cases.items() if not case.against]
    assert references == ["reference", "reference.2", "reference.3", "reference.4"]
    assert len([case for case in cases.values() if case.against == "reference.3"]) > 100
    assert cases["jax-compiler.ddp_pp"].experiment.layout.schedule == "gpipe"  # it has no 1F1B
