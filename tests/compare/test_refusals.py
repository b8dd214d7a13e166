"""Bad input: the key, flag or file and what to do, exit code 2, before any process starts; never a hang."""

import bz2
import gzip
import lzma
import math
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

import compare
from compare.__main__ import main as command
from compare.checkpoint.description import CHECKPOINTS, DESCRIPTION
from compare.cli import COMMANDS, HELP, flags_in, main, parse
from compare.execute import launch
from compare.execute.folders import default_cache
from compare.run.study import Study
from compare.spec.experiment import (
    MAX_FILE_BYTES,
    Experiment,
    ExperimentError,
)
from compare.spec.experiment import (
    parse as parse_toml,
)
from tests.support.rows import short

GATHER = "--preset fsdp --devices 2 --precision.dtype bfloat16 --precision.gather products"
REFUSED = {
    # Unknown words
    "": "give a command, such as shardpair run",
    "runn": "runn: no such command",
    "run --model.bias true": "unexpected argument true",
    "demo": "demo is an experiment: shardpair run demo",
    "my.toml": "my.toml is an experiment: shardpair run my.toml",
    "fsdp": "fsdp is a preset: shardpair run --preset fsdp",
    "train": "no such command; did you mean run?",
    "run --quiet my.toml --json": "give the experiment first: shardpair run my.toml --quiet --json",
    "run gpt2": "did you mean gpt2-124m or gpt2-350m?",
    "run --preset zero3": "did you mean fsdp?",
    "run --preset FSDP": "did you mean fsdp?",
    "sweep --presets ddp2": "did you mean ddp?",
    "sweep --presets ddp,tp": "separate presets by spaces",
    "faults --names no_clp": "did you mean no_clip?",
    # Flags
    "run --model.n_layer": "--model.n_layer: give a value",
    "run --model.n_layr 2": "--model.n_layr: did you mean --model.n_layer?",
    "run --max_itres 3": "--max_itres: did you mean --train.max_iters?",
    "run --lr=3": "--lr: did you mean --optimizer.learning_rate?",
    "run config.py --max_itres=10": "--max_itres: did you mean --train.max_iters?",
    "run --rounds 3": "--rounds: it belongs to bench; leave it out of shardpair run",
    "plan --preset tp": "--preset: it belongs to run, resume, profile and others; leave it out of shardpair",
    "doctor --nonsense": "--nonsense: no such flag; see shardpair doctor --help",
    "run -n 3": "-n: no such flag",
    "run --no_devices": "--no_devices: did you mean --devices?",
    "run --devices 2.0": "--devices 2.0: give a whole number",
    "run --timeout_s soon": "--timeout_s soon: give a number",
    "run --launcher slrm": "--launcher slrm: did you mean slurm?",
    "run --layout.zero 7": "--layout.zero 7: give 0, 1, 2 or 3",
    "run --engines a,b": "--engines a,b: separate engines by spaces",
    "run --engines torch": "did you mean torch-manual or torch-library or torch-compiler?",
    "run --layout.chunks 0": "layout.chunks = 0: give 1 or more",
    "sample --out_dir=out": "--out_dir: give it without a flag: shardpair sample SOURCE",
    "sample out --num_samples=3": "--num_samples: did you mean --samples?",
    "convert only": "give TARGET: see shardpair convert --help",
    "lesson": "give STRATEGY: see shardpair lesson --help",
    "lesson tensor": "STRATEGY tensor: did you mean tensor_parallel?",
    "plan --devices 0": "--devices 0: give 1 or more",
    "plan --memory_gb 0": "--memory_gb 0: give more than 0",
    "doctor now": "unexpected argument now: see shardpair doctor --help",
    "run fields.toml": "fields.toml: preset: a file has only sections, such as [model]; give flags on the co",
    "run nosuch": "nosuch: no such file or named experiment",
    "run --preset nosuch": "--preset nosuch: no such preset",
    "faults --names nosuch": "--names nosuch: no such fault",
    "run --engines jax-manual jax-manual": "--engines jax-manual: give each engine once",
    "run --train.init_std 0.1 --init_from folder": "--train.init_std has no effect on the weights of folder",
    # Files that are missing, that contain another format, or that are not data.
    "run folder": "folder is a folder, not a file",
    "run binary.toml": "binary.toml: 'utf-8' codec can't decode",
    "run long.toml": f"long.toml: longer than {MAX_FILE_BYTES} bytes: data goes to",
    "run nested.toml": "nested.toml: nested too deeply",
    "run null.toml": r"a\x00b does not exist",
    "run --data.source pipe.bin": "pipe.bin is not a file",
    "run --data.source missing.txt": "missing.txt does not exist",
    "run --data.source folder": "folder is a folder without train.bin; give",
    "run --data.source nanogpt": "nanogpt/prepare.py` makes; give",
    "sample several": "several is a run of several engines: give one, such as several/jax-manual",
    "run --data.source empty.txt": "empty.txt is empty",
    "run --data.source short.txt": "too few for model.block_size = 64",
    "run --data.source odd.bin": "odd.bin has an odd number of bytes (2001)",
    "run --data.source text.gz": "text.gz is in the format gzip: unpack its text into a file first",
    "run --data.source text.zip": "text.zip is in the format zip",
    "run --data.source text.xz": "text.xz is in the format xz",
    "run --data.source text.bz2": "text.bz2 is in the format bzip2",
    "run --data.source text.zst": "text.zst is in the format Zstandard",
    "run --data.source text.parquet": "text.parquet is in the format Parquet",
    "run --data.source saved.npy": "saved.npy is a file of numpy.save",
    "run --data.source beyond.bin": "token 300, beyond model.vocab_size = 256",
    # Folders and programs.
    "run --run_dir taken": "taken exists already",
    "run --run_dir empty.txt/inside": "empty.txt/inside cannot be created",
    "run --cache_dir empty.txt": "--cache_dir empty.txt cannot be written: give another folder",
    "run --cache_dir empty.txt/inside": "--cache_dir empty.txt/inside cannot be written",
    "run --jax_python /nosuch": "--jax_python /nosuch: no such program",
    "report taken": "taken has no outcome.json",
    "ledger --results taken": "is not the folder of a `shardpair run`",
    "report taken --picture curve.doc": "--picture curve.doc: end it in one of .png, .svg, .pdf",
    # Numbers, alone and together.
    f"run --train.seed {2**63}": "train.seed",
    "run --optimizer.learning_rate 1e39": "learning_rate = 1e+39 is infinite in float32",
    "run --timeout_s nan": "--timeout_s nan must be more than 0 and at most",
    "faults --devices 1": "--devices 1: most faults show between devices only",
    "run --layout.dp_replicate 128 --train.batch_size 128": "the layout needs 128 devices",
    "run --train.batch_size 1000000000": "jax-compiler would need 1.28 TB (",
    # What would have no effect.
    "run --devices 2": "--devices has no effect without --preset",
    "run --preset single --devices 2": "--devices 2 has no effect: single is one device",
    "run --checkpoint.keep 3": "--checkpoint.keep has no effect without --checkpoint.every",
    "run --no_ladder --keep_tensors": "--keep_tensors has no effect without --ladder",
    "run --engines jax-manual --layout.compile inductor": "--layout.compile has an effect only for torch-co",
    "run --layout.xla tuned": "--layout.xla has an effect only for JAX with --platform gpu",
    "run tuned.toml": "layout.xla = tuned with platform cpu: it sets options of XLA's GPU compiler",
    "run --engines jax-manual --layout.compile block": "and block for torch-manual and torch-library: give",
    "run --engines torch-manual --layout.compile inductor": "--layout.compile has an effect only for torch",
    "run --engines torch-compiler --layout.compile block": "and block for torch-manual and torch-library",
    "run --preset ddp --devices 2 --precision.gather products": "--precision.gather has an effect only for P",
    "run --preset fsdp --devices 2 --precision.gather products": "--layout.zero 3 and 16 bits, such as --pre",
    f"run --engines jax-manual {GATHER}": "--precision.gather has an effect only for PyTorch engines",
    f"run --engines torch-library --layout.compile block {GATHER}": "whose hooks do not run (layout.compile",
    "run --optimizer.name sgd --layout.offload optimizer": "--layout.offload has an effect only with an o",
    "run --model.rope_base 5": "--model.rope_base has an effect only with --model.position rope",
    "run --model.balance 0.1": "--model.balance has an effect only with --model.n_experts",
    "run --layout.schedule gpipe": "--layout.schedule has an effect only with --layout.pp",
    "run --optimizer.momentum 0.9": "--optimizer.momentum has an effect only with --optimizer.name sgd",
    "run --preset tp --devices 2 --layout.bucket_mb 1": "--layout.bucket_mb has an effect only with several",
    "run --train.eval_iters 3": "--train.eval_iters has an effect only with --train.eval_interval",
    "run --engines jax-compiler --preset ddp --layout.gradient_sync flat": "not where the framework chooses",
    "run --engines torch-manual --preset ddp_flat --layout.bucket_mb 1": "for DDP or --layout.gradient_sync",
    "run --optimizer.no_decay_lr --optimizer.min_lr 1e-5": "has an effect only with --optimizer.decay_lr",
    "run --optimizer.weight_decay 0 --optimizer.decay all": "an effect only with --optimizer.weight_decay",
    "run demo --continue taken": "--continue reads the experiment of the folder: leave out demo",
    "ledger demo --results taken": "--results reads the experiment of the folder: leave out demo",
    "check --layout.tp 2": "--layout.tp has no effect: check sets it",
    "check --against nanogpt --model.norm_eps 1": "--model.norm_eps has no effect",
    "check demo --against nanogpt": "golden",
    "faults --layout.zero 1": "--layout.zero has no effect",
    "ledger --preset ddp --presets fsdp": "give one of them",
    "ledger --checkpoint.every 2": "--checkpoint.every has no effect",
    "bench --train.max_iters 9": "--train.max_iters has no effect",
    "profile --init_from nosuch.pt": "--init_from has no effect",
    "profile --continue taken --preset ddp": "leave out --preset",
    # What a study has no room for.
    "sweep --devices 0": "--devices 0 must be at least 1",
    "sweep --presets hsdp": "nothing is left to run",
    "profile --train.max_iters 5": "--train.max_iters 5 is too short for a profile: give 6 steps or more",
    "profile --engines nanogpt-loop --preset single": "nanogpt-loop leaves no timeline",
    "bench --sizes train.batch_size=2000000000": "make the model or the batch smaller",
    "bench --rounds 0": "--rounds 0: give 1 or more",
    "bench --baseline nosuch": "--baseline nosuch: no such case",
    "bench --presets pp --devices 2 --baseline torch-compiler.pp-2": "torch-compiler.pp-2: layout.schedule",
    "collectives --max_size 1T": "--max_size 1T: give bytes",
    "collectives --min_size 2M --max_size 1M": "--min_size 2097152 must be at least 4",
    "collectives --implementations nccl": "no such way on platform cpu",
    "collectives --hosts 2 --ranks 3": "--ranks 3: give 2 to 64, a multiple of --hosts 2",
    "lesson fully_sharded --output page.pdf": "end it in one of .html",
    # Engines that cannot.
    "run --preset single --model.dropout 0.2 --engines nanogpt-loop torch-manual": "a peer has none",
}


