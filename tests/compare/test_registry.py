"""Sides and engines are declared once: a third side joins, runs and climbs the ladder without an edit."""

import json
import os
import shutil
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import processes
import pytest
from numpypar.declaration import SIDE as NUMPY
from records import CLIMBED

from compare.spec.engines.engine import Engine, Side
from compare.spec.engines.jax import JAX
from compare.spec.engines.registry import GROUP, OBJECTIONS, REFERENCE, SIDES, STUDIED, read_declarations
from compare.spec.engines.torch import TORCH
from compare.spec.experiment import ExperimentError, Layout

SOURCE = Path(__file__).parents[1] / "support" / "numpypar"
TINY = (
    "--model.n_layer", "2", "--model.n_head", "2", "--model.n_embd", "16", "--model.block_size", "16",
    "--train.max_iters", "3", "--train.batch_size", "4",
)  # fmt: skip


@pytest.fixture
def third_side(tmp_path):
    """A package as pip would install it: its modules, and the entry point that declares it."""
    site = tmp_path / "site"
    shutil.copytree(SOURCE, site / "numpypar")
    information = site / "numpypar-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: numpypar\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[{GROUP}]\nnumpypar = numpypar.declaration:SIDE\n")
    return site


def shardpair(site, folder, *arguments):
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path}
    return processes.run([sys.executable, "-m", "compare", *arguments], cwd=folder, env=environment)


def test_a_third_side_runs_and_passes_the_ladder(third_side, tmp_path):
    done = shardpair(
        third_side, tmp_path, "run", "check", *TINY, "--layout.dp_replicate", "2",
        "--engines", "torch-manual", "numpy-loop", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (verdict,) = json.loads(done.stdout)["verdicts"]
    assert (verdict["reference"], verdict["candidate"]) == ("torch-manual", "numpy-loop")
    assert [rung["rung"] for rung in verdict["rungs"]] == CLIMBED
    assert max(rung["error"] for rung in verdict["rungs"]) <= 1e-10


def test_a_third_side_that_is_wrong_turns_red(third_side, tmp_path):
    model = third_side / "numpypar" / "model.py"
    model.write_text(model.read_text().replace("EPS = 1e-5", "EPS = 1e-6"))
    done = shardpair(third_side, tmp_path, "run", "check", *TINY, "--engines", "torch-manual", "numpy-loop")
    assert done.returncode == 1
    assert "FAIL at loss" in done.stdout


def test_flags_tables_and_refusals_follow_from_the_declaration(third_side, tmp_path):
    listed = json.loads(shardpair(third_side, tmp_path, "list", "--json").stdout)
    (entry,) = (entry for entry in listed["engines"] if entry["name"] == "numpy-loop")
    assert entry["description"] == "a loop over devices in one process"
    assert "--numpy_python" in shardpair(third_side, tmp_path, "run", "--help").stdout
    refused = shardpair(third_side, tmp_path, "run", "check", "--preset", "tp", "--engines", "numpy-loop")
    assert refused.returncode == 2
    assert "numpy-loop has no tensor parallelism" in " ".join(refused.stderr.split())


def test_an_engine_of_the_cpu_alone_refuses_a_gpu():
    (engine,) = NUMPY.engines
    engine.require(Layout())
    with pytest.raises(ExperimentError, match="numpy-loop runs on the CPU only: NumPy knows no other device"):
        engine.require(Layout(), platform="gpu")


def test_a_broken_declaration_is_named_and_the_rest_goes_on(third_side, tmp_path):
    (third_side / "numpypar" / "declaration.py").write_text("raise OSError('the disk\\nis gone')\n")
    done = shardpair(third_side, tmp_path, "list")
    assert done.returncode == 0
    assert "the side numpypar (numpypar.declaration:SIDE) is left out: OSError: the disk is gone" in " ".join(
        done.stderr.split()
    )
    assert "torch-manual" in done.stdout


def test_ours_are_all_there_is_and_one_is_the_reference():
    assert not OBJECTIONS
    assert list(SIDES) == ["jaxpar", "torchpar"]
    assert list(STUDIED) == [
        "jax-compiler",
        "jax-explicit",
        "jax-manual",
        "torch-manual",
        "torch-library",
        "torch-compiler",
    ]
    assert REFERENCE == "torch-manual"


def point(value: object) -> EntryPoint:
    """An entry point that loads this very object."""

    class Loaded(EntryPoint):
        def load(self):
            return value

    return Loaded("other", "other:SIDE", GROUP)


def engine(name: str, side: str, **fields) -> Engine:
    return Engine(name=name, side=side, gradient_sync=("flat",), decides="a test", **fields)


@pytest.mark.parametrize(
    ("side", "says"),
    [
        ("numpypar", "it is a str, and no compare.spec.engines.engine.Side"),
        (
            Side(name="jaxpar", engines=(), python_flag="other_python"),
            "name jaxpar or its flag other_python is",
        ),
        (Side(name="other", engines=(), python_flag="jax_python"), "or its flag jax_python is taken"),
        (
            Side(name="other", engines=(), peers=(engine("plain-jit", "other"),), python_flag="f"),
            "its engine plain-jit has a name that is taken",
        ),
        (
            Side(name="other", python_flag="other_python", engines=(engine("jax-manual", "other"),)),
            "its engine jax-manual has a name that is taken",
        ),
        (
            Side(name="other", python_flag="other_python", engines=(engine("new", "jaxpar"),)),
            "its engine new must have side = other",
        ),
        (
            Side(name="other", python_flag="f", engines=(engine("new", "other", is_reference=True),)),
            "and not be the reference",
        ),
    ],
    ids=["no side", "name", "flag", "peer", "engine", "elsewhere", "reference"],
)
def test_what_does_not_fit_is_left_out_in_words(side, says):
    sides, (objection,) = read_declarations((JAX, TORCH), [point(side)])
    assert list(sides) == ["jaxpar", "torchpar"]
    assert says in objection
