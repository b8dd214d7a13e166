"""Goldens: numbers of nanoGPT's own train.py and model.py, which run unchanged.

    python tests/make_golden.py CHECKOUT {adamw,sgd} [OUTPUT]

CHECKOUT is a clone of https://github.com/karpathy/nanoGPT; OUTPUT is in compare/goldens unless given.
Only numbers of nanoGPT are stored. Its train.py is not edited: it runs as from its command line, with the
fields of golden.toml as flags, in float64. This script intervenes in four places:

- nanoGPT's data folder contains the contract's batches, window by window. A replaced `torch.randint` returns
  their places in order, for training and for the evaluation of each split.
- The contract's initial weights are loaded after nanoGPT has made its model. Names and shapes are written out
  here, not taken from torchpar, so a wrong mapping in torchpar would show.
- Hooks read the loss, the gradients before clipping, their norm, the weights and the moments. A module in
  place of wandb receives the means of the evaluations.
- For sgd, `configure_optimizers` finds torch.optim.SGD in place of AdamW, with nanoGPT's groups and decay.
  Schedule, clipping, groups and loop are nanoGPT's; the formula is PyTorch's.

Times are not stored, so the same machine makes the same files.
"""

import hashlib
import os
import pickle
import platform
import runpy
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from compare.commands.check import GOLDEN as EXPERIMENT
from compare.commands.check import SGD
from compare.contract.ledger import Ledger
from compare.contract.record import Manifest, Recorder, Step, write_tensors
from compare.contract.request import Rung
from compare.judge.goldens import folder_of
from compare.numerics.data import SPLITS, Corpus, open_corpus
from compare.numerics.parameters import fingerprint, initial_parameters
from compare.numerics.stream import Evaluation, steps_due
from compare.spec.experiment import Experiment, edited, load, named_experiments, revalidate
from compare.system.json_files import write_json