@pytest.fixture
def folder(no_process, tmp_path, monkeypatch):
    """A working folder with files and folders that people point at by mistake."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.bin")
    for name in ("folder", "taken"):
        Path(name).mkdir()
    for name, text in {
        "long.toml": "x = " + "[" * 100_000,
        "nested.toml": "x = " + "[" * (MAX_FILE_BYTES - 10),
        "null.toml": '[data]\nsource = "a\\u0000b"\n',
        "empty.txt": "",
        "config.py": "batch_size = 4\n",
        "fields.toml": "preset = 'fsdp'\n",
        "short.txt": "a few words",
        "tuned.toml": "[layout]\nxla = 'tuned'\n",
    }.items():
        Path(name).write_text(text)
    saved = f"{CHECKPOINTS}/step-00000001/{DESCRIPTION}"
    engines = (f"several/{name}/{saved}" for name in ("jax-manual", "torch-manual"))
    for name in ("nanogpt/prepare.py", *engines):
        Path(name).parent.mkdir(parents=True)
        Path(name).write_text("")
    Path("binary.toml").write_bytes(bytes(range(256)))
    Path("odd.bin").write_bytes(b"x" * 2001)
    np.full(5000, 300, "<u2").tofile("beyond.bin")
    np.save("saved.npy", np.arange(5000))
    text = bytes(range(97, 123)) * 200
    for name, pack in {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}.items():
        Path(f"text.{name}").write_bytes(pack(text))
    with zipfile.ZipFile("text.zip", "w") as archive:
        archive.writestr("text", text)
    Path("text.zst").write_bytes(bytes.fromhex("28b52ffd") + text)  # no writer in the standard library
    Path("text.parquet").write_bytes(b"PAR1" + text + b"PAR1")
    return tmp_path


@pytest.mark.parametrize("line", REFUSED, ids=short)
def test_refused_in_one_line(folder, capsys, line):
    before = sorted(folder.rglob("*"))
    assert main(line.split()) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("shardpair: error: ")
    assert output.err.count("\n") == 1
    assert output.err[:-1].isprintable()
    assert REFUSED[line] in output.err
    assert [path for path in sorted(folder.rglob("*")) if path.name != "runs"] == before


def test_gpus_that_are_not_there(folder, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["run", "--platform", "gpu"]) == 3
    assert "no NVIDIA GPU is visible" in capsys.readouterr().err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(launch, "gpu_memories", lambda: (0,) * 4)
    assert main(["run", "--platform", "gpu", "--layout.dp_replicate", "2"]) == 2
    assert "needs 2 devices and 1 GPUs are visible" in capsys.readouterr().err


FLOATS = [
    (section.name, field.name)
    for section in msgspec.structs.fields(Experiment)
    for field in msgspec.structs.fields(section.type)
    if isinstance(field.default, float)
]


@pytest.mark.parametrize(("section", "key"), FLOATS)
def test_floats_must_be_finite(section, key):
    for value in (math.inf, -math.inf, math.nan):
        with pytest.raises(ExperimentError, match=rf"{section}\.{key} = {value} must be a finite number"):
            parse_toml(f"[{section}]\n{key} = {value}\n")


def test_missing_default_cache_is_allowed(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "empty.txt/cache")
    assert default_cache() == ""


def test_help_is_one_screen_and_teaches(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert printed == f"{HELP}\n"
    assert len(printed.splitlines()) <= 44  # of a terminal as high as a laptop's screen
    assert max(map(len, printed.splitlines())) <= 80
    assert all(f"\n  {word} " in printed for word in COMMANDS)
    with pytest.raises(SystemExit) as ended:
        main(["run", "--help"])
    assert ended.value.code == 0
    assert "Number of transformer blocks (L). (default: 4)" in " ".join(capsys.readouterr().out.split())


def test_help_wraps_once(capsys, monkeypatch):
    """Docstrings are joined before they are wrapped; values that have no effect are not offered."""
    monkeypatch.setenv("COLUMNS", "80")
    for word in COMMANDS:
        with pytest.raises(SystemExit):
            main([word, "--help"])
        printed = capsys.readouterr().out
        lines = printed.replace("\u2502", " ").splitlines()
        assert max(map(len, printed.partition("Try:")[0].splitlines()[1:])) <= 80
        assert "None" not in printed
        has_weights = any(line.strip().startswith("--init_from") for line in lines)
        assert has_weights == (word in ("run", "resume", "sweep", "check", "ledger")), word
        if word == "run":
            index = next(place for place, line in enumerate(lines) if "--init_from" in line)
            assert [line.strip() for line in lines[index + 1 : index + 3]] == [
                "Initial weights instead of the seed's: a safetensors file with",
                "shardpair's or nanoGPT's names, or anything that `shardpair convert`",
            ]


@pytest.mark.parametrize("line", ["--help", "bench --help", "list"], ids=short)
def test_closed_stdout_prints_no_error(line):
    """True if the rest of the output fits into a buffer, and if it does not."""
    command = [sys.executable, "-m", "compare", *line.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_missing_stdout_prints_no_error(capsys, monkeypatch):
    """A caller such as cron may close stdout before the start."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["list"]) == 0
    assert capsys.readouterr().err == ""


def test_ctrl_c_during_imports_is_one_line(capsys, monkeypatch):
    def find_spec(name: str, path: object, target: object = None) -> None:
        if name == "compare.cli":
            raise KeyboardInterrupt

    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.delitem(sys.modules, "compare.cli")
    monkeypatch.delattr(compare, "cli")
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "shardpair: error: interrupted; nothing had started\n"


def test_given_flags_in_every_spelling():
    line = [
        "--layout.no-reshard-after-forward",
        "--optimizer.min-lr=1e-4",
        "--no-ladder",
        "--train.seed",
        "1337",
    ]
    assert flags_in(line) == {"layout.reshard_after_forward", "optimizer.min_lr", "ladder", "train.seed"}
    command = parse(["run", *line])
    assert isinstance(command, Study)
    assert not command.layout.reshard_after_forward
    assert command.given == flags_in(line)
