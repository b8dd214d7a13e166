"""Bad input: one line that names the key or file and what to do, exit code 2, before any process starts."""

import subprocess
import sys

import numpy as np
import pytest

from compare.cli import main
from compare.execute import launch


@pytest.fixture
def no_process(monkeypatch):
    """Starting an engine would be a failure of the test."""

    def refuse(*arguments, **keywords):
        pytest.fail(f"a process was started: {arguments}")

    monkeypatch.setattr(launch.subprocess, "Popen", refuse)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A working folder with the files that people get wrong."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "typo.toml").write_text("[model]\nn_layr = 2\n")
    (tmp_path / "broken.toml").write_text("[model\n")
    (tmp_path / "latin.toml").write_bytes(b'[data]\nsource = "caf\xe9"\n')
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("a few words")
    (tmp_path / "odd.bin").write_bytes(b"x" * 2001)
    (tmp_path / "beyond.bin").write_bytes(np.full(5000, 256, "<u2").tobytes())
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("run nosuch", "nosuch: no such file or named experiment"),
        ("run missing.toml", "missing.toml: no such file"),
        ("run typo.toml", "typo.toml: [model] has no field n_layr (did you mean n_layer?)"),
        ("run broken.toml", "broken.toml:"),
        ("run latin.toml", "latin.toml:"),
        ("run --model.n_layer 0", "model.n_layer"),
        ("run --model.n_head 5", "model.n_head = 5 does not divide model.n_embd = 96"),
        ("run --layout.dp_replicate 3", "train.batch_size = 16 is not divisible by layout.dp_replicate = 3"),
        ("check --devices 3", "train.batch_size = 8 is not divisible by layout.dp_replicate = 3"),
        ("check --devices 0", "--devices 0 must be at least 1"),
        ("run --layout.dp_replicate 128 --train.batch_size 128", "the layout needs 128 devices"),
        (
            "run --layout.gradient_sync overlapped --engines jax-manual",
            "jax-manual offers naive, flat, bucketed",
        ),
        ("run --model.dropout 1.0", "model.dropout"),
        (
            "run --preset single --model.dropout 0.2 --engines nanogpt-loop torch-manual",
            "model.dropout = 0.2: nanogpt-loop drops nothing",
        ),
        ("run --preset nosuch", "--preset nosuch: no such preset"),
        ("run --preset ddp --devices 4 --layout.dp_replicate 8", "contradicts --preset ddp --devices 4"),
        ("run --engines jax-manual jax-manual", "--engines jax-manual: give each engine once"),
        ("run --timeout_s 0", "--timeout_s 0.0 must be more than 0"),
        ("run --train.seed 3 cpu", "give the experiment first: shardpair run cpu"),
        ("run --data.source missing.txt", "missing.txt does not exist"),
        ("run --data.source empty.txt", "empty.txt is empty"),
        ("run --data.source short.txt", "too few for model.block_size = 64"),
        ("run --data.source odd.bin", "odd.bin has an odd number of bytes (2001)"),
        ("run --data.source beyond.bin", "token 256, beyond model.vocab_size = 256"),
        ("run --run_dir taken", "taken exists already"),
        ("run --run_dir file/inside", "file/inside cannot be created"),
        ("report taken", "taken has no outcome.json"),
        ("report taken --picture curve.doc", "--picture curve.doc: end it in one of .png, .svg, .pdf"),
        ("faults --names nosuch", "--names nosuch: no such fault"),
        ("faults --names no_clip no_clip", "--names no_clip: give each fault once"),
        ("faults --devices 1", "--devices 1: most faults show between devices only"),
        ("matrix --layouts nosuch", "--layouts nosuch: no such layout"),
        ("matrix --layouts ddp ddp", "--layouts ddp: give each layout once"),
        ("matrix --studies float16", "--studies float16: no such study"),
        ("matrix --output missing/parity.md", "there is no folder missing"),
        ("matrix --results taken", "--results taken: it has no float64/outcome.json"),
        ("matrix --engines jax-compiler --layouts pp_zero_bubble", "no cell is left: layout.schedule"),
        ("run check --preset tp --devices 4 --model.vocab_size 5", "leaves a rank nothing of model.vocab"),
        ("run --preset tp --devices 3", "layout.tp = 3 does not divide model.n_head = 4"),
        (
            "run check --engines jax-compiler --layout.pp 2 --layout.schedule zero_bubble",
            "jax-compiler has",
        ),
    ],
)
def test_refused_in_one_line(files, no_process, capsys, arguments, says):
    before = sorted(files.rglob("*"))
    assert main(arguments.split()) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("shardpair: error: ")
    assert output.err.count("\n") == 1
    assert says in output.err
    assert [path for path in sorted(files.rglob("*")) if path.name != "runs"] == before


def test_gpu_without_gpu_is_a_missing_environment(files, no_process, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["run", "--platform", "gpu"]) == 3
    assert "no NVIDIA GPU is visible" in capsys.readouterr().err


def test_more_devices_than_gpus(files, no_process, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(launch, "installed_gpus", lambda: 4)
    assert main(["run", "--platform", "gpu", "--layout.dp_replicate", "2"]) == 2
    assert "needs 2 devices and 1 GPUs are visible" in capsys.readouterr().err


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "shardpair run demo --engines jax-manual torch-manual" in text
    assert "Number of transformer blocks (L). (default: 4)" in text  # the demo's own default


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m compare run --help | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert "usage" in done.stdout
    assert done.stderr == ""
