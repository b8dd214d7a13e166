"""`shardpair check`: every engine, on one device and on each rung of its ladder, against one reference."""

from pathlib import Path

from compare.commands.arguments import EngineName, Spec, chosen_engines
from compare.judge.comparison import Comparison
from compare.present.tables import print_check
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.cases import Case, ladder_cases


class Check(Spec, frozen=True, kw_only=True):
    """Prove that every engine and gradient synchronisation computes what one unsharded device computes.

    The experiment is a tiny one in float64 unless you name another; nothing is timed.

    Try:
      shardpair check
      shardpair check --devices 2 --engines jax-manual torch-manual
      shardpair check check --precision.dtype float32
    """

    engines: tuple[EngineName, ...] = ()
    """Which engines. Default: all. A peer on one device: --devices 1."""
    devices: int = 4
    """Devices of data parallelism; 1 checks the engines unsharded only."""

    def __call__(self, default: Experiment) -> int:
        """Check. Returns the exit code: 0 if every rung of every case holds, else 1."""
        if self.dry_run:
            return self.show_plan(*self._planned(default))
        comparison, _ = self.outcome(default)
        print_check(comparison, as_json=self.json)
        return 0 if comparison.passed else 1

    def outcome(self, default: Experiment) -> tuple[Comparison, Path]:
        """Train and compare; nothing is printed on stdout.

        Args:
            default: the experiment before the user's overrides.

        Returns:
            The comparison, and its folder.
        """
        experiment, cases = self._planned(default)
        return self.compare(f"check-{self.devices}", experiment, cases)

    def _planned(self, default: Experiment) -> tuple[Experiment, list[Case]]:
        self.refuse_layout("check has layouts of its own")
        experiment = self.resolved(is_spread=False)
        self.require_nothing_else(default, engines=self.engines)
        if self.devices < 1:
            raise ExperimentError(f"--devices {self.devices} must be at least 1")
        return experiment, ladder_cases(experiment, chosen_engines(self.engines), self.devices)
