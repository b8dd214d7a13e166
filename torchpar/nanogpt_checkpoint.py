"""nanoGPT's ckpt.pt, with its optimizer's state: into a checkpoint of ours, and out of one.

Nothing is executed: a pickle is read by torch.load(weights_only=True). nanoGPT saves before the update of
iteration `iter_num`: so many updates are done, and the next batch is number `iter_num` of its stream.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct

from compare.checkpoint.description import WEIGHTS, Checkpoint
from compare.checkpoint.reader import CheckpointReader
from compare.checkpoint.saver import Part, write_checkpoint
from compare.host.disk import full_disk_named
from compare.numerics.parameters import decays, parameter_table, storage_dtype
from compare.numerics.shards import Shard
from compare.spec.experiment import Experiment, ExperimentError, edited, revalidate
from compare.spec.nanogpt_settings import experiment_of, settings_of
from torchpar.convert import HEAD, is_plain, plain_state, read_pickle
from torchpar.model import GPT
from torchpar.weights import moment_keys, nanogpt_name, to_arrays, to_nanogpt

ENGINE = "nanoGPT"
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
    """The `state_dict()` of nanoGPT's optimizer: what decays, and the rest; the state by number."""

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
    """Write nanoGPT's full state as a checkpoint of ours.

    Args:
        source: nanoGPT's ckpt.pt.
        target: folder of the checkpoint; must not exist.
        base: for what the file does not say: where the data is, and the dtype in which numbers are kept.

    Raises:
        ExperimentError: the file cannot be read safely, has no optimizer's state, or does not fit a model.
    """
    loaded = read_pickle(source)
    try:
        saved = msgspec.convert(loaded, _Saved)
    except msgspec.ValidationError as error:
        raise ExperimentError(
            f"{source} is no checkpoint of nanoGPT's train.py: {error} (weights alone are for --init_from)"
        ) from None
    settings, (decaying, other) = {**saved.config, **saved.model_args}, saved.optimizer.param_groups
    if "cuda" not in str(settings.get("device", "cuda")) and "dtype" in settings:
        settings["dtype"] = "float32"  # what nanoGPT computes in on a CPU or a Mac, whatever it notes
    if any((decaying.amsgrad, other.amsgrad, decaying.maximize, other.maximize, other.weight_decay)) or (
        (decaying.betas, decaying.eps) != (other.betas, other.eps)
    ):
        raise ExperimentError(
            f"{source}: its optimizer has amsgrad, maximize, a weight decay of vectors, or other betas or "
            f"eps for each group: nanoGPT's has not, nor has ours"
        )
    experiment, _ = experiment_of(settings, base=base)
    names = ("beta1", "beta2", "eps", "weight_decay")
    resumed = (*decaying.betas, decaying.eps, decaying.weight_decay)
    steps = {"max_iters": max(experiment.train.max_iters, saved.iter_num + 1)}
    changes = {"train": steps, "optimizer": dict(zip(names, resumed, strict=True))}
    experiment = revalidate(edited(experiment, changes))
    weights = plain_state(saved.model, experiment.model, origin=str(source))
    moments, updates = _moments(source, saved, weights, experiment)
    checkpoint = Checkpoint(
        engine=ENGINE, experiment=experiment, step=saved.iter_num, updates=updates, corpus_sha256=""
    )
    write_checkpoint(target, checkpoint, _parts({WEIGHTS: weights, **moments}, experiment))


def export_checkpoint(source: Path, target: Path) -> None:
    """Write a checkpoint of ours as nanoGPT's ckpt.pt, which its train.py resumes and its sample.py reads.

    Args:
        source: folder of the checkpoint.
        target: the file; replaced if it is there.

    Raises:
        ExperimentError: the checkpoint is not whole, or is of what nanoGPT has not.
    """
    reader = CheckpointReader(source)
    experiment, updates = reader.description.experiment, reader.description.updates
    model, optimizer = experiment.model, experiment.optimizer
    for key, value, nanogpts in (
        ("optimizer.name", optimizer.name, "adamw"),
        ("optimizer.decay", optimizer.decay, "matrices"),
        ("model.activation", model.activation, "gelu"),
        ("model.norm_eps", model.norm_eps, 1e-5),
    ):
        if value != nanogpts:
            raise ExperimentError(
                f"{source}: {key} = {value}, and nanoGPT has {nanogpts} alone: its ckpt.pt would be of "
                f"another training; --to huggingface or weights keeps it"
            )
    rows = {nanogpt_name(row.name): row for row in parameter_table(model)}

    def tensor(group: str, name: str) -> torch.Tensor:
        array = to_nanogpt(rows[name], reader.read(group, rows[name].name))
        return torch.from_numpy(array.copy()).float()

    state = {name: tensor(WEIGHTS, name) for name in _in_order(experiment)}
    saved = {
        "model": {**state, HEAD: state[nanogpt_name("embedding.token")]},
        "optimizer": _optimizer_state(experiment, updates, tensor),
        "model_args": settings_of(experiment, only_model=True),
        "iter_num": updates,
        "best_val_loss": torch.tensor(1e9),  # nanoGPT's own before it has evaluated
        "config": settings_of(experiment),
    }
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    with full_disk_named(target.parent):
        torch.save(saved, temporary)
        os.replace(temporary, target)


