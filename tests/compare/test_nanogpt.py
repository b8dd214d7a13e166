"""nanoGPT's config files: read as they are, never executed; anything but literals is refused by its line."""

import json
import pickle
from pathlib import Path

import msgspec
import numpy as np
import pytest

from compare.cli import main
from compare.formats.huggingface import write_gpt2
from compare.formats.nanogpt import load_experiment, read_assignments, read_config
from compare.spec.experiment import Experiment, ExperimentError, Model
from tests.support.checkpoints import random_state, write_random
from tests.support.rows import short

SHAKESPEARE = '''"""A docstring."""
# a comment
out_dir = 'out-shakespeare-char'
eval_interval = 250
eval_iters = 20
wandb_log = False
dataset = 'shakespeare_char'
gradient_accumulation_steps = 5 * 8
batch_size = 64
block_size = 8
n_layer = 2
n_head = 2
n_embd = 16
learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = 5000
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 100
weight_decay = 2 * 0.25
'''


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config where nanoGPT has it, with its data."""
    data = tmp_path / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    for name in ("train.bin", "val.bin"):
        (np.arange(1000) % 5).astype("<u2").tofile(data / name)
    stoi = {letter: number for number, letter in enumerate("abcde")}
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 5, "stoi": stoi, "itos": {}}))
    (tmp_path / "config").mkdir()
    path = tmp_path / "config" / "train.py"
    path.write_text(SHAKESPEARE)
    return path


def test_config_becomes_experiment(config, tmp_path):
    experiment, _, notes = read_config(config)
    model, train, optimizer = experiment.model, experiment.train, experiment.optimizer
    assert (model.n_layer, model.block_size, model.vocab_size, model.bias) == (2, 8, 5, False)
    assert (train.batch_size, train.gradient_accumulation_steps, train.max_iters) == (64, 40, 5000)
    assert (train.eval_interval, train.eval_iters) == (250, 20)
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (0.9, 0.99, 0.5)
    assert experiment.checkpoint.every == 250
    assert experiment.data.source == str(tmp_path / "data" / "shakespeare_char")
    assert [note.partition(":")[0] for note in notes] == ["out_dir", "wandb_log", "dtype"]
    assert load_experiment("demo").train.max_iters


LINES = (
    ("from os import system", "line 1: only assignments such as n_layer = 6 are read"),
    ("max_iters = " + "*".join("1" * 3000), "it cannot be read"),
    ("max_iters = 1e99", "nanoGPT's settings: "),
    ("max_iters = 2.5", "nanoGPT's settings: train.max_iters = 2.5: give a whole number"),
    ("n_layer = 6 // 0", "line 1: integer division or modulo by zero"),
    ("n_layer = 'a' * 3", "line 1: arithmetic is for numbers"),
    ("n_layer = depth", "line 1: only literals, names that stand above"),
    ("depth = 6", "depth: nanoGPT has no such setting"),
    ("n_layer = print('executed')", "line 1: only literals"),
    ("n_layer = __import__('os').system('id')", "line 1: only literals"),
    ("n_layer = n_head = 6", "line 1: only assignments"),
    ("n_layer, n_head = 6, 6", "line 1: only assignments"),
    ("n_layer = 2 ** 99999", "line 1: only literals"),
    ("n_layers = 6", "n_layers: nanoGPT has no such setting"),
    ("batch_size = 8\neval_only = True\ninit_from = 'gpt2'", "a run here trains"),  # its eval_*.py
    ("x = " + "(" * 5000, "it cannot be read"),
)


@pytest.mark.parametrize(("line", "words"), LINES, ids=map(short, LINES))
def test_config_is_never_executed(tmp_path, capsys, line, words):
    path = tmp_path / "config.py"
    path.write_text(line + "\n")
    with pytest.raises(ExperimentError) as refused:
        read_config(path)
    assert words in str(refused.value)
    assert str(path) in str(refused.value) or "nanoGPT's settings" in str(refused.value)
    assert "executed" not in capsys.readouterr().out


def test_config_of_a_fork_computes(config):
    """Names that stand above, arithmetic, whole floats for counts, settings of forks, a byte order mark."""
    lines = [SHAKESPEARE, "tokens_per_pass = 4096", "block_size: int = 64", "max_iters = 6e3"]
    lines += ["batch_size = tokens_per_pass // block_size", "min_lr = learning_rate / 10", "seed = 7"]
    lines += ["lr_decay_iters = max_iters", "warmup_iters = int(max_iters * 0.01) + 4", "vocab_size = 300"]
    config.write_text("\n".join(lines), encoding="utf-8-sig")
    experiment = read_config(config).experiment
    train, optimizer = experiment.train, experiment.optimizer
    assert (train.batch_size, train.max_iters, train.seed) == (64, 6000, 7)
    assert (optimizer.min_lr, optimizer.lr_decay_iters, optimizer.warmup_iters) == (1e-4, 6000, 64)
    assert experiment.model.vocab_size == 300


@pytest.mark.parametrize(
    ("lines", "compiled"),
    [
        ("compile = True", "inductor"),
        ("compile = False", "none"),
        ("compile = True\ndtype = 'float16'", "auto"),
    ],
)
def test_config_compiles(config, lines, compiled):
    """In float16 the loss scale would be a constant of the program."""
    config.write_text(f"{SHAKESPEARE}\n{lines}\n")
    assert read_config(config).experiment.layout.compile == compiled


def test_flags_of_nanogpt_for_the_start(config, capsys):
    main(["run", str(config), "--init_from=scratch", "--dry_run", "--engines", "torch-manual"])
    assert "init_from" not in capsys.readouterr().err
    for value, words in (
        ("resume", "give --resume RUN_DIR"),
        ("gpt2-xl", "give --init_from with the folder"),
    ):
        assert main(["run", str(config), f"--init_from={value}"]) == 2
        assert words in capsys.readouterr().err


def test_config_with_init_from_needs_weights(config, capsys):
    """nanoGPT's own file: it imports time for a name without meaning here."""
    computed = "wandb_run_name = 'ft-' + str(time.time())"
    config.write_text("\n".join(["import time", SHAKESPEARE, computed, "init_from = 'gpt2-xl'"]))
    assert main(["run", str(config), "--dry_run"]) == 2
    assert "init_from = gpt2-xl: give weights with --init_from, or a checkpoint" in capsys.readouterr().err
    main(["run", str(config), "--init_from", "w.safetensors", "--dry_run"])
    assert "init_from = gpt2-xl" not in capsys.readouterr().err