SOURCE = "https://github.com/karpathy/nanoGPT"
OUTSIDE_BLOCKS = {
    "embedding.token": "transformer.wte.weight",
    "embedding.position": "transformer.wpe.weight",
    "norm.scale": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
}
IN_BLOCK = {
    "norm1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "norm2": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


MOMENTS = {
    "adamw": {Rung.FIRST_M: "exp_avg", Rung.FIRST_V: "exp_avg_sq"},
    "sgd": {Rung.FIRST_M: "momentum_buffer"},
}
"""How PyTorch's optimizers call them."""


def nanogpt_name(name: str) -> str:
    """blocks.1.attention.qkv.weight -> transformer.h.1.attn.c_attn.weight."""
    if name in OUTSIDE_BLOCKS:
        return OUTSIDE_BLOCKS[name]
    _, layer, inner = name.split(".", 2)
    module, _, kind = inner.rpartition(".")
    return f"transformer.h.{layer}.{IN_BLOCK[module]}.{kind.replace('scale', 'weight')}"


def is_linear(name: str) -> bool:
    """True for the weight of a torch.nn.Linear, which keeps (out, in) where we keep (in, out)."""
    return name.endswith((".qkv.weight", ".out.weight", ".up.weight", ".down.weight"))


def to_nanogpt(name: str, array: np.ndarray) -> torch.Tensor:
    """qkv (C, 3, H, D) -> (3C, C), out (H, D, C) -> (C, HD), up and down transposed, biases flat."""
    if not is_linear(name):
        return torch.from_numpy(array if name.startswith("embedding.") else array.reshape(-1))
    fan_in = array.shape[0] * (array.shape[1] if name.endswith(".out.weight") else 1)
    return torch.from_numpy(np.ascontiguousarray(array.reshape(fan_in, -1).transpose()))


def to_canonical(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse, a copy."""
    array = tensor.detach().numpy()
    return np.array((array.transpose() if is_linear(name) else array).reshape(shape), order="C")


def flags() -> Iterator[str]:
    """train.py's flags for what golden.toml names, and for a float64 run on a CPU that saves nothing."""
    spelled = tomllib.loads(named_experiments()[EXPERIMENT].read_text())
    for section in ("model", "optimizer", "train"):
        for key, value in spelled[section].items():
            if key != "vocab_size":  # train.py reads it from meta.pkl, next to the data
                yield f"--{key}={value}"
    # nanoGPT does one step more than max_iters, and evaluates before it. dtype: what autocast would take.
    yield from ("--device=cpu", "--dtype=float32", "--compile=False", "--wandb_log=True")


def write_data(folder: Path, experiment: Experiment, corpus: Corpus) -> dict[str, int]:
    """Write all windows of T + 1 tokens in the order of their use; returns how many, by use or split."""
    train = experiment.train
    passes = train.eval_iters // train.gradient_accumulation_steps
    batches = {"training": [corpus.batch(experiment, step) for step in range(train.max_iters)]} | {
        split: [
            corpus.evaluation_batch(experiment, split, step, index)
            for step in steps_due(experiment)
            for index in range(passes)
        ]
        for split in SPLITS
    }
    windows = {
        use: np.concatenate([np.concatenate([x, y[:, :, -1:]], axis=2) for x, y in of_use])
        for use, of_use in batches.items()
    }
    for name, uses in {"train.bin": ("training", SPLITS[0]), "val.bin": SPLITS[1:]}.items():
        np.concatenate([windows[use] for use in uses]).astype("<u2").tofile(folder / name)
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": experiment.model.vocab_size}))
    return {use: found.shape[0] * found.shape[1] for use, found in windows.items()}


class Watcher:
    """Deals windows, loads the initial weights, and records what nanoGPT computes."""

    def __init__(self, experiment: Experiment, recorder: Recorder, windows: dict[str, int]):
        self.experiment = experiment
        self.recorder = recorder
        self.weights = initial_parameters(experiment)
        self.model: torch.nn.Module = torch.nn.Module()
        self.initial_weights: dict[str, np.ndarray] = {}
        self._windows = windows
        self._dealt = dict.fromkeys(windows, 0)
        self._passes: list[tuple[torch.Tensor, torch.Tensor, float]] = []
        self._norm = 0.0
        self._step = 0
        self._clip = torch.nn.utils.clip_grad_norm_

    def randint(self, high: int, shape: tuple[int]) -> torch.Tensor:
        """In place of `torch.randint`: the starts of the next windows of what nanoGPT is about to do."""
        (count,) = shape
        length = self.experiment.model.block_size
        is_validation = high + length == self._windows[SPLITS[1]] * (length + 1)
        use = SPLITS[1] if is_validation else "training" if self.model.training else SPLITS[0]
        first = self._windows["training"] if use == SPLITS[0] else 0
        # train.py draws batches of one step more than there are.
        numbers = (torch.arange(count) + self._dealt[use]) % self._windows[use]
        self._dealt[use] += count
        return (first + numbers) * (length + 1)

    def log(self, said: dict[str, float]) -> None:
        """In place of `wandb.log`: nanoGPT's own means of an evaluation."""
        losses = {"train": float(said["train/loss"]), "validation": float(said["val/loss"])}
        self.recorder.evaluation(Evaluation(step=said["iter"], **losses))

    def adopt(self, model: torch.nn.Module) -> None:
        """Load the initial weights, and watch every forward pass."""
        self.model = model
        parameters = dict(model.named_parameters())
        assert {nanogpt_name(name) for name in self.weights} == set(parameters)
        for name, array in self.weights.items():
            parameters[nanogpt_name(name)].data.copy_(to_nanogpt(name, array))
        self.initial_weights = self._write(Rung.INITIAL_WEIGHTS, parameters)
        model.register_forward_hook(self._after_forward)

    def clip_grad_norm(self, parameters: Iterator[torch.Tensor], max_norm: float) -> torch.Tensor:
        """In place of `clip_grad_norm_`: see the gradients before it, and its norm after it."""
        if self._step == 0:
            gradients = {name: parameter.grad for name, parameter in self.model.named_parameters()}
            self._write(Rung.GRADIENTS, gradients)
        norm = self._clip(parameters, max_norm)
        self._norm = norm.item()
        return norm

    def after_step(self, optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        if self._step == self.experiment.train.max_iters:
            return  # the one step more
        assert len(self._passes) == self.experiment.train.gradient_accumulation_steps
        loss = sum(loss for _, _, loss in self._passes) / len(self._passes)
        (lr,) = {group["lr"] for group in optimizer.param_groups}
        self.recorder.step(Step(step=self._step, loss=loss, grad_norm=self._norm, lr=lr, step_time_ms=0.0))
        parameters = dict(self.model.named_parameters())
        if self._step == 0:
            inputs, targets = (torch.stack([one[i] for one in self._passes]) for i in (0, 1))
            batch = {"inputs": inputs.int().numpy(), "targets": targets.int().numpy()}
            write_tensors(self.recorder.folder, Rung.BATCH, batch)
            self._write(Rung.FIRST_WEIGHTS, parameters)
            for rung, key in MOMENTS[self.experiment.optimizer.name].items():
                self._write(rung, {name: optimizer.state[p][key] for name, p in parameters.items()})
        self._passes.clear()
        self._step += 1
        if self._step == self.experiment.train.max_iters:
            self._write(Rung.LATER_WEIGHTS, parameters)

    def _after_forward(self, module: torch.nn.Module, inputs: tuple, outputs: tuple) -> None:
        if module.training:
            self._passes.append((*inputs, outputs[1].item()))

    def _write(self, rung: Rung, tensors: dict) -> dict[str, np.ndarray]:
        canonical = {
            name: to_canonical(name, tensors[nanogpt_name(name)], array.shape)
            for name, array in self.weights.items()
        }
        write_tensors(self.recorder.folder, rung, canonical)
        return canonical


def train(checkout: Path, experiment: Experiment, corpus: Corpus, recorder: Recorder) -> Watcher:
    sys.path.insert(0, str(checkout))
    import model  # nanoGPT's

    assert Path(model.__file__).parent == checkout, model.__file__
    configure = model.GPT.configure_optimizers
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        watcher = Watcher(experiment, recorder, write_data(folder, experiment, corpus))

        def sgd(groups: list, *, lr: float, betas: tuple) -> torch.optim.SGD:
            return torch.optim.SGD(groups, lr=lr, momentum=experiment.optimizer.momentum)

        def configure_optimizers(gpt: torch.nn.Module, *arguments: object) -> torch.optim.Optimizer:
            watcher.adopt(gpt)
            if experiment.optimizer.name == "sgd":
                torch.optim.AdamW = sgd
            optimizer = configure(gpt, *arguments)
            optimizer.register_step_post_hook(watcher.after_step)
            return optimizer

        model.GPT.configure_optimizers = configure_optimizers
        sys.modules["wandb"] = SimpleNamespace(init=lambda **_: None, log=watcher.log)
        torch.randint = watcher.randint
        torch.nn.utils.clip_grad_norm_ = watcher.clip_grad_norm
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(1)
        sys.argv = ["train.py", *flags(), f"--dataset={folder}", f"--out_dir={folder / 'out'}"]
        os.chdir(checkout)  # it executes its configurator.py from there
        runpy.run_path("train.py", run_name="__main__")
    return watcher


def main(checkout: Path, optimizer: str, output: Path) -> None:
    experiment = load(EXPERIMENT)
    if optimizer == "sgd":
        experiment = revalidate(edited(experiment, {"optimizer": SGD}))
    corpus = open_corpus(experiment)
    output.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(output)
    watcher = train(checkout, experiment, corpus, recorder)
    parameters = list(watcher.model.parameters())
    manifest = Manifest(
        engine="nanogpt",
        experiment=experiment,
        platform="cpu",
        devices=1,
        device_kind="a CPU",
        parameters=sum(parameter.numel() for parameter in parameters),
        initial_weights_sha256=fingerprint(watcher.initial_weights),
        corpus_sha256=corpus.sha256,
        versions={
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__.split("+")[0],
        },
        threads="one",
        compile_s=0.0,
        first_step_s=0.0,
        cpu_time_s=0.0,
        peak_memory_bytes=[0],
        peak_memory_method="not measured",
    )
    recorder.leave(Ledger())
    recorder.finish(manifest)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=checkout, text=True).strip()
    ran = {
        name: hashlib.sha256((checkout / name).read_bytes()).hexdigest()
        for name in ("model.py", "train.py", "configurator.py")
    }
    write_json(output / "provenance.json", {"source": SOURCE, "commit": commit, "ran": ran})


if __name__ == "__main__":
    name = sys.argv[2]
    main(Path(sys.argv[1]).resolve(), name, Path(*sys.argv[3:4] or [folder_of(name)]).resolve())
