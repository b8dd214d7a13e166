"""Hostile input: one line says what is wrong, at once; never a traceback, never a hang."""

import contextlib
import math
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from compare.cli import main
from compare.execute import launch, paths
from compare.flags import arguments
from compare.numerics.data import open_corpus
from compare.spec.experiment import (
    MAX_FILE_BYTES,
    Data,
    Experiment,
    ExperimentError,
    Layout,
    Model,
    Optimizer,
    Train,
    parse,
    revalidate,
)

LONG = "n" * 300
NOT_UTF8 = "caf\udce9"
SMALL = Experiment(model=Model(n_layer=1, n_head=2, n_embd=8, block_size=8))


@pytest.fixture
def no_engine(monkeypatch):
    """Starting an engine would be a failure of the test."""

    def refuse(request, *arguments, **keywords):
        pytest.fail(f"an engine was started: {request.engine}")

    monkeypatch.setattr("compare.studies.paired_run.launch", refuse)


@pytest.fixture
def folder(tmp_path, monkeypatch, no_engine):
    """A working folder with what people point at by mistake."""
    monkeypatch.chdir(tmp_path)
    for name in ("fifo", "fifo.bin", "fifo.toml"):
        os.mkfifo(name)
    for name in ("empty_folder", "folder.toml", "folder.bin", "nested/train.bin", "other/outcome.json"):
        Path(name).mkdir(parents=True)
    Path("loop").symlink_to("loop")
    Path("dangling").symlink_to("nowhere")
    Path("mem.py").symlink_to("/proc/self/mem")  # a file that opens, and cannot be read
    Path("file").write_text("")
    Path("text.txt").write_text("x" * 10_000)
    Path("bad_val").mkdir()
    np.zeros(5000, "<u2").tofile("bad_val/train.bin")
    np.full(5000, 300, "<u2").tofile("bad_val/val.bin")
    ids = np.arange(5000) % 250
    ids.astype("<u4").tofile("uint32.bin")
    ids.astype("<i8").tofile("int64.bin")
    np.save("saved.npy", ids)
    Path("binary.toml").write_bytes(bytes(range(256)))
    Path("long.toml").write_text(".".join("a" * 100_000) + " = 1")
    Path("deep.toml").write_text("x = " + "[" * 100_000)
    Path("nested.toml").write_text("x = " + "[" * (MAX_FILE_BYTES - 10))
    Path("digits.toml").write_text("[model]\nn_layer = " + "9" * 5000)
    Path("inf.toml").write_text("[optimizer]\nlearning_rate = inf\n")
    Path("key.toml").write_text(f"[model]\n{'k' * 16_000} = 1\n")
    Path("word.toml").write_text(f"[layout]\nremat = '{'k' * 16_000}'\n")
    Path("null.toml").write_text('[data]\nsource = "a\\u0000b"\n')
    Path("table.toml").write_text("model = 3\n")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        # Files that are none.
        (["run", "fifo.toml"], "fifo.toml is a named pipe (FIFO), not a file"),
        (["run", "folder.toml"], "folder.toml is a folder, not a file"),
        (["run", "/dev/zero"], "/dev/zero is a device, not a file"),
        (["run", "loop"], "loop cannot be read (Too many levels of symbolic links)"),
        (["run", "dangling"], "dangling is a link to nothing"),
        (["run", "/proc/self/mem"], "/proc/self/mem cannot be read (Input/output error)"),
        (["run", "mem.py"], "mem.py cannot be read (Input/output error)"),
        (["run", "--data.source", "/proc/self/mem"], "/proc/self/mem cannot be read (Input/output error)"),
        (["run", ""], "the name of the experiment is empty"),
        (["run", LONG], "cannot be read (File name too long)"),
        (["run", "a\nb"], r"a\nb: no such file"),
        (["run", "binary.toml"], "binary.toml: 'utf-8' codec can't decode"),
        (["run", "long.toml"], f"long.toml: longer than {MAX_FILE_BYTES} bytes"),
        (["run", "deep.toml"], f"deep.toml: longer than {MAX_FILE_BYTES} bytes"),
        (["run", "nested.toml"], "nested.toml: nested too deeply"),
        (["run", "digits.toml"], "digits.toml: Exceeds the limit (4300 digits)"),
        (["run", "inf.toml"], "inf.toml: optimizer.learning_rate = inf must be a finite number"),
        (["run", "table.toml"], "table.toml: model = 3 must be a table of fields"),
        (["run", "key.toml"], f"key.toml: [model] has no field {'k' * 60}..."),
        (["run", "word.toml"], f"word.toml: layout.remat = \"{'k' * 60}...\" must be one of auto,"),
        (["run", "null.toml"], r"a\x00b is not a path"),
        (["run", "--data.source", "fifo"], "fifo is a named pipe (FIFO), not a file"),
        (["run", "--data.source", "fifo.bin"], "fifo.bin is a named pipe (FIFO), not a file"),
        (["run", "--data.source", "/dev/zero"], "/dev/zero is a device, not a file"),
        (["run", "--data.source", "empty_folder"], "empty_folder is a folder without train.bin"),
        (["run", "--data.source", "folder.bin"], "folder.bin is a folder without train.bin"),
        (["run", "--data.source", "nested"], "nested/train.bin is a folder, not a file"),
        (["run", "--data.source", ""], "data.source is empty"),
        (["run", "--data.source", "file/x"], "file/x does not exist: a part of this path is a file"),
        (["run", "--data.source", "loop"], "loop cannot be read"),
        (["run", "--data.source", LONG], "cannot be read (File name too long)"),
        (["run", "--data.source", "\x1b[31mred"], r"\x1b[31mred does not exist"),
        # Data that does not fit.
        (["run", "--data.source", "uint32.bin"], "uint32.bin holds 32- or 64-bit tokens"),
        (["run", "--data.source", "int64.bin"], "int64.bin holds 32- or 64-bit tokens"),
        (["run", "--data.source", "saved.npy"], "saved.npy is a file of numpy.save"),
        (["run", "--data.source", "bad_val"], "bad_val/val.bin holds token 300, beyond model.vocab"),
        (["run", "--data.source", "text.txt", "--model.vocab_size", "9"], "text.txt holds token 120, beyond"),
        # Names.
        (["run", NOT_UTF8], r"caf\udce9 is not UTF-8"),
        (["run", "--data.source", NOT_UTF8], r"caf\udce9 is not UTF-8"),
        (["run", "--run_dir", NOT_UTF8], r"caf\udce9 is not UTF-8"),
        (["report", NOT_UTF8], r"caf\udce9 is not UTF-8"),
        (["sample", "somewhere", "--prompt", NOT_UTF8], r"caf\udce9 is not UTF-8: write it so, or rename"),
        (["run", "--run_dir", LONG], "cannot be created (File name too long)"),
        (["run", "--run_dir", "file"], "file exists already"),
        (["run", "--run_dir", "fifo"], "fifo exists already"),
        (["report", LONG], "File name too long"),
        (["report", "fifo"], "fifo has no outcome.json"),
        (["report", "other"], "other has no outcome.json"),
        (["report", "[/x]"], "[/x] has no outcome.json"),
        (["run", "--cache_dir", "file"], "--cache_dir file cannot be written"),
        (["run", "--cache_dir", LONG], "cannot be written"),
        (["run", "--jax_python", "/nosuch"], "--jax_python /nosuch: no such program"),
        (["run", "--torch_python", ""], "--torch_python : no such program"),
        (["matrix", "--output", "empty_folder"], "--output empty_folder: this is a folder"),
        (["matrix", "--output", "/proc/x"], "--output /proc/x: cannot be written"),
        # Numbers.
        (["run", "--model.n_layer", "1000000"], "model.n_layer = 1000000 must be at most 10000"),
        (["run", "--model.n_layer", "0"], "model.n_layer = 0 must be at least 1"),
        (["run", "--model.n_embd", "9" * 26], f"model.n_embd = {'9' * 26} must be at most"),
        (["run", "--train.max_iters", str(2**31)], f"train.max_iters = {2**31} must be at most"),
        (["run", "--train.seed", "-1"], "train.seed = -1 must be at least 0"),
        (["run", "--train.seed", str(2**63)], f"train.seed = {2**63} must be at most"),
        (["run", "--train.seed", str(2**128)], f"train.seed = {2**128} must be at most"),
        (["run", "--model.norm_eps", "1e400"], "model.norm_eps = inf must be a finite number"),
        (["run", "--layout.bucket_mb", "1e300"], "layout.bucket_mb = 1e+300 must be at most"),
        (["run", "--optimizer.learning_rate", "1e39"], "learning_rate = 1e+39 is infinite in float32"),
        (["run", "--timeout_s", "nan"], "--timeout_s nan must be more than 0 and at most"),
        (["run", "--timeout_s", "inf"], "--timeout_s inf must be more than 0 and at most"),
        (["run", "--timeout_s", "1e400"], "--timeout_s inf must be more than 0 and at most"),
        (["run", "--timeout_s", "-1"], "--timeout_s -1.0 must be more than 0 and at most"),
        (["run", "--model.bias", "maybe"], "maybe: no flag takes this (a switch is --model.bias"),
        # More than a machine has.
        (["run", "--train.batch_size", "1000000000"], "jax-compiler would need 1.28 TB ("),
        (["run", "--train.gradient_accumulation_steps", "2147483647"], "of one batch), and this machine has"),
        (["run", "--model.block_size", "1000000000"], "of parameters + "),
        (["run", "--model.vocab_size", "1000000000"], "1.54 TB of optimizer state"),
        (["run", "--model.n_embd", "1000000000"], "jax-compiler would need 1.15e+03 EB ("),
        (["run", "--layout.pp", "100000", "--model.n_layer", "100000"], "model.n_layer = 100000 must be at"),
        (["run", "--layout.dp_replicate", "65", "--train.batch_size", "65"], "the layout needs 65 devices"),
        # What would have no effect.
        (["run", "--devices", "2"], "--devices 2 without --preset has no effect"),
        (["run", "--preset", "ddp", "--devices", "0"], "--devices 0 must be at least 1"),
        (["check", "--layout.tp", "2"], "--layout.tp 2 has no effect: check has layouts of its own"),
        (["check", "--layout.gradient_sync", "flat"], "--layout.gradient_sync flat has no effect"),
        (["faults", "--layout.dp_replicate", "4"], "--layout.dp_replicate 4 has no effect"),
        (["faults", "--devices", "2", "--names", "stale_tied_copy"], "--devices 2 has no effect on stale"),
        (["matrix", "--layout.tp", "2", "--layouts", "ddp"], "--layout.tp 2 has no effect: --layouts"),
    ],
    ids=lambda value: ascii(" ".join(value))[1:60] if isinstance(value, list) else "",
)  # fmt: skip
def test_refused_in_one_line(folder, capsys, arguments, says):
    before = sorted(folder.rglob("*"))
    for json in [[], ["--json"]]:
        assert main([*arguments, *json]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("shardpair: error: ")
        assert output.err.count("\n") == 1
        assert says in output.err
        assert output.err[:-1].isprintable()
    assert [path for path in sorted(folder.rglob("*")) if path.name != "runs"] == before


FLOATS = [
    (section, field.name)
    for section, fields in (("model", Model), ("optimizer", Optimizer), ("layout", Layout))
    for field in msgspec.structs.fields(fields)
    if isinstance(field.default, float)
]


@pytest.mark.parametrize(("section", "key"), FLOATS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_float_may_be_infinite_or_no_number(section, key, value):
    assert len(FLOATS) >= 11
    with pytest.raises(ExperimentError, match=rf"{section}\.{key} = {value} must be a finite number"):
        parse(f"[{section}]\n{key} = {value}\n")
    edited = msgspec.structs.replace(getattr(SMALL, section), **{key: value})
    with pytest.raises(ExperimentError, match="must be a finite number"):
        revalidate(msgspec.structs.replace(SMALL, **{section: edited}))


def test_the_largest_seed_is_good_for_weights_data_and_files():
    largest = msgspec.structs.replace(SMALL, train=Train(seed=2**63 - 1), data=Data(source="synthetic"))
    assert revalidate(largest) == largest
    open_corpus(largest).batch(largest, 0)
    assert msgspec.json.decode(msgspec.json.encode(largest), type=Experiment) == largest


def test_a_file_that_may_not_be_read(folder, capsys, monkeypatch):
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "text.txt" not in str(path) and allowed(path, mode))
    assert main(["run", "--data.source", "text.txt"]) == 2
    assert "text.txt may not be read (permission denied)" in capsys.readouterr().err
    assert main(["run", "text.txt"]) == 2
    assert "text.txt may not be read (permission denied)" in capsys.readouterr().err


def test_a_cache_that_nobody_asked_for_is_no_reason_to_stop(folder, capsys, monkeypatch):
    monkeypatch.setattr(arguments, "default_cache", lambda: "file/cache")
    spec = arguments.Spec(cache_dir="file/cache")
    assert spec.settings().cache_dir == ""
    assert "compiled programs are not kept: --cache_dir file/cache" in capsys.readouterr().err


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def none(cls):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(paths.Path, "home", classmethod(none))
    assert paths.default_cache() == ""


def test_a_full_disk_is_one_line_and_a_failure(folder, capsys, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(launch.files, "write_atomically", full)
    assert main(["run"]) == 1
    assert capsys.readouterr().err.endswith("stdlib.txt: No space left on device\n")


def test_memory_that_runs_out_is_one_line(folder, capsys, monkeypatch):
    def none(*arguments, **keywords):
        raise MemoryError

    monkeypatch.setattr(launch, "open_corpus", none)
    assert main(["run"]) == 1
    assert "out of memory" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["list"], ["check", "--help"], ["--help"]])
def test_a_folder_that_is_gone(tmp_path, monkeypatch, capsys, no_engine, arguments):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with contextlib.suppress(SystemExit):
        assert main(arguments) == 0
    capsys.readouterr()
    assert main(["run"]) == 2
    assert "the current folder does not exist any more" in capsys.readouterr().err
