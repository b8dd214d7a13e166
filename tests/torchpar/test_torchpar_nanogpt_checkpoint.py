"""nanoGPT's ckpt.pt, imported with the state of its optimizer, and exported."""

import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import UNSET

from compare.checkpoint.description import Checkpoint
from compare.checkpoint.reader import CheckpointReader
from compare.formats.nanogpt import experiment_of, settings_of
from compare.numerics.optimizer import learning_rate, step_scalars
from compare.spec.experiment import Data, Experiment, ExperimentError, Model, Train, edited, load
from torchpar.model import GPT
from torchpar.nanogpt_checkpoint import export_checkpoint, import_checkpoint, read

MODEL = Model(n_layer=2, n_head=2, n_embd=8, block_size=6, vocab_size=11, bias=True)
BASE = Experiment(model=MODEL, data=Data(source="synthetic"))
UPDATES = 3


def train(model: GPT, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """nanoGPT's loop, without its schedule."""
    losses = []
    for step in steps:
        tokens = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(step))
        _, loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def optimizer_of(model: GPT) -> torch.optim.Optimizer:
    """The optimizer of nanoGPT's configure_optimizers."""
    parameters = [p for _, p in model.named_parameters()]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)


@pytest.fixture
def trained() -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(MODEL)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(UPDATES))
    return model, optimizer


@pytest.fixture
def saved(trained, tmp_path) -> Path:
    model, optimizer = trained
    checkpoint = {
        "model": OrderedDict((f"_orig_mod.{name}", p) for name, p in model.state_dict().items()),
        "optimizer": optimizer.state_dict(),
        "model_args": settings_of(BASE, only_model=True),
        "iter_num": UPDATES,
        "best_val_loss": torch.tensor(2.0),
        "config": {"learning_rate": 1e-3, "batch_size": 4, "dataset": "shakespeare_char", "compile": True},
    }
    path = tmp_path / "ckpt.pt"
    torch.save(checkpoint, path)
    return path


def test_import_has_all_of_nanogpt(saved, trained, tmp_path):
    import_checkpoint(saved, tmp_path / "ours", BASE)
    reader = CheckpointReader(tmp_path / "ours")
    reader.verify()
    found = reader.description
    assert (found.engine, found.step, found.updates) == ("nanoGPT", UPDATES, UPDATES)
    assert (found.experiment.train.batch_size, found.experiment.optimizer.learning_rate) == (4, 1e-3)
    model, optimizer = trained
    qkv = model.transformer["h"][1].attn.c_attn.weight
    state = optimizer.state[qkv]
    for group, tensor in (("weights", qkv), ("m", state["exp_avg"]), ("v", state["exp_avg_sq"])):
        expected = tensor.detach().numpy().T.reshape(8, 3, 2, 4)
        np.testing.assert_array_equal(reader.read(group, "blocks.1.attention.qkv.weight"), expected)


def test_export_resumes_in_nanogpt(saved, trained, tmp_path):
    import_checkpoint(saved, tmp_path / "ours", BASE)
    export_checkpoint(tmp_path / "ours", tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert (back["iter_num"], back["model_args"]) == (UPDATES, settings_of(BASE, only_model=True))
    model = GPT(MODEL)
    model.load_state_dict(back["model"])
    optimizer = optimizer_of(model)
    optimizer.load_state_dict(back["optimizer"])
    own_model, own_optimizer = trained
    steps = range(UPDATES, UPDATES + 3)
    assert train(model, optimizer, steps) == train(own_model, own_optimizer, steps)


def changed(
    saved: Path, folder: Path, change: Callable[[dict], object], base: Experiment | None = None
) -> Checkpoint:
    """Change the content of a checkpoint, and import it into a new folder."""
    content = torch.load(saved, weights_only=True)
    change(content)
    torch.save(content, saved)
    import_checkpoint(saved, folder, base)
    return CheckpointReader(folder).description


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("mps", "float32"), ("cuda:1", "float16")])
def test_import_dtype_of_a_device(saved, tmp_path, device, dtype):
    """On a CPU nanoGPT computes in float32, and saves its option."""
    config = {"device": device, "dtype": "float16"}
    found = changed(saved, tmp_path / "ours", lambda content: content["config"].update(config))
    assert found.experiment.precision.dtype == dtype


