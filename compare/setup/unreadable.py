"""Advice for a source in which `shardpair convert` finds no checkpoint: what to give instead."""

import zipfile
from pathlib import Path

from compare.checkpoint.description import DESCRIPTION
from compare.formats.huggingface import CONFIG, INDEX, WEIGHTS_FILE

ORBAX_METADATA = "_CHECKPOINT_METADATA"
SAVE = "load it with transformers, and write it with save_pretrained(FOLDER, safe_serialization=True)"
HUB = "is a cache of Hugging Face's hub"
TO_TORCH = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER ckpt.pt"
FOLDERS = {
    "adapter_config.json": "is an adapter, such as LoRA: save the model after merge_and_unload()",
    "pytorch_model*.bin": f"has {{found.name}} and no {WEIGHTS_FILE}: {SAVE}",
    "tf_model.h5": f"has TensorFlow's {{found.name}} and no {WEIGHTS_FILE}: {SAVE}",
    "flax_model.msgpack": f"has Flax's {{found.name}} and no {WEIGHTS_FILE}: {SAVE}",
    "model-*.safetensors": f"has {{found.name}}, but {CONFIG} or {INDEX} is missing: copy the whole folder",
    WEIGHTS_FILE: f"has {WEIGHTS_FILE} and no {CONFIG}: copy the whole folder",
    CONFIG: f"has {CONFIG} and no {WEIGHTS_FILE}: copy the whole folder",
    ".metadata": f"is a folder of torch.distributed.checkpoint: `{TO_TORCH}` makes a file to convert",
    f"*/{ORBAX_METADATA}": "is a folder of several orbax checkpoints: give one, such as {found.parent}",
    "snapshots/*/config.json": f"{HUB}: give {{found.parent}}",
    "models--*/snapshots/*/config.json": f"{HUB}: give a model, such as {{found.parent}}",
    "*.pt": "is a folder with a file of torch.save: give the file, such as {found}",
}
"""Pattern of a file -> the predicate of a sentence about its folder."""


def advice_for(source: Path) -> str:
    """A clause about the contents of a source, with the remedy; '' if nothing in it is recognised."""
    if not source.exists():
        return "does not exist: give a file or a folder; `hf download` gets a model of Hugging Face's hub"
    if source.is_dir():
        found = (
            (next(iter(sorted(source.glob(pattern))), None), words) for pattern, words in FOLDERS.items()
        )
        return next((words.format(found=path) for path, words in found if path), "")
    if any((source.parent / name).is_file() for name in (CONFIG, DESCRIPTION)):
        return f"is one file of a checkpoint: give the folder {source.parent}"
    if source.suffix == ".safetensors":
        return "has weights, but not the sizes of their model: give it to --init_from"
    return "is a file of torch.save: rename it to end in .pt" if zipfile.is_zipfile(source) else ""