def decode_base(text: str) -> Experiment:
    """The experiment from JSON; the default one if there is no text. Raises ExperimentError."""
    try:
        return msgspec.json.decode(text, type=Experiment) if text else Experiment()
    except msgspec.MsgspecError as error:
        raise ExperimentError(f"--experiment: {' '.join(str(error).split())}") from None


def _in_order(experiment: Experiment) -> list[str]:
    """nanoGPT's parameters in the order in which its module has them."""
    with torch.device("meta"):
        return [name for name, _ in GPT(experiment.model).named_parameters()]


def _by_group(experiment: Experiment) -> list[list[str]]:
    """nanoGPT's two groups of parameters: what decays, and the rest; their place is their number."""
    rows = {nanogpt_name(row.name): row for row in parameter_table(experiment.model)}
    order = _in_order(experiment)
    return [[n for n in order if decays(rows[n], "matrices") == does] for does in (True, False)]


def _moments(
    source: Path, saved: _Saved, weights: Tensors, experiment: Experiment
) -> tuple[dict[str, dict[str, torch.Tensor]], int]:
    """Both moments by nanoGPT's names, zeros before the first update; and the number of updates.

    In float16 nanoGPT's GradScaler skips the steps that overflow: then there are fewer updates than steps.
    """
    names = [name for group in _by_group(experiment) for name in group]
    numbers = [number for group in saved.optimizer.param_groups for number in group.params]
    states, step = saved.optimizer.state, saved.iter_num
    if len(numbers) != len(names):
        raise ExperimentError(
            f"{source}: its optimizer has {len(numbers)} parameters, and the model {len(names)}"
        )
    if not states and not step:
        return {}, 0
    moments: dict[str, dict[str, torch.Tensor]] = {group: {} for group in moment_keys(experiment.optimizer)}
    for group, key in moment_keys(experiment.optimizer).items():
        for name, number in zip(names, numbers, strict=True):
            moment: Any = states.get(number, {}).get(key)
            shape = tuple(weights[name].shape)
            if not is_plain(moment) or tuple(moment.shape) != shape:
                there = tuple(moment.shape) if is_plain(moment) else "no tensor of plain numbers"
                raise ExperimentError(
                    f"{source}: its optimizer's {key} of {name} is {there}, and the weight {shape}: its "
                    f"parameters are in another order, or of another model"
                )
            moments[group][name] = moment.float()
    steps = {_count(states[number].get("step")) for number in numbers}
    skips = experiment.precision.dtype == "float16"
    if len(steps) != 1 or not (steps == {step} or (skips and 0 <= max(steps) < step)):
        raise ExperimentError(f"{source}: iter_num = {step}, and its optimizer is at step {sorted(steps)}")
    return moments, steps.pop()


def _count(number: Any) -> int:
    """How many updates a parameter had, a number or a tensor of one; -1 for what cannot be that."""
    value = number.item() if torch.is_tensor(number) and number.numel() == 1 else number
    is_whole = isinstance(value, int | float) and math.isfinite(value) and value == int(value)
    return int(value) if is_whole else -1


def _optimizer_state(
    experiment: Experiment, updates: int, tensor: Callable[[str, str], torch.Tensor]
) -> dict[str, Any]:
    """The `state_dict()` of nanoGPT's AdamW, with moments from `tensor(group, name)`."""
    config, groups = experiment.optimizer, _by_group(experiment)
    adamw = torch.optim.AdamW(
        [
            {"params": [torch.empty(0) for _ in names], "weight_decay": weight_decay}
            for names, weight_decay in zip(groups, (config.weight_decay, 0.0), strict=True)
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    state = {}
    for number, name in enumerate(name for names in groups for name in names) if updates else ():
        moments = {key: tensor(group, name) for group, key in moment_keys(config).items()}
        state[number] = {"step": torch.tensor(float(updates)), **moments}
    return {**adamw.state_dict(), "state": state}


def _parts(groups: Mapping[str, Tensors], experiment: Experiment) -> Iterator[Part]:
    """Every tensor as one device's, whole, in canonical shape."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in groups[WEIGHTS].items()}
    for group in (WEIGHTS, *moment_keys(experiment.optimizer)):
        for name, array in to_arrays(groups.get(group, zeros), experiment.model).items():
            shard = Shard(name=name, device=0, offset=(0,) * array.ndim, shape=array.shape)
            yield group, shard, array.astype(storage_dtype(experiment))
