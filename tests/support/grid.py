"""Runs that many tests read: each is made once a session, by the worker that needs it first."""

import fcntl
import subprocess
from collections.abc import Callable
from pathlib import Path

from compare.contract.record import MANIFEST, Record, read_record
from compare.spec.engines.registry import REFERENCE

TEXT = Path(__file__).parents[2] / "LICENSE"
"""The text that all rows train on."""
SETTINGS = (
    *("--model.n_layer", "2", "--model.dropout", "0.2", "--train.max_iters", "3"),
    *("--data.source", str(TEXT), "--keep_tensors"),
)
EVALUATED = ("--train.eval_interval", "2", "--train.eval_iters", "2")
DEVICES = {"ddp": 2, "fsdp": 2, "zero1": 2, "tp_sp": 2, "cp": 2, "pp": 2, "fsdp_tp_pp": 8}
"""The layouts that every engine trains that can, and on how many devices."""
TODAY = (
    *("--model.position", "rope", "--model.norm", "rmsnorm", "--model.n_kv_head", "2"),
    *("--model.activation", "relu_squared"),
)
"""nanochat's parts, of which tp gives each device one head of keys and of values."""
IN_PARTS = ("--train.loss_chunks", "4", *TODAY)
ON_HOST = ("--layout.offload", "optimizer", "--checkpoint.every", "3")
SOME = {
    "fsdp_tp": (("torch-manual", "torch-library", "torch-compiler"), 4, IN_PARTS),
    "fsdp_tp, moments on the host": (
        ("jax-compiler", "jax-explicit", "jax-manual", "torch-manual"),
        4,
        (*IN_PARTS, *ON_HOST),
    ),
}
"""Runs of some engines: on how many devices, and with which other flags; a row's first word is a preset."""
ONE_DEVICE = {"single": (), "single, in parts": IN_PARTS}
"""Runs of the reference: a loss in parts, by a model of today, is another training."""


def arguments_of(row: str) -> tuple[str, ...]:
    """The command of a row; one device needs no engine but the reference."""
    if row in ONE_DEVICE:
        return ("run", "check", "--engines", REFERENCE, *ONE_DEVICE[row])
    engines, devices, flags = SOME.get(row, ((), DEVICES.get(row, 0), ()))
    chosen = ("--engines", *engines) if engines else ()
    return ("run", "check", "--preset", row.split(",")[0], "--devices", str(devices), *chosen, *flags)


class Grid:
    """Runs in one folder. Rows of DEVICES and SOME train `check` with dropout and evaluations."""

    def __init__(self, folder: Path, start: Callable[..., subprocess.CompletedProcess]) -> None:
        """`folder` is shared by all workers; `start` runs `shardpair` in it."""
        self._folder, self._start = folder, start

    def once(self, name: str, *arguments: str, codes: tuple[int, ...] = (0,)) -> Path:
        """The folder of a command, which only the first call runs. Nothing in it may be changed."""
        self._folder.mkdir(parents=True, exist_ok=True)
        done = self._folder / f"{name}.done"
        with (self._folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                ended = self._start(*arguments, "--run_dir", name, "--quiet")
                assert ended.returncode in codes, ended.stdout + ended.stderr
                done.touch()
        return self._folder / name

    def run(self, row: str) -> Path:
        """The folder of a row's `shardpair run`, with its tensors."""
        return self.once(row, *arguments_of(row), *SETTINGS, *EVALUATED)

    def records(self, row: str) -> dict[str, Record]:
        found = self.run(row).glob(f"*/{MANIFEST}")
        return {path.parent.name: read_record(path.parent) for path in sorted(found)}

    def reference(self, row: str = "single") -> Record:
        """The record of PyTorch's plain module on one device, for a row."""
        *_, flags = SOME.get(row, ((), 0, ()))
        one = "single, in parts" if "--train.loss_chunks" in flags else "single"
        return read_record(self.run(one) / REFERENCE)
