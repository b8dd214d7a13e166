"""Weights of the user: wrong ones are rejected, right ones are the first weights of both sides."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from compare.cli import main
from compare.contract.record import read_record
from compare.contract.request import Request
from compare.formats.huggingface import WEIGHTS_FILE, write_gpt2
from compare.numerics.initial_weights import checked_weights
from compare.numerics.parameters import fingerprint, initial_parameters
from compare.setup.sources import freeze_weights
from compare.side.inputs import starting_parameters
from compare.spec.experiment import Data, Experiment, ExperimentError, Model, Train, edited, load
from compare.system.tensors import Tensors
from tests.support.checkpoints import random_state, write_random
from torchpar.model import GPT
from torchpar.nanogpt_checkpoint import import_checkpoint
from torchpar.weights import load_weights

EXPERIMENT = Experiment(
    model=Model(n_layer=1, n_head=2, n_embd=8, block_size=8, bias=True),
    data=Data(source="/nowhere"),
    train=Train(max_iters=2, batch_size=2),
)
SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")


def own_weights(experiment: Experiment = EXPERIMENT) -> dict[str, np.ndarray]:
    """Weights that differ from the seed's."""
    return {name: 1.5 * array for name, array in initial_parameters(experiment).items()}


def nanogpt_state(experiment: Experiment = EXPERIMENT) -> dict[str, torch.Tensor]:
    """The state dict of a compiled nanoGPT, with the tied head twice."""
    model = GPT(experiment.model)
    load_weights(model, own_weights(experiment))
    return {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}


def checkpoint(path: Path, experiment: Experiment = EXPERIMENT, **sizes: object) -> Path:
    """A checkpoint in nanoGPT's form."""
    arguments = {key: getattr(experiment.model, key) for key in SIZES} | {"dropout": 0.0} | sizes
    best = torch.tensor(3.0)
    torch.save({"model": nanogpt_state(experiment), "model_args": arguments, "best_val_loss": best}, path)
    return path


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("norm.bias", None, "has 15 tensors and the model 16: it lacks norm.bias"),
        ("lm_head", np.zeros(3), "has 17 tensors and the model 16: the model has no lm_head"),
        ("norm.bias", np.zeros(9), r"norm.bias has shape \(9,\) and the model's \(8,\)"),
        ("norm.bias", np.full(8, 1e300), "8 of 8 entries of norm.bias are not finite as float32"),
        ("norm.bias", np.zeros(8, np.int32), "norm.bias is int32"),
    ],
    ids=["missing", "surplus", "shape", "overflow", "dtype"],
)
def test_wrong_weights_are_one_line(tmp_path, name, array, message):
    weights = own_weights() | {name: array}
    save_file({key: value for key, value in weights.items() if value is not None}, tmp_path / "w")
    with pytest.raises(ExperimentError, match=message) as error:
        checked_weights(Tensors(tmp_path / "w"), EXPERIMENT, "w")
    assert "\n" not in str(error.value)


@pytest.fixture
def in_this_process(monkeypatch):
    """torchpar reads a ckpt.pt in this process."""

    def convert(source: Path, target: Path, foreign: str, *, base: Experiment | None, **_: object) -> None:
        assert foreign == "nanogpt"
        import_checkpoint(source, target, base)

    monkeypatch.setattr("compare.setup.sources.convert_by_side", convert)


def frozen(source: Path, experiment: Experiment = EXPERIMENT) -> str:
    """The fingerprint of the first weights of a run."""
    return freeze_weights(str(source), experiment, source.parent, pythons={})["init_sha256"]


def test_sources_give_canonical_weights(tmp_path, in_this_process):
    asked, state = fingerprint(own_weights()), nanogpt_state()
    assert frozen(checkpoint(tmp_path / "ckpt.pt")) == asked
    torch.save({f"module.{name}": tensor for name, tensor in state.items()}, tmp_path / "state.pt")
    assert frozen(tmp_path / "state.pt") == asked
    untied = {n: t.contiguous() for n, t in state.items() if not n.endswith("lm_head.weight")}
    save_torch(untied, tmp_path / "nanogpt.safetensors")
    assert frozen(tmp_path / "nanogpt.safetensors") == asked
    tanh = edited(EXPERIMENT, {"model": {"activation": "gelu_tanh"}})
    write_gpt2(tmp_path / "gpt2", tanh.model, own_weights())
    assert frozen(tmp_path / "gpt2", tanh) == asked
    saved = write_random(tmp_path, tanh)
    state = random_state(tanh)
    assert frozen(saved, tanh) == fingerprint({name: state["weights", name] for name in own_weights()})


