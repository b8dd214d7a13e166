"""nanoGPT's ckpt.pt to a checkpoint, and back. Weights without an optimizer begin at step 0.

torch.load(weights_only=True) reads the pickle, so nothing is executed. nanoGPT saves before the update of
iteration `iter_num`. The next batch is number `iter_num` of its stream, and its schedule follows `iter_num`.
AdamW counts the updates, which are fewer if float16 skipped steps.
"""

import io
import math
import pickle
import zipfile
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import UNSET, Struct, UnsetType

from compare.checkpoint.description import WEIGHTS, Checkpoint
from compare.checkpoint.reader import CheckpointReader
from compare.checkpoint.saver import write_checkpoint
from compare.formats.gpt2_names import HEAD, from_gpt2, gpt2_shape
from compare.formats.nanogpt import MODEL_ARGS, experiment_of, settings_of
from compare.numerics.parameters import decays, parameter_table
from compare.spec.experiment import Data, Experiment, ExperimentError, Model, Precision, edited, revalidate
from compare.spec.sections import Count
from compare.system.disk import why_not_readable, write_atomically
from torchpar.weights import moment_keys, nanogpt_name, to_nanogpt

ALONE = "convert the state dict of the model alone"
NOT_EVALUATED = 1e9
"""nanoGPT's best_val_loss before the first evaluation."""


class _Group(Struct):
    """A group of parameters. `load_state_dict` restores it and ignores the config."""

    params: list[int]
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    amsgrad: bool = False
    maximize: bool = False


class _AdamW(Struct):
    """The optimizer's `state_dict()`: groups with and without weight decay, and the state by number."""

    param_groups: tuple[_Group, _Group]
    state: dict[int, dict[str, Any]]


class _Saved(Struct):
    """A ckpt.pt, or a part of one."""

    model: dict[str, Any]
    optimizer: _AdamW | None = None
    model_args: dict[str, Any] = {}
    iter_num: Count = 0
    best_val_loss: Any = None
    """The validation loss of these weights: a scalar tensor, or a float."""
    config: dict[str, Any] = {}


def import_checkpoint(source: Path, target: Path, base: Experiment | None = None) -> None:
    """Write a ckpt.pt of nanoGPT as a checkpoint, a new folder. Raises ExperimentError.

    `base` gives the settings that the file lacks. Its precision and data take precedence, unless they are the
    defaults. A state dict without a config needs `base` for the sizes of the model.
    """
    loaded = read(source)
    if isinstance(loaded, Mapping) and "model" not in loaded:
        loaded = {"model": loaded.get("state_dict", loaded)}  # Lightning's name
    try:
        saved = msgspec.convert(loaded, _Saved)
    except msgspec.ValidationError as error:
        raise ExperimentError(f"{source} is not a ckpt.pt: {error}: give one of nanoGPT") from None
    settings, given, data = {**saved.config, **saved.model_args}, base or Experiment(), {}
    if "cuda" not in str(settings.get("device", "cuda")) and "dtype" in settings:
        settings["dtype"] = "float32"  # nanoGPT saves its option, but computes in float32 on a CPU or a Mac
    skips = settings.get("dtype") == "float16"
    if given.precision != Precision():
        settings.pop("dtype", None)
    if given.data == Data() and "dataset" in settings:
        data["source"] = f"data/{settings['dataset']}"
    if not base and (missing := [name for name in MODEL_ARGS if name not in settings]):
        raise ExperimentError(f"{source} lacks {', '.join(missing)}: give an experiment that has them")
    experiment = edited(experiment_of(settings, base=given), {"data": data})
    step = updates = 0
    if saved.optimizer:
        step = saved.iter_num
        steps = {"max_iters": max(experiment.train.max_iters, step + 1)}
        experiment = edited(experiment, {"train": steps, "optimizer": _resumed(source, saved.optimizer)})
    experiment = revalidate(experiment)
    tensors = {WEIGHTS: _weights(source, saved.model, experiment.model)}
    if saved.optimizer:
        moments, updates = _moments(source, saved.optimizer, step, experiment, skips=skips)
        tensors |= moments
    checkpoint = Checkpoint(
        engine="nanoGPT",
        experiment=experiment,
        step=step,
        updates=updates,
        validation_loss=_validation_loss(saved.best_val_loss),
        corpus_sha256="",
    )
    write_checkpoint(target, checkpoint, tensors)


def _resumed(source: Path, optimizer: _AdamW) -> dict[str, Any]:
    """The settings with which nanoGPT's optimizer continues."""
    decaying, other = optimizer.param_groups
    nanogpts = _Group(other.params, decaying.betas, decaying.eps, weight_decay=0.0)
    if other != nanogpts or decaying.amsgrad or decaying.maximize:
        raise ExperimentError(
            f"{source}: its optimizer has amsgrad, maximize, a weight decay of vectors, or other betas or "
            f"eps for each group, unlike nanoGPT's: {ALONE}"
        )
    beta1, beta2 = decaying.betas
    return {"beta1": beta1, "beta2": beta2, "eps": decaying.eps, "weight_decay": decaying.weight_decay}


def _validation_loss(best: Any) -> float | UnsetType:
    """The validation loss of the saved weights, if nanoGPT had one."""
    is_number = isinstance(best, float) or (is_plain(best) and best.numel() == 1)
    loss = float(best) if is_number else math.inf
    return loss if math.isfinite(loss) and loss < NOT_EVALUATED else UNSET


