"""`make survival`: kills, stops and damage, and what is left after each; docs/survival.json.

Runs that save after every step, of two engines on two devices, are ended in every way, at every moment; what
is kept is what was said, the exit code, how long it took to end, and whether the newest checkpoint is whole.
A disk fills up while they save, for which root mounts a small one. And a checkpoint is damaged in every way,
and resumed. It takes some minutes. The same, on more engines, are tests.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from compare.checkpoint.description import CHECKPOINTS, DESCRIPTION, UNFINISHED, checkpoints_in
from compare.checkpoint.reader import CheckpointReader

SURVIVAL = Path(__file__).parent / "survival.json"
SHARDPAIR = [sys.executable, "-m", "compare"]
SIZES = ["--model.n_layer", "1", "--train.max_iters", "1000000", "--checkpoint.every", "1", "--no_ladder"]
LAYOUT = ["--layout.dp_replicate", "1", "--layout.dp_shard", "2", "--layout.zero", "3"]
TIMEOUT_S = 5
ENGINES = ("torch-manual", "jax-manual")
MOMENTS = ("while it starts", "between two steps", "while it saves")
SIGNALS = {
    "one device's process is killed": ("device", signal.SIGKILL),
    "one device's process is stopped": ("device", signal.SIGSTOP),
    "the engine's first process is killed": ("engine", signal.SIGKILL),
    "shardpair itself is killed": ("shardpair", signal.SIGKILL),
    "Ctrl-C": ("group", signal.SIGINT),
    "SIGTERM": ("shardpair", signal.SIGTERM),
}
PATIENCE_S = 120
FULL, DISK_MB, KEPT = "the disk is full", 16, 1000
# A script in the background ignores Ctrl-C, and so would what it starts.
HEARS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Ending(Struct, frozen=True, kw_only=True):
    """What came of one fault."""

    engine: str
    fault: str
    moment: str
    message: str
    """The last line of standard error."""
    exit_code: int
    seconds: float
    """From the fault to the end; of a full disk, from the start."""
    left: int
    """Processes that were still there."""
    newest: int
    """The step of the newest checkpoint, read whole; 0 where there was none to be yet."""


class Refusal(Struct, frozen=True, kw_only=True):
    """What a damaged checkpoint is met with."""

    damage: str
    message: str
    exit_code: int
    unchanged: bool
    """Whether nothing was written."""


class Survival(Struct, frozen=True, kw_only=True):
    """All of it."""

    endings: list[Ending]
    refusals: list[Refusal]


def read_survival() -> Survival | None:
    """What is stored; None before the first `make survival`."""
    return msgspec.json.decode(SURVIVAL.read_bytes(), type=Survival) if SURVIVAL.is_file() else None


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{condition} did not come true in {PATIENCE_S} s")
        time.sleep(0.002)


def side_of(shardpair: psutil.Process) -> psutil.Process | None:
    """The engine's first process, once it is there; shardpair starts others for a moment."""
    for child in shardpair.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "--exit-with-stdin" in child.cmdline():
                return child
    return None


def end_by(fault: str, engine: str, moment: str, folder: Path) -> Ending:
    """Start a run, end it, and see what is left."""
    whom, number = SIGNALS[fault]
    command = [*SHARDPAIR, "run", "demo", "--engines", engine, "--run_dir", str(folder), *SIZES, *LAYOUT]
    with (folder.parent / f"{folder.name}.txt").open("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", HEARS, *command, "--timeout_s", str(TIMEOUT_S)],
            stderr=errors,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        shardpair, own = psutil.Process(process.pid), folder / engine / CHECKPOINTS
        ranks = 2 if engine.startswith("torch") else 0
        wait_for(lambda: (side := side_of(shardpair)) and len(side.children()) >= ranks)
        if moment != MOMENTS[0]:
            wait_for(lambda: len(checkpoints_in(own)) >= 2)
        if moment == MOMENTS[2]:
            wait_for(lambda: any(own.glob(f"*{UNFINISHED}*")))
        family = shardpair.children(recursive=True)
        side = side_of(shardpair)
        assert side
        begun = time.monotonic()
        if whom == "group":
            os.killpg(process.pid, number)
        else:
            victims = {"shardpair": shardpair, "engine": side, "device": (side.children() or [side])[-1]}
            victims[whom].send_signal(number)
        code = process.wait(PATIENCE_S)
        _, alive = psutil.wait_procs(family, timeout=30)
        seconds = time.monotonic() - begun
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    return Ending(
        engine=engine,
        fault=fault,
        moment=moment,
        message=lines[-1].replace(str(folder.parent) + "/", "") if lines and whom != "shardpair" else "",
        exit_code=code,
        seconds=seconds,
        left=len(alive),
        newest=newest_whole(own),
    )