@pytest.mark.parametrize("updates", [UPDATES, 0])
def test_import_skipped_float16_steps(saved, tmp_path, updates):
    def skip(content: dict) -> None:
        content["config"].update(device="cuda", dtype="float16")
        content.update(iter_num=10)
        if not updates:  # all steps overflowed: AdamW has no state yet
            content["optimizer"]["state"] = {}

    found = changed(saved, tmp_path / "ours", skip)
    assert (found.step, found.updates) == (10, updates)
    scalars = step_scalars(found.experiment.optimizer, found.step, found.updates)
    assert scalars["learning_rate"] == learning_rate(found.experiment.optimizer, 10)
    assert scalars["bias_correction1"] == 1 - 0.9 ** (updates + 1)
    export_checkpoint(tmp_path / "ours", tmp_path / "back.pt")
    again = torch.load(tmp_path / "back.pt", weights_only=True)
    assert again["iter_num"] == 10
    steps = {float(state["step"]) for state in again["optimizer"]["state"].values()}
    assert steps == ({updates} if updates else set())


def test_import_settings_of_saved_optimizer(saved, tmp_path):
    def other_settings(content: dict) -> None:
        content["config"].update(beta1=0.8, weight_decay=0.3)  # nanoGPT ignores them when it resumes
        for group in content["optimizer"]["param_groups"]:
            group.update(betas=(0.7, 0.96), eps=1e-6)

    found = changed(saved, tmp_path / "ours", other_settings).experiment.optimizer
    assert (found.beta1, found.beta2, found.eps, found.weight_decay) == (0.7, 0.96, 1e-6, 0.1)


def test_import_precedence_of_settings(saved, tmp_path):
    import_checkpoint(saved, tmp_path / "alone")
    found = CheckpointReader(tmp_path / "alone").description
    assert (found.experiment.data.source, found.experiment.model) == ("data/shakespeare_char", MODEL)
    assert (found.validation_loss, found.experiment.precision.dtype) == (2.0, "float32")
    base = edited(BASE, {"precision": {"dtype": "float64"}, "optimizer": {"name": "sgd", "momentum": 0.9}})

    def in_float16(content: dict) -> None:
        content["config"].update(device="cuda", dtype="float16", bias=1)
        content["model_args"].pop("bias")
        content.update(iter_num=10, best_val_loss=1e9)

    found = changed(saved, tmp_path / "given", in_float16, base)
    assert (found.experiment.precision.dtype, found.experiment.data.source) == ("float64", "synthetic")
    assert (found.step, found.updates, found.validation_loss) == (10, UPDATES, UNSET)
    assert (found.experiment.optimizer.momentum, found.experiment.model.bias) == (0, True)
    import_checkpoint(saved, tmp_path / "data", BASE)  # `base` gives only the data
    said = CheckpointReader(tmp_path / "data").description.experiment
    assert (said.precision.dtype, said.data.source) == ("float16", "synthetic")
    assert CheckpointReader(tmp_path / "given").read("m", "norm.scale").dtype == np.float64
    for folder, best in (("alone", 2.0), ("given", 1e9)):
        export_checkpoint(tmp_path / folder, tmp_path / "back.pt")
        assert torch.load(tmp_path / "back.pt", weights_only=True)["best_val_loss"] == best


def first_group(saved: dict) -> dict:
    """The optimizer's group of parameters that decay."""
    return saved["optimizer"]["param_groups"][0]


def exchange(saved: dict) -> None:
    """Exchange two moments of one size, as if the parameters were in another order."""
    state = saved["optimizer"]["state"]
    state[4], state[5] = state[5], state[4]