def export_checkpoint(source: Path, target: Path) -> None:
    """Write a checkpoint that passes `require_nanogpt` as a ckpt.pt, for nanoGPT's train.py and sample.py.

    Raises CheckpointError: the checkpoint is damaged.
    """
    reader = CheckpointReader(source)
    description = reader.description
    experiment, updates = description.experiment, description.updates
    model, config = experiment.model, experiment.optimizer
    rows = {nanogpt_name(row.name): row for row in parameter_table(model)}

    def tensor(group: str, name: str) -> torch.Tensor:
        array = to_nanogpt(rows[name], reader.read(group, rows[name].name))
        return torch.from_numpy(array.copy())

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
        "iter_num": description.step,
        "best_val_loss": torch.tensor(description.validation_loss or NOT_EVALUATED),
        "config": settings_of(experiment),
    }
    saved["model"][HEAD] = saved["model"][nanogpt_name("embedding.token")]
    content = io.BytesIO()
    torch.save(saved, content)
    write_atomically(target, content.getvalue())


def _by_group(model: Model) -> list[list[str]]:
    """nanoGPT's groups of parameters, with and without weight decay. The place of a name is its number."""
    rows = parameter_table(model)
    return [
        [nanogpt_name(row.name) for row in rows if decays(row, "matrices") == does] for does in (True, False)
    ]


def _moments(
    source: Path, optimizer: _AdamW, step: int, experiment: Experiment, *, skips: bool
) -> tuple[dict[str, dict[str, np.ndarray]], int]:
    """Both moments by canonical name, none before the first update, and the number of updates.

    If the dtype `skips` steps that overflow, as float16 does, there may be fewer updates than steps.
    """
    names = [*chain(*_by_group(experiment.model))]
    numbers, states = [number for group in optimizer.param_groups for number in group.params], optimizer.state
    if len(numbers) != len(names):
        counts = f"its optimizer has {len(numbers)} parameters, and the model {len(names)}"
        raise ExperimentError(f"{source}: {counts}: {ALONE}")
    if not states and (skips or not step):
        return {}, 0
    moments, rows = {}, {nanogpt_name(row.name): row for row in parameter_table(experiment.model)}
    for group, key in moment_keys(experiment.optimizer).items():
        by_name = dict[str, np.ndarray]()
        for name, number in zip(names, numbers, strict=True):
            moment: Any = states.get(number, {}).get(key)
            found = tuple(moment.shape) if is_plain(moment) else "not a dense tensor of numbers"
            if found != (shape := gpt2_shape(rows[name], is_linear=True)):
                raise ExperimentError(
                    f"{source}: its optimizer's {key} of {name} is {found}, and the weight {shape}: the "
                    f"parameters of the optimizer have another order: {ALONE}"
                )
            by_name[name] = _array(moment)
        moments[group] = from_gpt2(by_name, experiment.model, str(source), is_linear=True)
    steps = {int(states[number]["step"]) for number in numbers}
    updates = min(steps)
    if len(steps) != 1 or not (updates == step or (skips and 0 <= updates < step)):
        counts = f"iter_num = {step}, and its optimizer is at step {sorted(steps)}"
        raise ExperimentError(f"{source}: {counts}: {ALONE}")
    return moments, updates


def _weights(source: Path, state: Mapping[str, Any], model: Model) -> dict[str, np.ndarray]:
    """The weights of nanoGPT's state dict by canonical name."""
    for name, tensor in state.items():
        if not is_plain(tensor):
            raise ExperimentError(f"{source}: its weight {name} is not a dense tensor of numbers: remove it")
    return from_gpt2({name: _array(t) for name, t in state.items()}, model, str(source), is_linear=True)


def _array(tensor: torch.Tensor) -> np.ndarray:
    """A float64 tensor as it is, any other in float32."""
    return (tensor if tensor.dtype == torch.float64 else tensor.float()).detach().numpy()


def is_plain(value: Any) -> bool:
    """True for a dense floating-point tensor, of any shape, in host memory."""
    is_dense = torch.is_tensor(value) and value.layout == torch.strided
    return is_dense and value.is_floating_point() and value.device.type == "cpu"


def read(source: Path) -> Any:
    """The content of a file of torch.save that has only tensors and plain values. Raises ExperimentError."""
    if why := why_not_readable(source):
        raise ExperimentError(f"{source} {why}")
    try:
        damage = _damage(source)
        loaded = None if damage else torch.load(source, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError:
        why = "it has more than tensors and plain values, or is damaged: save the state dict alone"
        raise ExperimentError(f"{source} cannot be unpickled safely: {why}") from None
    except Exception as error:  # a damaged pickle may raise any
        is_told = isinstance(error, OSError | RuntimeError)
        why = " ".join(str(error).split()) if is_told else "it is not a file of torch.save, or is damaged"
        raise ExperimentError(f"{source} cannot be read: {why}") from None
    if damage:
        raise ExperimentError(f"{source} is damaged: {damage}: copy the file again")
    return loaded


def _damage(source: Path) -> str:
    """The damage of a file of torch.save, in words; '' if its records have their CRCs, or it has no CRCs.

    torch.load ignores the CRCs. A file of PyTorch before 1.6 has none.
    """
    if zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as archive:
            changed = archive.testzip()
        return f"its record {changed} has changed since it was written (CRC-32)" if changed else ""
    with source.open("rb") as file:
        return "its end is missing" if file.read(4) == b"PK\3\4" else ""
