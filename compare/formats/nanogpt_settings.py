"""nanoGPT's settings by the names of its train.py, as an experiment, and back.

One table contains all supported settings. Other settings, such as log intervals, are listed and ignored.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from compare.spec.experiment import Experiment, ExperimentError, checked

FIELDS = {
    **dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout"), "model"),
    **dict.fromkeys(("learning_rate", "decay_lr", "warmup_iters", "lr_decay_iters", "min_lr"), "optimizer"),
    **dict.fromkeys(("weight_decay", "beta1", "beta2", "grad_clip"), "optimizer"),
    **dict.fromkeys(("max_iters", "batch_size", "gradient_accumulation_steps"), "train"),
    "dtype": "precision",
}
"""The section that a setting of nanoGPT is in here, under the same name."""
MODEL_ARGS = [name for name, section in FIELDS.items() if section == "model"]
"""Model settings in nanoGPT's checkpoints, in nanoGPT's order."""


def experiment_of(settings: Mapping[str, Any], *, base: Experiment) -> Experiment:
    """Experiment of nanoGPT's settings; `base` provides all other fields. Raises ExperimentError."""
    sections = msgspec.to_builtins(base)
    sections["optimizer"] |= {"name": "adamw", "momentum": 0.0}
    for name, section in FIELDS.items():
        if name in settings:
            value, is_switch = settings[name], isinstance(sections[section][name], bool)
            sections[section][name] = bool(value) if is_switch and value in (0, 1) else value
    try:
        return checked(sections)
    except ExperimentError as error:
        raise ExperimentError(f"nanoGPT's settings: {error}") from None


def settings_of(experiment: Experiment, *, only_model: bool = False) -> dict[str, Any]:
    """nanoGPT's settings of an experiment, for the fields that nanoGPT has."""
    sections = msgspec.to_builtins(experiment)
    if only_model:
        return {name: sections["model"][name] for name in MODEL_ARGS}
    settings = {name: sections[section][name] for name, section in FIELDS.items()}
    return {**settings, "dataset": Path(experiment.data.source).name}  # a folder in nanoGPT's data/
