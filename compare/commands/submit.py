"""`shardpair submit`: a run as a job of SLURM, from a login node, through submitit."""

import importlib
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from compare.execute.launch import EnvironmentMissing
from compare.execute.paths import RUNS
from compare.flags.arguments import Hidden
from compare.spec.experiment import Experiment, ExperimentError
from compare.terminal.console import results_console

END = "--"
LAUNCHER = "--launcher"


class Submit(Struct, frozen=True, kw_only=True):
    """Hand a run over to SLURM: what stands behind `--` is run on the hosts of a job, with --launcher slurm.

    Needs submitit (`pip install 'shardpair[submit]'`), and a folder that the hosts share. Inside an
    allocation no job is needed: `shardpair run --launcher slurm`.

    Try:
      shardpair submit --nodes 2 --minutes 60 -- run check --preset fsdp_tp
      shardpair submit --nodes 2 --gpus_per_node 8 --set account=mine -- run gpt2-124m --platform gpu
    """

    nodes: int = 1
    """Hosts."""
    minutes: int = 60
    """Time limit of the job."""
    partition: str = ""
    """Partition of the cluster; its default one if empty."""
    gpus_per_node: int = 0
    """GPUs of each host."""
    set: tuple[str, ...] = ()
    """Other options of sbatch, as submitit spells them: account=mine qos=long."""
    folder: Path = RUNS / "submitted"
    """Where the job's script, output and answer go."""
    words: Hidden[tuple[str, ...]] = ()
    """The command behind `--`."""

    def __call__(self, default: Experiment) -> int:
        """Submit it and say where its output goes. Returns 0.

        Raises:
            ExperimentError: odd options.
            EnvironmentMissing: no submitit, or no sbatch.
        """
        if self.nodes < 1 or self.minutes < 1:
            raise ExperimentError("--nodes and --minutes must be at least 1")
        if not importlib.util.find_spec("submitit"):
            raise EnvironmentMissing("submit needs submitit: pip install 'shardpair[submit]'")
        submitit = importlib.import_module("submitit")
        executor = submitit.AutoExecutor(folder=self.folder, cluster="slurm")
        executor.update_parameters(**self.parameters())
        command = [sys.executable, "-m", "compare", *with_launcher(self.words)]
        job = executor.submit(submitit.helpers.CommandFunction(command))
        console = results_console()
        console.print(f"job {job.job_id}: shardpair {shlex.join(with_launcher(self.words))}", soft_wrap=True)
        console.print(f"output: {job.paths.stdout}", soft_wrap=True)
        return 0

    def parameters(self) -> dict[str, Any]:
        """Options of sbatch, as submitit spells them. Raises ExperimentError for what is no NAME=VALUE."""
        found: dict[str, Any] = {
            "name": "shardpair",
            "nodes": self.nodes,
            "tasks_per_node": 1,
            "timeout_min": self.minutes,
            "slurm_use_srun": False,  # the harness itself starts what runs on all hosts
        }
        if self.partition:
            found["slurm_partition"] = self.partition
        if self.gpus_per_node:
            found["gpus_per_node"] = self.gpus_per_node
        for word in self.set:
            name, equals, value = word.partition("=")
            if not (name and equals):
                raise ExperimentError(f"--set {word}: give NAME=VALUE, such as account=mine")
            found[f"slurm_{name}"] = value
        return found


def behind_end(line: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """A command line parted at `--`. Raises ExperimentError: nothing stands behind it."""
    own, words = list(line), tuple[str, ...]()
    if END in own:
        place = own.index(END)
        own, words = own[:place], tuple(own[place + 1 :])
    if not words and "--help" not in own and "-h" not in own:
        raise ExperimentError("give the command behind --: shardpair submit --nodes 2 -- run check")
    return own, words


def with_launcher(words: Sequence[str]) -> list[str]:
    """The command with --launcher slurm, unless it says how engines start."""
    says = any(word.partition("=")[0] == LAUNCHER for word in words)
    return [*words, *([] if says else [LAUNCHER, "slurm"])]