SPOILED = {
    "step": (lambda saved: saved.update(iter_num=-1), "Expected `int` >= 0 - at `\\$.iter_num`"),
    "updates": (lambda saved: saved.update(iter_num=9), r"iter_num = 9, and its optimizer is at step \[3\]"),
    "layers": (lambda saved: saved["model_args"].update(n_layer=3), "has 28 tensors and the model 40"),
    "parameters": (lambda saved: first_group(saved)["params"].pop(), "has 27 parameters, and the model 28"),
    "order": (
        exchange,
        r"exp_avg of .* is \(8, 32\), and the weight \(32, 8\): the parameters of the optimizer",
    ),
    "amsgrad": (lambda saved: first_group(saved).update(amsgrad=True), "its optimizer has amsgrad"),
    "eps": (lambda saved: first_group(saved).update(eps=1e-3), "or other betas or eps for each"),
    "sparse": (
        lambda saved: saved["model"].update(x=torch.eye(3).to_sparse()),
        "its weight x is not a dense tensor",
    ),
}


@pytest.mark.parametrize(("spoil", "words"), SPOILED.values(), ids=SPOILED)
def test_import_rejects_damaged_file(saved, tmp_path, spoil, words):
    content = torch.load(saved, weights_only=True)
    spoil(content)
    torch.save(content, saved)
    with pytest.raises(ExperimentError, match=words):
        import_checkpoint(saved, tmp_path / "ours", BASE)
    assert list(tmp_path.iterdir()) == [saved]


def test_import_never_reads_another_number(saved, tmp_path):
    """A flipped bit is an error, or it stands where no number depends on it."""
    import_checkpoint(saved, tmp_path / "right", BASE)
    right = CheckpointReader(tmp_path / "right")
    content, place = saved.read_bytes(), np.random.default_rng(0)
    rejected = 0
    for flip in range(80):
        damaged = bytearray(content)
        damaged[place.integers(len(content))] ^= 1 << int(place.integers(8))
        saved.write_bytes(damaged)
        try:
            import_checkpoint(saved, tmp_path / f"{flip}", BASE)
        except ExperimentError:
            rejected += 1
            continue
        found = CheckpointReader(tmp_path / f"{flip}")
        for field in ("experiment", "step", "updates", "validation_loss"):
            assert getattr(found.description, field) == getattr(right.description, field)
        for group in ("weights", "m", "v"):
            for name, tensor in right.group(group).items():
                np.testing.assert_array_equal(found.read(group, name), tensor)
    assert rejected > 40


@pytest.mark.parametrize(
    "content", [5, [1], torch.ones(3), {"model": 1}], ids=["int", "list", "tensor", "dict"]
)
def test_import_rejects_another_file(tmp_path, content):
    torch.save(content, tmp_path / "spoiled.pt")
    with pytest.raises(ExperimentError, match=r"is not a ckpt\.pt: "):
        import_checkpoint(tmp_path / "spoiled.pt", tmp_path / "ours", BASE)
    assert not (tmp_path / "ours").exists()


def test_settings_round_trip():
    experiment = load("baby-gpt")
    base = Experiment(data=experiment.data, train=Train(seed=1337))
    found = experiment_of({**settings_of(experiment), "wandb_log": True}, base=base)
    assert (found.model, found.optimizer) == (experiment.model, experiment.optimizer)
    with pytest.raises(ExperimentError, match=r"model\.n_layer = .*: give a whole number"):
        experiment_of({"n_layer": "x"}, base=Experiment())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda content: content[:-9], "is damaged: its end is missing: copy the file again"),
        (lambda content: b"hello\n" * 9, "cannot be read: it is not a file of torch.save, or is damaged"),
        (
            lambda content: content.replace(b"param_groups", b"param_group!"),
            "is damaged: its record .*CRC-32",
        ),
    ],
    ids=["cut", "text", "changed"],
)
def test_unreadable_file_is_rejected(saved, spoil, words):
    saved.write_bytes(spoil(saved.read_bytes()))
    with pytest.raises(ExperimentError, match=f"{saved} {words}"):
        read(saved)


def test_any_error_of_a_damaged_pickle_is_one_line(saved):
    """Half of data.pkl, with a right CRC: torch.load raises struct.error, among others."""
    with zipfile.ZipFile(saved) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(saved, "w") as archive:
        for name, record in content.items():
            archive.writestr(name, record[: len(record) // 2] if name.endswith("data.pkl") else record)
    with pytest.raises(ExperimentError, match="cannot be"):
        read(saved)
