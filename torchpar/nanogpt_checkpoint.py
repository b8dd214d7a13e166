"""nanoGPT's ckpt.pt, with its optimizer's state: into a checkpoint of ours, and out of one.

Nothing is executed: a pickle is read by torch.load(weights_only=True). nanoGPT saves before the update of
iteration `iter_num`: the next batch is number `iter_num` of its stream, and its schedule follows it. AdamW
counts the updates: fewer, where float16 skipped steps.
"""

import io
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct

from compare.checkpoint.description import WEIGHTS, Checkpoint
from compare.checkpoint.reader import CheckpointReader
from compare.checkpoint.saver import Part, write_checkpoint
from compare.host.disk import write_atomically
from compare.numerics.parameters import decays, parameter_table, storage_dtype
from compare.numerics.shards import Shard
from compare.spec.experiment import Experiment, ExperimentError, Model, edited, revalidate
from compare.spec.nanogpt_settings import experiment_of, settings_of
from torchpar.convert import HEAD, is_plain, plain_state, read
from torchpar.weights import moment_keys, nanogpt_name, nanogpt_shapes, to_arrays, to_nanogpt

Tensors = Mapping[str, torch.Tensor]


class _Group(Struct):
    """What nanoGPT goes on with, whatever its config says: `load_state_dict` brings it back."""

    params: list[int]
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    amsgrad: bool = False
    maximize: bool = False


class _AdamW(Struct):
    """Its optimizer's `state_dict()`: what decays, and the rest; the state by number."""

    param_groups: tuple[_Group, _Group]
    state: dict[int, dict[str, Any]]


class _Saved(Struct):
    """A ckpt.pt."""

    model: dict[str, Any]
    optimizer: _AdamW
    model_args: dict[str, Any]
    iter_num: int
    config: dict[str, Any] = {}


def import_checkpoint(source: Path, target: Path, base: Experiment) -> None:
    """Write a ckpt.pt of nanoGPT as a checkpoint of ours, a new folder. Raises ExperimentError.

    `base` says what the file does not: where the data is, and the dtype in which numbers are kept.
    """
    try:
        saved = msgspec.convert(read(source), _Saved)
    except msgspec.ValidationError as error:
        why = f"is no checkpoint of nanoGPT's train.py: {error} (weights alone are for --init_from)"
        raise ExperimentError(f"{source} {why}") from None
    settings, (decaying, other) = {**saved.config, **saved.model_args}, saved.optimizer.param_groups
    if "cuda" not in str(settings.get("device", "cuda")) and "dtype" in settings:
        settings["dtype"] = "float32"  # what nanoGPT computes in on a CPU or a Mac, whatever it notes
    nanogpts = _Group(other.params, decaying.betas, decaying.eps, weight_decay=0.0)
    if other != nanogpts or decaying.amsgrad or decaying.maximize:
        raise ExperimentError(
            f"{source}: its optimizer has amsgrad, maximize, a weight decay of vectors, or other betas or "
            f"eps for each group: nanoGPT's has not, nor has ours"
        )
    experiment, _ = experiment_of(settings, base=base)
    beta1, beta2 = decaying.betas
    resumed = {"beta1": beta1, "beta2": beta2, "eps": decaying.eps, "weight_decay": decaying.weight_decay}
    steps = {"max_iters": max(experiment.train.max_iters, saved.iter_num + 1)}
    experiment = revalidate(edited(experiment, {"train": steps, "optimizer": resumed}))
    weights = plain_state(saved.model, experiment.model, origin=str(source))
    moments, updates = _moments(source, saved, weights, experiment)
    checkpoint = Checkpoint(
        engine="nanoGPT", experiment=experiment, step=saved.iter_num, updates=updates, corpus_sha256=""
    )
    write_checkpoint(target, checkpoint, _parts({WEIGHTS: weights, **moments}, experiment))