def test_unreadable_weights_are_one_line(tmp_path, in_this_process):
    bad = tmp_path / "bad.pt"
    state = nanogpt_state()
    wte = "transformer.wte.weight"
    for content, says in (
        ({"model": {"x": torch.zeros(1)}, "config": Path}, "cannot be unpickled safely"),  # names a class
        ({wte: torch.zeros(2, 2)}, "has 1 tensors and the model 16: it lacks "),
        ({**state, "_orig_mod.lm_head.weight": state[f"_orig_mod.{wte}"] + 1}, "lm_head.weight is not tied"),
        (
            {**state, wte: state[f"_orig_mod.{wte}"]},
            f"has wte.weight twice, with and without a prefix: remove {wte}",
        ),
    ):
        torch.save(content, bad)
        with pytest.raises(ExperimentError, match=re.escape(says)):
            frozen(bad)
    with pytest.raises(ExperimentError, match=r"model\.n_head = 4 instead of 2"):  # no shape depends on it
        frozen(checkpoint(bad, n_head=4))
    bad.write_bytes(b"nothing")
    with pytest.raises(ExperimentError, match="cannot be"):
        frozen(bad)
    torch.save(state, bad)
    with pytest.raises(ExperimentError, match="lacks n_layer, n_head, n_embd, block_size, bias"):
        import_checkpoint(bad, tmp_path / "ours")
    tanh = edited(EXPERIMENT, {"model": {"activation": "gelu_tanh"}})
    write_gpt2(tmp_path / "gpt2", tanh.model, own_weights())
    with pytest.raises(ExperimentError, match=r"model\.activation = gelu_tanh instead of gelu"):
        frozen(tmp_path / "gpt2")
    with pytest.raises(ExperimentError, match="is Hugging Face's: give its folder"):
        frozen(tmp_path / "gpt2" / WEIGHTS_FILE)
    assert not (tmp_path / "init.safetensors").exists()


@pytest.mark.usefixtures("no_process")
def test_wrong_weights_start_no_engine(tmp_path, capsys):
    path, run_dir = tmp_path / "w.safetensors", tmp_path / "run"
    for write, says in (
        (lambda: None, "does not exist"),
        (lambda: path.write_bytes(b"garbage"), "cannot be read"),
        (lambda: save_file({"norm.scale": np.ones(9)}, path), "has 1 tensors and the model"),
    ):
        write()
        assert main(["run", "check", "--init_from", str(path), "--run_dir", str(run_dir)]) == 2
        said = capsys.readouterr().err
        assert says in said.replace("\n", " ")
        assert "Traceback" not in said
        assert not run_dir.exists()


def test_request_checks_the_fingerprint(tmp_path):
    path, weights = tmp_path / "w.safetensors", own_weights()
    save_file(weights, path)
    request = Request(engine="torch-manual", experiment=EXPERIMENT, init_from=str(path))
    assert fingerprint(starting_parameters(request)) == fingerprint(weights)
    with pytest.raises(ExperimentError, match="has changed since the run was planned"):
        starting_parameters(replace(request, init_sha256="00"))


def test_both_sides_start_from_nanogpt(shardpair):
    experiment = load("check")
    path = checkpoint(shardpair.folder / "ckpt.pt", experiment)
    done = shardpair(
        "run", "check", "--engines", "torch-manual", "jax-compiler", "--init_from", str(path),
        "--train.max_iters", "2", "--run_dir", "runs",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "PASS" in done.stdout
    given = Tensors(shardpair.folder / "runs" / "init.safetensors")
    for engine in ("torch-manual", "jax-compiler"):
        record = read_record(shardpair.folder / "runs" / engine)
        assert record.manifest.initial_weights_sha256 == fingerprint(given)
        assert record.request is not None
        assert record.request.init_sha256 == fingerprint(given)
    assert fingerprint(given) != fingerprint(initial_parameters(experiment))
    seed = initial_parameters(experiment)["embedding.token"]
    np.testing.assert_allclose(given["embedding.token"], 1.5 * seed, rtol=1e-6)  # nanoGPT's are float32
    assert "--init_from" in (shardpair.folder / "runs" / "report.html").read_text()
