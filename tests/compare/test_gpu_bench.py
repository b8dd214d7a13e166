"""`make gpu-bench`: what it asks for can be, on any number of GPUs; planned here, and not run."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from compare.cli import main
from compare.execute import launch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("gpus", "layouts"), [(1, ["single"]), (2, ["ddp-2", "zero1-2", "fsdp-2"])])
def test_make_gpu_bench_can_be_planned(gpus, layouts, tmp_path, capsys, monkeypatch):
    command = ["make", "--dry-run", "gpu-bench", f"GPUS={gpus}"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    benches = [line for line in printed.splitlines() if "shardpair bench" in line]
    assert len(benches) == 2
    monkeypatch.setattr(launch, "installed_gpus", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    for bench in benches:
        computed = re.sub(r"\$\(\((\d+) \* (\d+)\)\)", lambda m: str(int(m[1]) * int(m[2])), bench)
        assert main([*shlex.split(computed)[1:], "--dry_run"]) == 0
        planned = capsys.readouterr().out
        assert "all of it can run" in planned
        assert all(f".{layout}" in planned for layout in layouts)


def test_presets_replace_the_layout_of_the_file_before_it_is_checked(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = "--model.n_layer 1 --model.block_size 64 --model.vocab_size 256 --data.source synthetic"
    batch = f"gpt2-124m {small} --train.batch_size 12 --dry_run"  # and dp_replicate = 8
    assert main(f"run {batch}".split()) == 2
    assert "train.batch_size = 12 is not divisible by layout.dp_replicate = 8" in capsys.readouterr().err
    assert main(f"run {batch} --preset fsdp --devices 2".split()) == 0
    assert main(f"run {batch} --preset fsdp --devices 5".split()) == 2
    assert "train.batch_size = 12 is not divisible by layout.dp_shard = 5" in capsys.readouterr().err
    assert main(f"sweep {batch} --presets ddp --devices 2".split()) == 0
    assert main(f"run {batch} --preset single --model.n_head 7".split()) == 2
    assert "model.n_head = 7 does not divide model.n_embd = 768" in capsys.readouterr().err
