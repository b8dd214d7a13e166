"""Pictures before the code of a lesson: who holds what, collectives on a ring, and the worked number."""

import contextlib
import itertools
import math
import re

import numpy as np
import pytest
from msgspec import structs

from compare.contract.communication import ring_wire_bytes
from compare.judge.closed_forms.memory import KINDS, closed_form, parameters_of_stage
from compare.numerics.optimizer import moment_names
from compare.numerics.parameters import parameter_count, storage_dtype
from compare.present.lesson import holdings, rings, worked
from compare.present.report.bars import KIND_COLOURS
from compare.spec.axes import PP
from compare.spec.engines.engine import Holds
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, load
from compare.studies.lessons import FOLDERS, LESSONS
from compare.studies.presets import PRESETS, spread

BOX = re.compile(r"M[-.\d]+ [-.\d]+h([.\d]+)v([.\d]+)h-[.\d]+z")


def layouts() -> list[tuple[str, Experiment]]:
    """Every engine of the grid under every preset that it expresses."""
    found = []
    for name, preset in PRESETS.items():
        experiment = spread(load("check"), name, 1 if name == "single" else preset.devices)
        for engine in FOLDERS:
            with contextlib.suppress(ExperimentError):
                ENGINES[engine].require_experiment(experiment)
                found.append((engine, experiment))
    return found


def wrong_shares(cases: list[tuple[str, Experiment]]) -> list[str]:
    """Devices whose share of a kind is not that of the closed form of memory."""
    wrong = []
    for engine, experiment in cases:
        expected = closed_form(engine, experiment)
        copies = {"optimizer": len(moment_names(experiment.optimizer))}
        model_bytes = parameter_count(experiment.model) * storage_dtype(experiment).itemsize
        for kind, device in itertools.product(KINDS, range(experiment.layout.devices)):
            share = holdings.share_of(kind, engine, experiment, device)
            held = share * model_bytes * copies.get(kind, 1)
            if held != pytest.approx(expected[kind][device], rel=1e-9):
                wrong.append(f"{engine} {experiment.layout.axes} {kind} {device}")
    return wrong


def test_shares_are_those_of_the_closed_form_of_memory(monkeypatch):
    cases = layouts()
    assert len(cases) > 80
    assert wrong_shares(cases) == []
    late = Holds(sharded_from={"optimizer": 1, "gradients": 3, "parameters": 3})
    engines = {name: structs.replace(engine, holds=late) for name, engine in holdings.ENGINES.items()}
    monkeypatch.setattr(holdings, "ENGINES", engines)
    assert any("gradients" in line for line in wrong_shares(cases))  # of ZeRO-2


def covered(parts: set[holdings.HeldPart]) -> float:
    """The share of a matrix that parts cover, in cells of a grid so fine that they end at its lines."""
    grid = np.zeros((24, 24), bool)
    for part in parts:
        (top, bottom), (left, right) = part.rows, part.columns
        grid[round(24 * top) : round(24 * bottom), round(24 * left) : round(24 * right)] = True
    return grid.mean()


def test_parts_of_all_devices_make_the_whole_and_do_not_overlap():
    for engine, experiment in layouts():
        devices = range(experiment.layout.devices)
        stages = [holdings.coordinates(device, experiment.layout.axes)[PP] for device in devices]
        for kind, rank in itertools.product(KINDS, set(stages)):
            for parameter in parameters_of_stage(engine, experiment, stage=rank):
                parts = {
                    holdings.part_of(parameter, kind, engine, experiment, device)
                    for device in devices
                    if stages[device] == rank
                }
                assert covered(parts) == 1, (engine, experiment.layout, parameter.name)
                assert sum(part.share for part in parts) == pytest.approx(1), (engine, parameter.name)


def test_ranks_share_out_layers_and_rows():
    interleaved = spread(load("check"), "pp_interleaved", 2)
    assert [holdings.layers_of(rank, interleaved) for rank in (0, 1)] == [{0, 2}, {1, 3}]
    hsdp = spread(load("check"), "hsdp", 4)
    assert [holdings.rows_of(device, hsdp) for device in range(4)] == [
        (0, 0.25),
        (0.25, 0.5),
        (0.5, 0.75),
        (0.75, 1),
    ]
    assert {holdings.rows_of(device, spread(load("check"), "tp", 2)) for device in (0, 1)} == {(0, 1)}


def drawn(picture: str, shade: str) -> float:
    """The area of a colour, in boxes of a matrix."""
    (shapes,) = re.findall(rf'<path fill="{shade}" d="([^"]*)"', picture)
    one = holdings.TILE * (holdings.LAYER - 3)
    return sum(float(width) * float(height) for width, height in BOX.findall(shapes)) / one


def test_picture_fills_what_devices_hold():
    """Of check: two embeddings, and four matrices in each of four layers."""
    by_hand = worked.BY_HAND
    for preset, devices, matrices in [("ddp", 2, 36), ("fsdp", 2, 18), ("tp", 2, 19), ("pp_gpipe", 4, 19)]:
        experiment = spread(load("check"), preset, devices)
        picture = holdings.picture(by_hand, experiment)
        for kind in KINDS:
            assert drawn(picture, KIND_COLOURS[kind]) == pytest.approx(matrices, rel=0.01), (preset, kind)
    zero1 = holdings.picture(by_hand, spread(load("check"), "zero1", 2))
    assert [round(drawn(zero1, KIND_COLOURS[kind])) for kind in KINDS] == [36, 36, 18]
    assert "optimizer: 50%" in zero1
    assert "parameters: 100%" in zero1