def test_model_of_the_weights_to_begin_with(config, tmp_path, capsys):
    """nanoGPT's finetune config names no sizes. Sizes that the file or a flag sets stay."""
    model = Model(
        n_layer=1, n_head=2, n_embd=8, block_size=8, vocab_size=9, bias=True, activation="gelu_tanh"
    )
    experiment = Experiment(model=model)
    weights = {name: x for (group, name), x in random_state(experiment).items() if group == "weights"}
    write_gpt2(tmp_path / "gpt2", model, weights)
    saved = write_random(tmp_path / "run", experiment)
    sizes = ("n_layer", "n_head", "n_embd", "block_size")
    lines = [line for line in SHAKESPEARE.splitlines() if not line.startswith(sizes)]
    config.write_text("\n".join([*lines, "init_from = 'gpt2-xl'", "dropout = 0.25"]))
    for source in (tmp_path / "gpt2", saved):
        asked = ["run", str(config), "--init_from", str(source), "--dry_run", "--json"]
        assert main([*asked, "--engines", "torch-manual"]) == 0
        found = json.loads(capsys.readouterr().out)["values"]["experiment"]["model"]
        assert found == msgspec.to_builtins(model) | {"dropout": 0.25}
    assert main([*asked, "--model.n_head", "4"]) == 2
    assert "model.n_head = 2 instead of 4" in capsys.readouterr().out
    config.write_text("\n".join([*lines, "init_from = 'gpt2-xl'", "block_size = 4"]))
    assert main(asked) == 2
    assert "model.block_size = 8 instead of 4" in capsys.readouterr().out


def test_own_flags_follow_config(config, tmp_path, capsys):
    other = tmp_path / "data" / "other"
    other.mkdir()
    for name in ("train.bin", "val.bin"):
        np.zeros(100, "<u2").tofile(other / name)
    flags = "--max_iters=10 --eval_iters=2 --eval_interval=5 --decay_lr=False --bias=True --beta2=0.98"
    nothing = "--device=cpu --out_dir=x --compile=False --wandb_log=False --log_interval=1 --eval_only=False"
    asked = ["run", str(config), *flags.split(), *nothing.split(), "--dtype=bfloat16", "--dataset=other"]
    assert main([*asked, "--engines", "torch-manual", "--dry_run", "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)["values"]["experiment"]
    train, optimizer, model = found["train"], found["optimizer"], found["model"]
    assert (train["max_iters"], train["eval_iters"], train["eval_interval"]) == (10, 2, 5)
    assert (optimizer["decay_lr"], optimizer["beta2"], model["bias"]) == (False, 0.98, True)
    assert (found["checkpoint"]["every"], found["precision"]["dtype"]) == (5, "bfloat16")
    assert (found["data"]["source"], model["vocab_size"]) == (str(other), 50304)  # it has no meta.pkl
    said = [line.split(": ")[1] for line in printed.err.replace("\n", " ").split(f"{config}")[1:]]
    assert sorted(said) == ["compile", "device", "log_interval", "out_dir", "wandb_log"]
    for value, words, compiled in (("True", "", "inductor"), ("False", "compile: nothing is", "auto")):
        main(["run", str(config), f"--compile={value}", "--engines", "nanogpt-loop", "--dry_run", "--json"])
        printed = capsys.readouterr()
        assert words in printed.err
        assert json.loads(printed.out)["values"]["experiment"]["layout"]["compile"] == compiled
    assert main(["bench", str(config), "--max_iters=10"]) == 2
    assert "--train.max_iters has no effect" in capsys.readouterr().err
    assert main(["run", str(config), "--eval_only=True"]) == 2
    assert "eval_only = True: a run here trains" in capsys.readouterr().err
    for flag in ("--n_layers=3", "--max_iters"):
        assert main(["run", str(config), flag]) == 2
        assert flag.split("=")[0] in capsys.readouterr().err


def test_last_assignment_wins(tmp_path):
    path = tmp_path / "config.py"
    path.write_text("n_layer = 2\nn_layer = 3\nlearning_rate = -1e-3\n")
    assert read_assignments(path) == {"n_layer": 3, "learning_rate": -1e-3}
