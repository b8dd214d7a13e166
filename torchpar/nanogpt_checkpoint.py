"""nanoGPT's ckpt.pt, with its optimizer's state: into a checkpoint of ours, and out of one.

Nothing is executed: a pickle is read by torch.load(weights_only=True). nanoGPT saves before the update of
iteration `iter_num`: so many updates are done, and the next batch is number `iter_num` of its stream.
"""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct

from compare.checkpoint.description import WEIGHTS, Checkpoint
from compare.checkpoint.reader import CheckpointReader
from compare.checkpoint.saver import Part, write_checkpoint
from compare.host.disk import full_disk_named
from compare.numerics.parameters import decays, parameter_table
from compare.numerics.shards import Shard
from compare.spec.experiment import Experiment, ExperimentError, edited, revalidate
from compare.spec.nanogpt_settings import experiment_of, settings_of
from torchpar.convert import HEAD, is_plain, plain_state, read_pickle
from torchpar.model import GPT
from torchpar.weights import moment_keys, nanogpt_name, to_arrays, to_nanogpt

ENGINE = "nanoGPT"
_NANOGPTS = {"model.activation": "gelu", "model.norm_eps": 1e-5, "optimizer.decay": "matrices"}
"""Settings without a field in a ckpt.pt."""


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
    for key in ("model", "optimizer", "model_args", "iter_num"):
        if not isinstance(loaded, dict) or key not in loaded:
            raise ExperimentError(
                f"{source} has no {key}: it is no checkpoint of nanoGPT's train.py; weights alone are for "
                f"--init_from"
            )
    config, model_args, step = loaded.get("config") or {}, loaded["model_args"], loaded["iter_num"]
    if not isinstance(config, dict) or not isinstance(model_args, dict) or not isinstance(step, int):
        raise ExperimentError(f"{source}: its config, model_args or iter_num are not nanoGPT's")
    settings = {name: value for name, value in {**config, **model_args}.items() if isinstance(name, str)}
    if "cuda" not in str(settings.get("device", "cuda")) and "dtype" in settings:
        settings["dtype"] = "float32"  # what nanoGPT computes in on a CPU or a Mac, whatever it notes
    experiment, _ = experiment_of(settings, base=base)
    optimizer = _adamw(source, loaded["optimizer"])
    changes = {
        "train": {"max_iters": max(experiment.train.max_iters, step + 1)},
        "optimizer": _resumed_settings(source, optimizer),
    }
    experiment = revalidate(edited(experiment, changes))
    state = plain_state(loaded["model"], experiment.model, origin=str(source))
    moments, updates = _moments(source, optimizer, state, experiment, step)
    groups = {WEIGHTS: state, **moments}
    checkpoint = Checkpoint(
        engine=ENGINE, experiment=experiment, step=step, updates=updates, corpus_sha256=""
    )
    write_checkpoint(target, checkpoint, _parts(groups, experiment))


def export_checkpoint(source: Path, target: Path) -> None:
    """Write a checkpoint of ours as nanoGPT's ckpt.pt, which its train.py resumes and its sample.py reads.

    Args:
        source: folder of the checkpoint.
        target: the file; replaced if it is there.

    Raises:
        ExperimentError: the checkpoint is not whole, or is not AdamW's.
    """
    reader = CheckpointReader(source)
    description = reader.description
    experiment = description.experiment
    if experiment.optimizer.name != "adamw":
        raise ExperimentError(f"{source}: nanoGPT has AdamW only, and this is of {experiment.optimizer.name}")
    other = {"model.activation": experiment.model.activation, "model.norm_eps": experiment.model.norm_eps}
    other["optimizer.decay"] = experiment.optimizer.decay
    for key, value in _NANOGPTS.items():
        if other[key] != value:
            raise ExperimentError(
                f"{source}: {key} = {other[key]}, and nanoGPT has {value} alone: its ckpt.pt would be of "
                f"another model; --to huggingface or weights keeps it"
            )
    rows = {nanogpt_name(row.name): row for row in parameter_table(experiment.model)}

    def tensor(group: str, name: str) -> torch.Tensor:
        array = to_nanogpt(rows[name], reader.read(group, rows[name].name))
        return torch.from_numpy(array.copy()).float()

    state = {name: tensor(WEIGHTS, name) for name in _in_order(experiment)}
    state[HEAD] = state[nanogpt_name("embedding.token")]
    saved = {
        "model": state,
        "optimizer": _optimizer_state(experiment, description.updates, tensor),
        "model_args": settings_of(experiment, only_model=True),
        "iter_num": description.updates,
        "best_val_loss": torch.tensor(1e9),  # nanoGPT's own before it has evaluated
        "config": settings_of(experiment),
    }
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    with full_disk_named(target.parent):
        torch.save(saved, temporary)
        os.replace(temporary, target)


def _in_order(experiment: Experiment) -> list[str]:
    """nanoGPT's parameters in the order in which its module has them."""
    with torch.device("meta"):
        return [name for name, _ in GPT(experiment.model).named_parameters()]


def _by_group(experiment: Experiment) -> list[list[str]]:
    """nanoGPT's two groups of parameters: what decays, and the rest; their place is their number."""
    rows = {nanogpt_name(row.name): row for row in parameter_table(experiment.model)}
    order = _in_order(experiment)
    return [[n for n in order if decays(rows[n], "matrices") == does] for does in (True, False)]


