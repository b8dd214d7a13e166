"""Chips that need not be here: their names, their numbers of devices, and the steps to compile for them."""

import re
import tomllib
from collections.abc import Sequence
from math import prod
from pathlib import Path

from compare.contract.chips import Chip
from compare.spec.experiment import Experiment, ExperimentError
from compare.spec.xla import xla_options

TPUS = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2}
"""Generation of a TPU -> dims of its torus."""
GPUS = tomllib.loads((Path(__file__).parents[1] / "gpus.toml").read_text(encoding="utf-8"))
HOST = 8
"""GPUs of a host."""
KNOWN = f"give cpu, a TPU such as v5e:2x4 ({', '.join(TPUS)}), or GPUs such as h100x8 ({', '.join(GPUS)})"


def chip_of(name: str) -> Chip:
    """The chip of a name: cpu, v5e:2x4, h100x8. Raises ExperimentError."""
    if name == "cpu":
        return Chip(name=name, compiler="cpu")
    tpu, gpu = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", name), re.fullmatch(r"(\w+)x(\d+)", name)
    if tpu and tpu[1] in TPUS:
        if len(tpu[2].split("x")) != TPUS[tpu[1]]:
            shape = "x".join(["2"] * TPUS[tpu[1]])
            raise ExperimentError(
                f"--chip {name}: a {tpu[1]} has {TPUS[tpu[1]]} dims, such as {tpu[1]}:{shape}"
            )
        return Chip(name=name, compiler="tpu", topology=name)
    if gpu and gpu[1] in GPUS:
        count = int(gpu[2])
        if not count or (count > HOST and count % HOST):
            raise ExperimentError(f"--chip {name}: give 1 to {HOST} GPUs, or a multiple of {HOST}")
        hosts = max(count // HOST, 1)
        topology = f"1x{hosts}x{count // hosts}"
        return Chip(name=name, compiler="cuda", topology=topology, target=GPUS[gpu[1]])
    raise ExperimentError(f"--chip {name}: no such chip: {KNOWN}")


def devices_of(chip: Chip) -> int:
    """The number of devices of a chip's name; 0 for a CPU, which has as many as the layout."""
    return prod(map(int, re.findall(r"\d+", chip.topology.partition(":")[2] or chip.topology or "0")))


def chips_of(names: Sequence[str]) -> tuple[list[Chip], int]:
    """The chips of --chip, and their number of devices; 0 if all are CPUs. Raises ExperimentError."""
    chips = [chip_of(name) for name in names]
    for name in names:
        if names.count(name) > 1:
            raise ExperimentError(f"--chip {name}: give each chip once")
    numbers = {devices_of(chip): chip.name for chip in chips if chip.compiler != "cpu"}
    if len(numbers) > 1:
        words = " and ".join(f"{name} has {count} devices" for count, name in numbers.items())
        raise ExperimentError(f"--chip: {words}: give chips with equal numbers of devices")
    return chips, next(iter(numbers), 0)


def require_chip(chip: Chip, experiment: Experiment) -> None:
    """Reject another number of devices, or settings that the chip lacks. Raises ExperimentError."""
    count, needed = devices_of(chip), experiment.layout.devices
    if chip.compiler != "cpu" and count != needed:
        raise ExperimentError(
            f"--chip {chip.name} has {count} devices, and the layout {needed}: give --preset, or degrees of "
            f"{count} devices"
        )
    if chip.compiler == "tpu" and experiment.precision.dtype == "float64":
        raise ExperimentError(f"--chip {chip.name}: a TPU has no float64: add --precision.dtype bfloat16")
    if chip.compiler != "cuda" and xla_options(experiment.layout):
        raise ExperimentError(
            f"--chip {chip.name}: layout.xla = {experiment.layout.xla} sets options of XLA's GPU compiler: "
            f"leave it out"
        )
