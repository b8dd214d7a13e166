"""A dry run prints its plan and starts nothing; it skips engines by name."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from compare.checkpoint.description import CHECKPOINTS
from compare.cli import main
from compare.commands.faults import FAULTS
from compare.execute.batch import batch_script
from compare.execute.launch import EngineError
from compare.run import study
from compare.setup import fitting
from compare.setup.presets import spread
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import Experiment, ExperimentError, Layout, edited, load, to_toml
from compare.theory.memory import bytes_at_rest
from tests.support import small_checkpoint
from tests.support.rows import short


@pytest.fixture
def nothing_starts(no_process, monkeypatch, tmp_path):
    """Fail a test that starts a process or leaves a file."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.iterdir())


CAN_DROP = [name for name in STUDIED if FAULTS["dropped_all_reduce"].is_planted_in(name)]


CASES = {
    "run check": len(STUDIED),
    "check --devices 2": 1 + sum(1 + len(engine.gradient_sync) for engine in STUDIED.values()),
    "faults --names no_clip dropped_all_reduce": 1 + len(STUDIED) + len(CAN_DROP),
    "check --presets fsdp tp --variants precision.dtype=float32": 2 * (1 + 2 * len(STUDIED)),
    "check --against nanogpt --presets fsdp --devices 2": 2 * len(STUDIED),  # by AdamW, and by SGD
    "sweep check --presets ddp tp --engines jax-manual torch-manual": 1 + 2 * 2,
}