def newest_whole(folder: Path) -> int:
    """Step of the newest checkpoint, which is read; 0 where there is none."""
    found = checkpoints_in(folder)
    if found:
        CheckpointReader(found[max(found)]).verify()
    return max(found, default=0)


def fill_disk(engine: str, folder: Path) -> Ending:
    """Let a run save into a disk that is soon full."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)], check=True)
    try:
        command = [*SHARDPAIR, "run", "demo", "--engines", engine, "--run_dir", str(folder / "run"), *SIZES]
        begun = time.monotonic()
        process = psutil.Popen(
            [*command, *LAYOUT, "--checkpoint.keep", str(KEPT)],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        wait_for(lambda: shutil.disk_usage(folder).free < DISK_MB * 1e6 / 2 or process.poll() is not None)
        family = process.children(recursive=True)
        lines = process.communicate(timeout=PATIENCE_S)[1].decode().strip().splitlines()
        _, alive = psutil.wait_procs(family, timeout=30)
        return Ending(
            engine=engine,
            fault=FULL,
            moment=MOMENTS[2],
            message=lines[-1].replace(str(folder) + "/", ""),
            exit_code=process.returncode,
            seconds=time.monotonic() - begun,
            left=len(alive),
            newest=newest_whole(folder / "run" / engine / CHECKPOINTS),
        )
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def flipped(checkpoint: Path) -> None:
    """One bit of a tensor."""
    path = min(checkpoint.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def truncated(checkpoint: Path) -> None:
    """A file lacks its end."""
    path = min(checkpoint.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])


def without_a_file(checkpoint: Path) -> None:
    """A device's file is missing."""
    max(checkpoint.glob("*.safetensors")).unlink()


def huge_header(checkpoint: Path) -> None:
    """A file that says its header has 2^60 bytes."""
    path = min(checkpoint.glob("*.safetensors"))
    path.write_bytes((2**60).to_bytes(8, "little") + path.read_bytes()[8:])


def garbled(checkpoint: Path) -> None:
    """No JSON."""
    (checkpoint / DESCRIPTION).write_text("{")


def edited(key: str, value: Callable[[object], object]) -> Callable[[Path], None]:
    """Another value in checkpoint.json."""

    def edit(checkpoint: Path) -> None:
        path = checkpoint / DESCRIPTION
        fields = json.loads(path.read_bytes())
        fields[key] = value(fields[key])
        path.write_text(json.dumps(fields))

    return edit


DAMAGES: dict[str, Callable[[Path], None]] = {
    "one bit of a tensor is flipped": flipped,
    "a file is cut short": truncated,
    "a device's file is missing": without_a_file,
    "a file with a header of 2^60 bytes": huge_header,
    "checkpoint.json is no JSON": garbled,
    "another version": edited("format", lambda _: 99),
    "a file outside of the folder": edited("files", lambda files: {"../../x.safetensors": {}}),
    "a negative step": edited("step", lambda _: -1),
}


def resume_damaged(damage: str, whole: Path, folder: Path) -> Refusal:
    """Damage a copy of a checkpoint, and ask a run to go on from it."""
    shutil.copytree(whole, folder / whole.name)
    DAMAGES[damage](folder / whole.name)
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    arguments = ["--resume", str(folder / whole.name), "--run_dir", str(folder / "resumed")]
    command = [*SHARDPAIR, "run", "demo", "--engines", "torch-manual", *arguments, *SIZES, *LAYOUT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return Refusal(
        damage=damage,
        message=done.stderr.strip().splitlines()[-1].replace(str(folder) + "/", ""),
        exit_code=done.returncode,
        unchanged=before == sorted(path.relative_to(folder) for path in folder.rglob("*")),
    )


def main() -> None:
    """Make every fault, and keep what comes of it."""
    endings, refusals, whole = [], [], None
    with tempfile.TemporaryDirectory() as scratch:
        for engine in ENGINES:
            for fault in SIGNALS:
                for moment in MOMENTS:
                    folder = Path(scratch) / f"run-{len(endings)}"
                    endings.append(end_by(fault, engine, moment, folder))
                    print(endings[-1], file=sys.stderr, flush=True)
                    if endings[-1].newest:
                        whole = checkpoints_in(folder / engine / CHECKPOINTS)[endings[-1].newest]
            if os.geteuid() == 0:
                endings.append(fill_disk(engine, Path(scratch) / f"disk-{engine}"))
                print(endings[-1], file=sys.stderr, flush=True)
        assert whole
        for number, damage in enumerate(DAMAGES):
            folder = Path(scratch) / f"damaged-{number}"
            folder.mkdir()
            refusals.append(resume_damaged(damage, whole, folder))
            print(refusals[-1], file=sys.stderr, flush=True)
    found = Survival(endings=endings, refusals=refusals)
    SURVIVAL.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


if __name__ == "__main__":
    main()