def test_engines_that_hold_the_same_share_a_picture():
    presets = ("ddp", "fsdp", "tp", "pp_gpipe", "zero2")
    groups = {name: holdings.alike(list(FOLDERS), spread(load("check"), name, 4)) for name in presets}
    assert len(groups["ddp"]) == len(groups["fsdp"]) == len(groups["tp"]) == 1
    assert len(groups["pp_gpipe"]) == 2  # JAX's programs have both ends on every stage
    assert len(groups["zero2"]) == 2  # FSDP2 keeps shards of parameters between steps


def wrong_rings() -> list[str]:
    """Collectives whose result is not their definition, or whose bytes are not the ring's closed form."""
    wrong = []
    for n in (2, 3, 4, 8):
        everybody = frozenset(range(n))
        results = {
            "all_reduce": [[everybody] * n] * n,
            "reduce_scatter": [
                [everybody if place == d else rings.NOTHING for place in range(n)] for d in range(n)
            ],
            "all_gather": [[frozenset({place}) for place in range(n)]] * n,
            "permute": [[frozenset({d - 1}) if d else rings.NOTHING] for d in range(n)],
        }
        assert results.keys() == rings.RINGS.keys()
        for kind, result in results.items():
            ring = rings.RINGS[kind](n)
            pieces = len(ring.states[0][0])
            size = 840 * pieces
            if ring.states[-1] != result or ring.sent * 840 != ring_wire_bytes(kind, size, n):
                wrong.append(f"{kind} on {n}")
    return wrong


def test_rings_end_in_what_a_collective_is_and_send_the_closed_form(monkeypatch):
    assert wrong_rings() == []
    whole = rings.reduce_scatter
    monkeypatch.setitem(rings.RINGS, "all_reduce", lambda n: rings.Ring(whole(n).states, 2 * (n - 1)))
    assert "all_reduce on 4" in wrong_rings()  # a sum that nobody hands on


@pytest.mark.parametrize("kind", rings.RINGS)
def test_picture_of_a_ring_has_a_stripe_for_each_device_s_numbers(kind):
    ring = rings.RINGS[kind](rings.DEVICES)
    stripes = sum(len(piece) for state in ring.states for pieces in state for piece in pieces)
    picture = rings.picture(kind)
    filled = re.findall(r'<path fill="#\w+" d="([^"]*)"', picture)
    assert len(filled) == rings.DEVICES
    assert sum(shapes.count("M") for shapes in filled) == stripes
    assert picture.count(">hop ") == len(ring.states) - 1
    assert str(ring.sent) in rings.caption(kind) or kind == "permute"


def test_worked_number_is_what_the_papers_give():
    """ZeRO's and Megatron's formulas, in bytes on the wire of one of n GPUs, with 2-byte numbers."""
    model, n, rows = worked.MODEL, worked.GPUS, worked.ROWS
    parameters, f = parameter_count(model), (n - 1) / n
    stream = 2 * rows * model.block_size * model.n_embd
    expected = {
        "data_parallel": 2 * f * 2 * parameters,
        "fully_sharded": 3 * f * 2 * parameters,
        "tensor_parallel": 2 * f * stream * (4 * model.n_layer + 2),  # and the embedding's, the head's
        "pipeline_parallel": 2 * stream,
    }
    for strategy, wire in expected.items():
        assert worked.worked(strategy).wire == pytest.approx(wire, rel=1e-3), strategy
    inner = parameters - (model.vocab_size + model.block_size) * model.n_embd
    flops = 6 * (inner + model.vocab_size * model.n_embd)
    flops += 12 * model.n_layer * model.block_size * model.n_embd
    for strategy in LESSONS:
        one = worked.worked(strategy)
        assert one.compute_s == pytest.approx(flops * rows * model.block_size / n / 989.5e12)
        assert one.waits == (7 / 23 if strategy == "pipeline_parallel" else 0)
    assert worked.worked("data_parallel").state == 16 * parameters
    assert worked.worked("fully_sharded").state == 2 * parameters
    assert not worked.worked("data_parallel").fits
    assert worked.worked("tensor_parallel").fits


def test_worked_number_is_derived_in_words():
    (line,) = worked.derivation("data_parallel")
    numbers = 2 * parameter_count(worked.MODEL)
    assert line.startswith(f"all_reduce: {numbers / 1e9:.1f} GB of full tensors x 2 (8 - 1) / 8 = ")
    wire = 1.75 * numbers
    assert f"= {wire / 1e9:.1f} GB on the wire; / 450 GB/s = {wire / 450e6:.1f} ms over NVLink" in line
    assert [text.partition(":")[0] for text in worked.derivation("fully_sharded")] == [
        "reduce_scatter",
        "all_gather",
    ]
    table = worked.table("tensor_parallel")
    assert [row.head.note for row in table.rows] == ["", "", "this lesson", ""]
    assert table.rows[0].cells[0].note == "more than 80 GB"
    even = re.search(r"even at ([\d,]+) tokens", " ".join(worked.when_it_pays("data_parallel")))
    assert even
    tokens = float(even[1].replace(",", ""))
    per_token = worked.worked("data_parallel").compute_s / (worked.ROWS * worked.MODEL.block_size / 8)
    assert math.isclose(tokens * per_token, wire / 450e9, rel_tol=1e-3)