def export_checkpoint(source: Path, target: Path) -> None:
    """Write a checkpoint of ours as nanoGPT's ckpt.pt, which its train.py resumes and its sample.py reads.

    ExperimentError: the checkpoint is not whole, or nanoGPT cannot have it.
    """
    reader = CheckpointReader(source)
    experiment, updates = reader.description.experiment, reader.description.updates
    model, config = experiment.model, experiment.optimizer
    for key, value, nanogpts in (
        ("optimizer.name", config.name, "adamw"),
        ("optimizer.decay", config.decay, "matrices"),
        ("model.activation", model.activation, "gelu"),
        ("model.norm_eps", model.norm_eps, 1e-5),
    ):
        if value != nanogpts:
            why = f"{source}: {key} = {value}, and nanoGPT has {nanogpts} alone"
            raise ExperimentError(f"{why}: --to huggingface or weights keeps it")
    rows = {nanogpt_name(row.name): row for row in parameter_table(model)}

    def tensor(group: str, name: str) -> torch.Tensor:
        array = to_nanogpt(rows[name], reader.read(group, rows[name].name))
        return torch.from_numpy(array.copy()).float()

    decaying, other = _by_group(model)
    groups = [
        {"params": [torch.empty(0) for _ in decaying], "weight_decay": config.weight_decay},
        {"params": [torch.empty(0) for _ in other], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    adamw = torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.eps)
    state = {}
    for number, name in enumerate([*decaying, *other] if updates else ()):
        moments = {key: tensor(group, name) for group, key in moment_keys(config).items()}
        state[number] = {"step": torch.tensor(float(updates)), **moments}
    saved = {
        "model": {name: tensor(WEIGHTS, name) for name in rows},
        "optimizer": {**adamw.state_dict(), "state": state},
        "model_args": settings_of(experiment, only_model=True),
        "iter_num": reader.description.step,
        "best_val_loss": torch.tensor(1e9),  # nanoGPT's own before it has evaluated
        "config": settings_of(experiment),
    }
    saved["model"][HEAD] = saved["model"][nanogpt_name("embedding.token")]
    content = io.BytesIO()
    torch.save(saved, content)
    write_atomically(target, content.getvalue())


def _by_group(model: Model) -> list[list[str]]:
    """nanoGPT's two groups of parameters: what decays, and the rest; their place is their number."""
    rows = {nanogpt_name(row.name): row for row in parameter_table(model)}
    names = nanogpt_shapes(model)
    return [[name for name in names if decays(rows[name], "matrices") == does] for does in (True, False)]


def _moments(
    source: Path, saved: _Saved, weights: Tensors, experiment: Experiment
) -> tuple[dict[str, dict[str, torch.Tensor]], int]:
    """Both moments by nanoGPT's names, none before the first update; and the number of updates."""
    names = [*chain(*_by_group(experiment.model))]
    numbers = [number for group in saved.optimizer.param_groups for number in group.params]
    states, step = saved.optimizer.state, saved.iter_num
    if len(numbers) != len(names):
        said = f"its optimizer has {len(numbers)} parameters, and the model {len(names)}"
        raise ExperimentError(f"{source}: {said}")
    skips = experiment.precision.dtype == "float16"
    if not states and (skips or not step):
        return {}, 0
    moments = {group: dict[str, torch.Tensor]() for group in moment_keys(experiment.optimizer)}
    for group, key in moment_keys(experiment.optimizer).items():
        for name, number in zip(names, numbers, strict=True):
            moment: Any = states.get(number, {}).get(key)
            found = tuple(moment.shape) if is_plain(moment) else "no tensor of plain numbers"
            if found != (shape := tuple(weights[name].shape)):
                raise ExperimentError(
                    f"{source}: its optimizer's {key} of {name} is {found}, and the weight {shape}: its "
                    f"parameters are in another order, or of another model"
                )
            moments[group][name] = moment.float()
    steps = {int(states[number]["step"]) for number in numbers}
    updates = min(steps)
    if len(steps) != 1 or not (updates == step or (skips and 0 <= updates < step)):
        raise ExperimentError(f"{source}: iter_num = {step}, and its optimizer is at step {sorted(steps)}")
    return moments, updates


def _parts(groups: Mapping[str, Tensors], experiment: Experiment) -> Iterator[Part]:
    """Every tensor as one device's, whole, in canonical shape."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in groups[WEIGHTS].items()}
    for group in (WEIGHTS, *moment_keys(experiment.optimizer)):
        for name, array in to_arrays(groups.get(group, zeros), experiment.model).items():
            shard = Shard(name=name, device=0, offset=(0,) * array.ndim, shape=array.shape)
            yield group, shard, array.astype(storage_dtype(experiment))