def _adamw(source: Path, state: Any) -> _AdamW:
    try:
        return msgspec.convert(state, _AdamW)
    except msgspec.ValidationError as error:
        raise ExperimentError(
            f"{source}: its optimizer is not the state_dict of nanoGPT's: {error}"
        ) from None


def _resumed_settings(source: Path, optimizer: _AdamW) -> dict[str, float]:
    """Settings of the optimizer with which nanoGPT goes on: those that it was saved with."""
    decaying, other = optimizer.param_groups
    odd = {
        "amsgrad": decaying.amsgrad or other.amsgrad,
        "maximize": decaying.maximize or other.maximize,
        "weight decay of vectors": bool(other.weight_decay),
        "betas or eps of each group": (decaying.betas, decaying.eps) != (other.betas, other.eps),
    }
    for what, is_there in odd.items():
        if is_there:
            raise ExperimentError(f"{source}: its optimizer has {what}: nanoGPT's has not, nor has ours")
    beta1, beta2 = decaying.betas
    return {"beta1": beta1, "beta2": beta2, "eps": decaying.eps, "weight_decay": decaying.weight_decay}


def _moments(
    source: Path,
    optimizer: _AdamW,
    weights: Mapping[str, torch.Tensor],
    experiment: Experiment,
    step: int,
) -> tuple[dict[str, dict[str, torch.Tensor]], int]:
    """Both moments by nanoGPT's names, zeros before the first update; and the number of updates.

    In float16 nanoGPT's GradScaler skips the steps that overflow: then there are fewer updates than steps.
    """
    names = [name for group in _by_group(experiment) for name in group]
    numbers = [number for group in optimizer.param_groups for number in group.params]
    if len(numbers) != len(names):
        raise ExperimentError(
            f"{source}: its optimizer has {len(numbers)} parameters, and the model {len(names)}"
        )
    number_of, kept = dict(zip(names, numbers, strict=True)), optimizer.state
    if not kept and not step:
        return {}, 0
    found: dict[str, dict[str, torch.Tensor]] = {}
    for group, key in moment_keys(experiment.optimizer).items():
        found[group] = {}
        for name, number in number_of.items():
            if number not in kept or key not in kept[number]:
                raise ExperimentError(f"{source}: its optimizer has no {key} of {name}")
            moment, weight = kept[number][key], weights[name]
            if not is_plain(moment) or moment.shape != weight.shape:
                shape = tuple(moment.shape) if is_plain(moment) else "no tensor of plain numbers"
                raise ExperimentError(
                    f"{source}: its optimizer's {key} of {name} is {shape}, and the weight "
                    f"{tuple(weight.shape)}: its parameters are in another order, or of another model"
                )
            found[group][name] = moment.float()
    steps = {_whole(kept[number].get("step")) for number in numbers}
    skips = experiment.precision.dtype == "float16"
    if len(steps) != 1 or not (steps == {step} or (skips and 0 <= max(steps) < step)):
        raise ExperimentError(f"{source}: iter_num = {step}, and its optimizer is at step {sorted(steps)}")
    return found, steps.pop()


def _whole(number: Any) -> int:
    """How many updates a parameter had, a number or a tensor of one; -1 for what cannot be that."""
    value = number.item() if torch.is_tensor(number) and number.numel() == 1 else number
    is_whole = isinstance(value, int | float) and math.isfinite(value) and value == int(value)
    return int(value) if is_whole else -1


def _optimizer_state(experiment: Experiment, updates: int, tensor: Any) -> dict[str, Any]:
    """The `state_dict()` of nanoGPT's AdamW."""
    config, groups, state, number = experiment.optimizer, [], {}, 0
    for names, weight_decay in zip(_by_group(experiment), (config.weight_decay, 0.0), strict=True):
        groups.append(
            {
                **torch.optim.AdamW([torch.zeros(1)]).state_dict()["param_groups"][0],
                "lr": config.learning_rate,
                "betas": (config.beta1, config.beta2),
                "eps": config.eps,
                "weight_decay": weight_decay,
                "params": list(range(number, number + len(names))),
            }
        )
        for name in names:
            if updates:
                kept = {key: tensor(group, name) for group, key in moment_keys(config).items()}
                state[number] = {"step": torch.tensor(float(updates)), **kept}
            number += 1
    return {"state": state, "param_groups": groups}


def _parts(groups: Mapping[str, Mapping[str, torch.Tensor]], experiment: Experiment) -> Iterator[Part]:
    """Every tensor as one device's, whole, in canonical shape."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in groups[WEIGHTS].items()}
    for group in (WEIGHTS, *moment_keys(experiment.optimizer)):
        for name, array in to_arrays(groups.get(group, zeros), experiment.model).items():
            shard = Shard(name=name, device=0, offset=(0,) * array.ndim, shape=array.shape)
            yield group, shard, array.astype(_storage(experiment))


def _storage(experiment: Experiment) -> str:
    return "float64" if experiment.precision.dtype == "float64" else "float32"


def decode_base(text: str) -> Experiment:
    """The experiment from JSON; the default one if there is no text. Raises ExperimentError."""
    try:
        return msgspec.json.decode(text, type=Experiment) if text else Experiment()
    except msgspec.MsgspecError as error:
        raise ExperimentError(f"--experiment: {' '.join(str(error).split())}") from None
