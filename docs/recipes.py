"""`make recipes`: nanoGPT's recipes for small machines, from files in nanoGPT's format; docs/recipes.json.

    python docs/recipes.py cpu          # one of them

Each is a folder as nanoGPT has it: config/NAME.py, and data/pages with train.bin, val.bin and meta.pkl, of
the characters of a megabyte of Python's standard library. Every engine trains it from the config file. What
is kept is the evaluations, how long it took, and the verdict; the first recipe's curves are docs/recipe.png.
"""

import pickle
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from compare.contract.record import read_record
from compare.numerics.data import standard_library_text

RECIPES = Path(__file__).parent / "recipes.json"
PICTURE = Path(__file__).parent / "recipe.png"
ENGINES = ("torch-manual", "torch-library", "jax-manual", "jax-compiler")
CHARACTERS = 1_000_000
VERDICT = re.compile(r"^PASS|: FAIL at ")
SETTINGS: dict[str, dict[str, object]] = {
    "cpu": {
        "eval_interval": 250,
        "eval_iters": 20,
        "gradient_accumulation_steps": 1,
        "batch_size": 12,
        "block_size": 64,
        "n_layer": 4,
        "n_head": 4,
        "n_embd": 128,
        "dropout": 0.0,
        "learning_rate": 1e-3,
        "max_iters": 2000,
        "lr_decay_iters": 2000,
        "min_lr": 1e-4,
        "beta2": 0.99,
        "warmup_iters": 100,
    },
    "baby": {
        "eval_interval": 50,
        "eval_iters": 10,
        "gradient_accumulation_steps": 1,
        "batch_size": 1,
        "block_size": 256,
        "n_layer": 6,
        "n_head": 6,
        "n_embd": 384,
        "dropout": 0.2,
        "learning_rate": 1e-3,
        "max_iters": 100,
        "lr_decay_iters": 5000,
        "min_lr": 1e-4,
        "beta2": 0.99,
        "warmup_iters": 100,
    },
}
"""nanoGPT's README for a CPU; and its config/train_shakespeare_char.py, 100 steps of one sequence."""


class Outcome(Struct, frozen=True, kw_only=True):
    """What came of a recipe."""

    settings: dict[str, object]
    verdict: str
    """The command's line that says it, whatever it is."""
    minutes: float
    """Of all engines, one after the other."""
    evaluations: dict[str, dict[int, tuple[float, float]]]
    """By engine and step: the mean loss of the training and of the validation split, in nats."""


def read_recipes() -> dict[str, Outcome]:
    """What is stored, by name; {} before the first `make recipes`."""
    return msgspec.json.decode(RECIPES.read_bytes(), type=dict[str, Outcome]) if RECIPES.is_file() else {}


def write_folder(folder: Path, settings: dict[str, object]) -> Path:
    """A folder as nanoGPT has it. Returns its config file."""
    data, config = folder / "data" / "pages", folder / "config" / "train_pages_char.py"
    data.mkdir(parents=True)
    config.parent.mkdir()
    text = standard_library_text(CHARACTERS).decode("ascii", errors="ignore")
    characters = sorted(set(text))
    number = {character: index for index, character in enumerate(characters)}
    tokens = np.array([number[character] for character in text], np.uint16)
    cut = int(0.9 * len(tokens))
    tokens[:cut].tofile(data / "train.bin")
    tokens[cut:].tofile(data / "val.bin")
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters)), "stoi": number}
    (data / "meta.pkl").write_bytes(pickle.dumps(meta))
    lines = [f"{name} = {value!r}" for name, value in {"dataset": "pages", **settings}.items()]
    config.write_text("\n".join(lines) + "\n")
    return config


def train(name: str) -> Outcome:
    """One recipe, in all engines."""
    with tempfile.TemporaryDirectory() as scratch:
        config, run_dir = write_folder(Path(scratch), SETTINGS[name]), Path(scratch) / "run"
        shardpair = [sys.executable, "-m", "compare"]
        command = [*shardpair, "run", str(config), "--preset", "single", "--engines", *ENGINES]
        begun = time.perf_counter()
        done = subprocess.run([*command, "--run_dir", str(run_dir)], check=False, stdout=subprocess.PIPE)
        minutes = (time.perf_counter() - begun) / 60
        if name == next(iter(SETTINGS)):
            picture = ["report", str(run_dir), "--picture", str(PICTURE)]
            subprocess.run([*shardpair, *picture], check=True, stdout=subprocess.DEVNULL)
        return Outcome(
            settings=SETTINGS[name],
            verdict=next(line for line in done.stdout.decode().splitlines() if VERDICT.search(line)).strip(),
            minutes=minutes,
            evaluations={
                engine: {one.step: (one.train, one.validation) for one in record.evaluations}
                for engine in ENGINES
                for record in (read_record(run_dir / engine),)
            },
        )


def main(names: list[str]) -> None:
    """Train the recipes of these names, or all, and keep what comes of them."""
    for name in names or SETTINGS:
        stored = read_recipes() | {name: train(name)}
        print(f"{name}: {stored[name].verdict}", file=sys.stderr, flush=True)
        RECIPES.write_bytes(msgspec.json.format(msgspec.json.encode(stored), indent=1) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
