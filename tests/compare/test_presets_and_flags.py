"""A preset sets the degrees; a flag or a file overrides its other settings."""

import json

import pytest

from compare import api
from compare.api.options import study_of
from compare.cli import main, parse
from compare.setup.fitting import fitting
from compare.setup.presets import PRESETS, preset_layout
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import Layout
from tests.support.rows import short

FILES = {
    "plain.toml": "[model]\nn_layer = 4\n",
    "pipeline.toml": "[model]\nn_layer = 4\n[layout]\npp = 2\nmicrobatches = 8\n",
    "sharded.toml": "[layout]\ndp_shard = 2\nzero = 3\nreshard_after_forward = false\nschedule = 'gpipe'\n"
    "gradient_sync = 'naive'\n",
    "wide.toml": "[model]\nn_layer = 4\n[layout]\ndp_replicate = 16\n",
}


@pytest.fixture
def planned(tmp_path, monkeypatch, capsys):
    """Plan of a command line: exit code, the layouts of its cases in words, stderr."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)

    def plan(line: str):
        code = main([*line.split(), "--dry_run", "--json"])
        output = capsys.readouterr()
        return code, json.loads(output.out)["values"] if output.out else {}, output.err

    return plan


FLAGS_WIN = {
    "run plain.toml --preset pp --devices 4 --layout.microbatches 8": {"pp": 4, "microbatches": 8},
    "run plain.toml --preset shard_grad_op --layout.reshard_after_forward": {"reshard_after_forward": True},
    "run plain.toml --preset tp --layout.sequence_parallel": {"tp": 4, "sequence_parallel": True},
    "run plain.toml --preset zero1 --layout.zero 3": {"zero": 3},
    "run plain.toml --preset ddp --layout.microbatches 1": {"microbatches": 1},
    "run sharded.toml --preset pp --layout.schedule 1f1b": {"schedule": "1f1b"},
    "ledger plain.toml --preset pp --devices 2 --layout.microbatches 4": {"microbatches": 4},
}
THE_FILE_WINS = {
    "run pipeline.toml --preset pp --devices 2": {"pp": 2, "microbatches": 8},
    "run plain.toml --preset pp --devices 4": {"pp": 4, "microbatches": 4},
    "run sharded.toml --preset fsdp": {"dp_shard": 4, "reshard_after_forward": False},
    "run sharded.toml --preset ddp": {"dp_replicate": 4, "dp_shard": 1, "zero": 0, "gradient_sync": "naive"},
    "run sharded.toml --preset ddp_flat": {"gradient_sync": "flat"},  # which it is named for
}


@pytest.mark.parametrize("line", FLAGS_WIN | THE_FILE_WINS, ids=short)
def test_flag_or_file_wins(planned, line):
    code, plan, errors = planned(line)
    assert (code, errors) == (0, "")
    expected, layout = (FLAGS_WIN | THE_FILE_WINS)[line], plan["experiment"]["layout"]
    assert {key: layout[key] for key in expected} == expected


OF_SEVERAL = (
    ("sweep plain.toml --presets pp ddp --devices 2 --layout.microbatches 8", "1F1B with 8 microbatches"),
    ("bench plain.toml --presets pp --devices 2 --variants layout.microbatches=8", "with 8 microbatches"),
    ("ledger plain.toml --presets pp fsdp --layout.schedule gpipe", "GPipe"),
    ("sweep sharded.toml --presets zero1 fsdp tp", "optimizer state split over 2"),
    # The layout of the file is none of theirs: it is not asked whether the batch could be spread so.
    ("ledger wide.toml --presets ddp --train.batch_size 8", "data parallel over 4"),
    ("check wide.toml --devices 2 --train.batch_size 6", "data parallel over 2"),
)


@pytest.mark.parametrize(("line", "layouts"), OF_SEVERAL, ids=map(short, OF_SEVERAL))
def test_flag_wins_over_several_presets(planned, line, layouts):
    code, plan, errors = planned(line)
    assert code == 0, errors
    assert any(layouts in case["layout"] for case in plan["cases"])


CANNOT_WIN = (
    (
        "run plain.toml --preset fsdp_tp --layout.dp_replicate 2",
        "--layout.dp_replicate 2 contradicts the preset fsdp_tp",
    ),
    (
        "run plain.toml --preset ddp --layout.microbatches 8",
        "--layout.microbatches 8 contradicts the preset ddp",
    ),
    (
        "sweep plain.toml --presets ddp --layout.tp 2",
        "--layout.tp 2 contradicts the preset ddp: leave one of them out",
    ),
    ("bench plain.toml --presets pp --variants layout.pp=2", "layout.pp contradicts --presets pp"),
    ("run --preset fsdp_tp --devices 3", "preset fsdp_tp takes a multiple of 2 from 4 on"),
    ("run --preset hsdp_tp --devices 4", "preset hsdp_tp takes a multiple of 4 from 8 on"),
)


@pytest.mark.parametrize(("line", "words"), CANNOT_WIN, ids=map(short, CANNOT_WIN))
def test_contradiction_is_rejected(planned, line, words):
    code, _, errors = planned(line)
    assert (code, errors.count("\n")) == (2, 1)
    assert words in errors


def test_python_settings_win_over_preset():
    built = api.experiment("cpu", layout={"pp": 2, "microbatches": 4})
    command = study_of("run", built, {"preset": "pp", "devices": 2})
    assert command.resolve().layout.microbatches == 4


@pytest.mark.parametrize("name", PRESETS)
def test_preset_runs_on_demo(name):
    preset = PRESETS[name]
    pure = preset_layout(Layout(), name)
    assert preset_layout(Layout(zero=2, gradient_sync="flat"), name).axes == pure.axes
    command = parse(["run", "experts" if preset.ranks_per_ep else "demo", "--preset", name])
    experiment = command.resolve()
    assert experiment.layout.devices == pure.devices
    assert fitting(list(STUDIED), experiment)[0]


def test_preset_drops_settings_without_effect():
    other = Layout(schedule="gpipe", microbatches=7, zero=2, sequence_parallel=True, context="ring")
    assert preset_layout(other, "ddp") == preset_layout(Layout(), "ddp")
    assert preset_layout(other, "single") == Layout()
    assert preset_layout(other, "fsdp").zero == 3
