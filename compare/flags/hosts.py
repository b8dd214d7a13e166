"""Arguments that say on which hosts the processes of a side start, and how."""

from pathlib import Path

from compare.execute.hosts import Hosts, Launcher, find_hosts
from compare.flags.pythons import SidePythons


class HostFlags(SidePythons, frozen=True, kw_only=True):
    """Which Pythons, on which hosts."""

    launcher: Launcher = "local"
    """How engines start. local: on this machine. slurm: by `srun` on the hosts of this allocation (`salloc`,
    `sbatch`); they must share the folder of the results. torchrun: on those of --hostfile, of which this is
    the first: what the others have to run is printed, a line each."""
    hostfile: Path | None = None
    """Hosts for --launcher torchrun, a line each: `host0 slots=4`."""
    hosts: int = 0
    """Hosts to run on. Default: all of the allocation or the file, or this one. With --launcher local 2 or
    more are processes of this machine that believe to be several hosts: a test."""

    def found_hosts(self) -> Hosts:
        """The hosts that the flags ask for. Raises ExperimentError: as `find_hosts`."""
        return find_hosts(self.launcher, self.hosts, self.hostfile)