@pytest.mark.parametrize("line", CASES, ids=short)
def test_dry_run_lists_the_cases(nothing_starts, capsys, line):
    assert main([*line.split(), "--dry_run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["values"]
    assert len(planned["cases"]) == CASES[line]
    assert not any(case["refusal"] for case in planned["cases"])
    assert planned["training_tokens"] > 0


def test_flags_of_gpus_have_an_effect_on_gpus(nothing_starts, capsys):
    """The options of XLA are printed, with message sizes of this layout; other engines need none."""
    gpu = "run check --platform gpu --dry_run --preset fsdp --devices 4"
    assert main(f"{gpu} --layout.xla tuned --precision.tf32".split()) == 0
    assert f"xla_gpu_all_gather_combine_threshold_bytes={2**28}" in capsys.readouterr().out
    assert main(f"{gpu} --layout.xla tuned --engines torch-manual".split()) == 2
    assert main(f"{gpu} --engines torch-manual".split()) == 0
    assert "xla_gpu" not in capsys.readouterr().out


def test_memory_is_the_closed_form(nothing_starts, capsys):
    asked = "run check --preset fsdp_pp --devices 4 --engines torch-manual --dry_run --json"
    assert main(asked.split()) == 0
    (case,) = json.loads(capsys.readouterr().out)["values"]["cases"]
    expected = bytes_at_rest("torch-manual", spread(load("check"), "fsdp_pp", 4))
    fullest = [3, 2]  # the last stage, which has the logits
    for kind, by_device in expected.items():
        assert [case["memory"][kind]] * 2 == [by_device[device] for device in fullest]
    assert case["memory"]["activations"] > 0


def test_dry_run_of_refused_case_exits_2(nothing_starts, capsys):
    asked = "run check --preset fsdp_pp --engines jax-compiler torch-manual"
    assert main([*asked.split(), "--dry_run"]) == 2
    printed = capsys.readouterr().out
    assert "jax-compiler would be refused: layout.schedule = 1f1b: under jit autodiff" in printed
    assert "this would be refused" in printed


def test_dry_run_checks_the_pythons(nothing_starts, capsys, monkeypatch):
    line = ["run", "--engines", "jax-manual", "--dry_run"]
    assert main([*line, "--jax_python", "/nosuch"]) == 2
    assert "refused: --jax_python /nosuch: no such program" in capsys.readouterr().out
    monkeypatch.setattr(fitting, "why_not_python", lambda side, python: "no jax")
    assert main(line) == 3
    assert "refused: jaxpar: no jax with --jax_python" in capsys.readouterr().out


def test_dry_run_checks_data_without_reading(nothing_starts, tmp_path_factory, capsys):
    folder = tmp_path_factory.mktemp("data")
    asked = ["run", "check", "--data.source", str(folder), "--dry_run", "--json"]
    evaluates = ["--train.eval_interval", "2"]
    np.zeros(32, "<u2").tofile(folder / "train.bin")  # check's block_size is 32
    for more, says in (([], "has 32 training tokens, too few"), (evaluates, "has 0 tokens to validate on")):
        assert main([*asked, *more]) == 2
        (reason,) = json.loads(capsys.readouterr().out)["values"]["input_refusals"]
        assert says in reason
        np.zeros(33, "<u2").tofile(folder / "train.bin")
    assert main(asked) == 0
    capsys.readouterr()
    (folder / "ckpt.pt").write_bytes(b"PyTorch reads it")
    assert main([*asked[:-1], "--init_from", str(folder / "ckpt.pt")]) == 0
    assert "if {path} fits, which is read then".format(path=folder / "ckpt.pt") in capsys.readouterr().out


def test_unable_engines_are_skipped_with_reason(tmp_path, monkeypatch, capsys):
    def fail(request, folder, **keywords):
        raise EngineError(f"{request.engine}: died", exit_code=1)

    monkeypatch.setattr(study, "launch", fail)
    folder = tmp_path / "run"
    asked = f"run check --preset pp_zero_bubble --devices 2 --run_dir {folder}"
    assert main(asked.split()) == 1
    said = capsys.readouterr().err
    assert "jax-compiler is left out: layout.schedule = zero_bubble: under jit" in said
    saved = json.loads((folder / "outcome.json").read_text())
    assert list(saved["cases"]) == ["torch-manual", "torch-library"]
    others = {name for name, engine in STUDIED.items() if "zero_bubble" not in engine.layouts.schedules}
    assert saved["left_out"].keys() == others


def test_fitting_keeps_order_and_needs_one_engine():
    layout = Layout(pp=2, schedule="zero_bubble", microbatches=2, dp_replicate=2)
    able, left_out = fitting.fitting(list(STUDIED), Experiment(layout=layout))
    assert able == ["torch-manual"]
    assert "DDP reduces wrongly" in left_out["torch-library"]
    with pytest.raises(ExperimentError, match="no engine can run this layout: jax-compiler: "):
        fitting.fitting(["jax-compiler", "jax-manual"], Experiment(layout=layout))


def test_refusal_of_all_cases_is_printed_once(nothing_starts, capsys):
    asked = "run check --preset fsdp --devices 128 --train.batch_size 128 --dry_run"
    assert main([*asked.split(), "--data.source", "nosuch"]) == 2
    printed = capsys.readouterr().out
    assert printed.count("platform cpu has at most 64") == 1
    assert printed.count("nosuch does not exist") == 1
    assert ", ".join(STUDIED) + " would be refused: the layout needs 128 devices" in printed
    assert "tokens of" not in printed


SLURM = "run check --preset fsdp --launcher slurm --engines torch-manual --dry_run"


@pytest.fixture
def login_node(nothing_starts, monkeypatch):
    """A machine without GPUs and without an allocation."""
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_dry_run_takes_hosts_of_slurm_as_given(login_node, monkeypatch, capsys):
    monkeypatch.setattr(fitting, "memory_bytes", lambda: 0)
    wide = ["--train.batch_size", "16", "--train.gradient_accumulation_steps", "1"]
    asked = [*SLURM.split(), "--hosts", "2", "--devices", "16", "--platform", "gpu", *wide]
    assert main(asked) == 0
    printed = capsys.readouterr().out
    assert "not checked: hosts and their memory" in printed
    assert "`salloc --nodes=2 --gpus-per-node=8`" in printed
    script = printed[printed.index("#!/bin/bash") : printed.index("dry run: ")]
    assert "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=8\n" in script
    assert "  shardpair run check --preset fsdp --launcher slurm --engines torch-manual --hosts 2" in script
    assert '  shardpair run --continue "$run" --launcher slurm\n' in script
    assert "--dry_run" not in script
    assert main([*SLURM.split(), "--hosts", "3", "--devices", "16", *wide]) == 2
    printed = capsys.readouterr().out
    assert "do not divide the layout's 16 devices" in printed
    assert "#SBATCH" not in printed


def test_dry_run_takes_gpus_as_given_where_none_is_visible(login_node, capsys):
    assert main(["run", "check", "--preset", "fsdp", "--platform", "gpu", "--dry_run"]) == 0
    printed = capsys.readouterr().out
    assert "not checked: GPUs and their memory: no NVIDIA GPU is visible here" in printed


def test_script_is_that_of_the_docs():
    line = "shardpair run baby-gpt --engines torch-manual --preset fsdp --devices 2 --checkpoint.every 50 "
    script = batch_script(f"{line} --launcher slurm --dry_run", nodes=2)
    page = Path(__file__).parents[2] / "docs" / "cluster.md"
    assert f"```bash\n{script}```\n" in page.read_text()


@pytest.mark.parametrize(
    ("left", "line"),
    [
        ([], "run check --launcher slurm --run_dir runs/7"),
        (["half"], "run check --launcher slurm --run_dir runs/7"),
        (["half", "outcome.json"], "run --continue runs/7 --launcher slurm"),
    ],
    ids=["first", "killed early", "stopped"],
)
def test_script_continues_what_was_saved(tmp_path, left, line):
    """A requeued job begins again if the first start saved no outcome."""
    folder = tmp_path / "runs" / "7"
    for name in left:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    stub = tmp_path / "shardpair"
    stub.write_text('#!/bin/sh\necho "$@" > asked\nls runs/7 > seen 2> /dev/null\n')
    stub.chmod(0o755)
    script = batch_script("shardpair run check --launcher slurm --dry_run", nodes=2)
    for job in ("", "7"):  # without a job nothing is removed
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": job}
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, check=False)
        assert (done.returncode == 0, (tmp_path / "asked").exists()) == (bool(job), bool(job))
    assert (tmp_path / "asked").read_text() == f"{line}\n"
    assert (tmp_path / "seen").read_text().split() == (left if "outcome.json" in left else [])


FLOAT64 = ["--platform", "gpu", "--model.attention", "blockwise", "--precision.dtype", "float64"]


def test_fused_kernel_in_float64_is_rejected(login_node, capsys):
    """PyTorch has none on GPUs. JAX computes blocks itself, and a ring of torch-manual multiplies."""
    asked = ["run", "check", *FLOAT64, "--dry_run"]
    assert main([*asked, "--engines", "torch-library"]) == 2
    refused = "torch-library would be refused: model.attention = blockwise with precision.dtype = float64"
    assert refused in " ".join(capsys.readouterr().out.split())
    assert main([*asked, "--engines", "jax-manual"]) == 0
    assert main([*asked, "--engines", "torch-manual", "--preset", "cp_ring"]) == 0
    assert main([*asked, "--engines", "torch-manual", "--preset", "cp"]) == 2
    assert main([*asked, "--engines", "torch-manual", "--precision.dtype", "float32"]) == 0


@pytest.mark.usefixtures("no_process")
def test_checkpoint_to_resume_is_read(tmp_path, capsys):
    """A dry run names the step. A damaged checkpoint is rejected, and the newest whole one is named."""
    saved = small_checkpoint.save(tmp_path / CHECKPOINTS, 5, 10, 15, keep=3)
    toml = tmp_path / "small.toml"
    toml.write_text(to_toml(edited(small_checkpoint.EXPERIMENT, {"train": {"max_iters": 20}})))
    asked = ["run", str(toml), "--resume", str(tmp_path), "--engines", "jax-manual", "--dry_run"]
    assert main(asked) == 0
    assert f"resumed: {tmp_path}, from step 15" in " ".join(capsys.readouterr().out.split())
    for folder in (saved, saved.with_name("step-00000010")):
        file = min(folder.glob("*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    whole = f"{saved.with_name('step-00000005')} is whole: give it"
    assert main(asked) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "this would be refused" in said
    assert "the checkpoint is damaged; use an older one" in said
    assert whole in said
    assert main(["convert", str(tmp_path), str(tmp_path / "x")]) == 2
    assert whole in capsys.readouterr().err
    assert main([*asked, "--init_from", str(tmp_path)]) == 2
    assert "a checkpoint has its own weights: give one of them" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("more", "needed"),
    [
        ([], "of compared tensors, and 1 kB are free"),
        (["--no_ladder", "--checkpoint.every", "1"], "525 kB of checkpoints, and 1 kB are free"),
        (["--checkpoint.every", "1"], "of compared tensors + 525 kB of checkpoints, and"),
    ],
)
def test_full_disk_is_rejected(folder_of_tiny, no_process, monkeypatch, capsys, more, needed):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    for dry in (["--dry_run"], []):
        assert main(["run", "tiny.toml", "--engines", "torch-manual", *more, *dry]) == 2
        errors = capsys.readouterr().err
        assert needed in errors
        assert "give a --run_dir on a larger disk" in errors
    assert not (folder_of_tiny / "runs").exists()
