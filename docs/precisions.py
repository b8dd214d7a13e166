"""`make precisions`: nanoGPT's CPU recipe in float32, bfloat16 and float16; docs/precisions.json.

    python docs/precisions.py bfloat16        # one of them; float16 takes most of the time, half an hour

Every engine trains 200 steps in each, held against torch-manual in the same precision, and torch-manual once
more from weights that are changed by a part in 10^7. docs/precisions.png has the losses, and how far apart
they are: what engines differ by, beside what the precision costs and what training makes of any difference.
"""

import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np
from matplotlib.figure import Figure
from msgspec import Struct
from safetensors.numpy import save_file

from compare.api import experiment, run
from compare.host.json_files import write_json
from compare.numerics.parameters import initial_parameters
from compare.present.report.canvas import colour
from compare.present.report.saved import save_figure
from compare.spec.experiment import Experiment

PRECISIONS = Path(__file__).parent / "precisions.json"
PICTURE = PRECISIONS.with_suffix(".png")
ENGINES = ("torch-manual", "torch-library", "jax-manual", "jax-compiler")
DTYPES = ("float32", "bfloat16", "float16")
STEPS = 200
SETTINGS = {"train": {"max_iters": STEPS}, "optimizer": {"lr_decay_iters": STEPS, "warmup_iters": 10}}
SMOOTH = 10
NEARBY = 1e-7
WIDTHS = (6.0, 3.0, 1.0)  # where curves coincide, one shows in the other


class Curves(Struct, frozen=True, kw_only=True):
    """What came of one precision."""

    verdict: str
    losses: dict[str, list[float]]
    """By engine, of every step."""
    skipped: dict[str, int]
    """Steps whose gradients overflowed, by engine."""
    nearby: list[float] = []
    """Losses of the first engine from initial weights that are changed by `NEARBY`."""


def read_precisions() -> dict[str, Curves]:
    """What is stored, by dtype; {} before the first `make precisions`."""
    return (
        msgspec.json.decode(PRECISIONS.read_bytes(), type=dict[str, Curves]) if PRECISIONS.is_file() else {}
    )


def apart(one: list[float], other: list[float]) -> np.ndarray:
    """Relative differences of two curves, (steps,)."""
    return np.abs(np.array(one) - other) / np.abs(other)


def between_engines(curves: Curves) -> np.ndarray:
    """The largest relative difference of any engine from the first, (steps,)."""
    first, *others = curves.losses.values()
    return np.max([apart(losses, first) for losses in others], axis=0)


def from_float32(stored: dict[str, Curves], dtype: str) -> np.ndarray:
    """Relative differences of the first engine's losses from its own in float32, (steps,)."""
    return apart(stored[dtype].losses[ENGINES[0]], stored[DTYPES[0]].losses[ENGINES[0]])


def changed_weights(spec: Experiment, path: Path) -> Path:
    """Write the seed's weights, each moved by `NEARBY` of itself, up or down."""
    signs = np.random.default_rng(0)
    weights = {
        name: (weight * (1 + NEARBY * signs.choice([-1, 1], weight.shape))).astype(weight.dtype)
        for name, weight in initial_parameters(spec).items()
    }
    save_file(weights, path)
    return path


def train(dtype: str) -> Curves:
    """One precision, in all engines on one device."""
    with tempfile.TemporaryDirectory() as name:
        scratch, spec = Path(name), experiment("cpu", precision={"dtype": dtype}, **SETTINGS)
        result = run(spec, engines=list(ENGINES), preset="single", run_dir=scratch / dtype)
        changed = changed_weights(spec, scratch / "changed.safetensors")
        nearby = run(
            spec,
            engines=list(ENGINES[:1]),
            preset="single",
            ladder=False,
            run_dir=scratch / "nearby",
            init_from=changed,
        )
        return Curves(
            nearby=nearby[ENGINES[0]].loss.tolist(),
            verdict=result.sentence(),
            losses={training.name: training.loss.tolist() for training in result},
            skipped={t.name: sum(step.skipped for step in t.record.steps) for t in result},
        )


def draw(stored: dict[str, Curves], figure: Figure) -> None:
    """Losses on the left, differences on the right."""
    left, right = figure.subplots(1, 2)
    for number, dtype in enumerate(DTYPES):
        curves, own = stored[dtype], colour(number)
        left.plot(smoothed(curves.losses[ENGINES[0]]), label=dtype, color=own, linewidth=WIDTHS[number])
        right.plot(smoothed(between_engines(curves)), "--", color=own, label=f"{dtype}: engines")
        if number:
            right.plot(smoothed(from_float32(stored, dtype)), color=own, label=f"{dtype}: from float32")
        if curves.nearby:
            off = apart(curves.nearby, curves.losses[ENGINES[0]])
            right.plot(smoothed(off), ":", color=own, label=f"{dtype}: weights changed by {NEARBY:g}")
    left.set(xlabel="step", ylabel=f"loss (nats), mean of {SMOOTH}")
    right.set(xlabel="step", ylabel=f"relative difference of losses, mean of {SMOOTH}", yscale="log")
    left.legend()
    figure.legend(*right.get_legend_handles_labels(), loc="outside right upper", fontsize="small")


def smoothed(values: object) -> np.ndarray:
    """Means over windows, at the step that each begins with."""
    return np.convolve(np.asarray(values), np.ones(SMOOTH) / SMOOTH, mode="valid")


def main(names: list[str]) -> None:
    """Train in these precisions, or in all, and keep what comes of them."""
    stored = read_precisions() if names else {}
    for dtype in names or DTYPES:
        stored[dtype] = train(dtype)
        print(f"{dtype}: {stored[dtype].verdict}", file=sys.stderr, flush=True)
    write_json(PRECISIONS, stored)
    save_figure(PICTURE, lambda figure: draw(stored, figure), size=(12, 4))


if __name__ == "__main__":
    main(sys.argv[1:])
