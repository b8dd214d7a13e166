"""`shardpair faults`: plant every known mistake, and show which rung of the ladder catches it."""

from compare.arguments import EngineName, Spec, chosen_engines
from compare.contract.experiment import Experiment
from compare.faults import caught_as_expected, fault_cases
from compare.outcome import print_faults


class Faults(Spec, frozen=True, kw_only=True):
    """Check the checker: plant each known mistake in each engine; the ladder must turn red at the right rung.

    Try:
      shardpair faults
      shardpair faults --engines torch-manual --names dropped_all_reduce sum_for_mean
    """

    engines: tuple[EngineName, ...] = ()
    """Engines to plant faults in. Default: all four."""
    names: tuple[str, ...] = ()
    """Which faults. Default: all."""
    devices: int = 4
    """Devices of data parallelism."""

    def __call__(self, default: Experiment) -> int:
        """Plant them. Returns the exit code: 0 if every fault was caught at its rung, else 1."""
        experiment = self.resolved()
        cases = fault_cases(
            experiment, chosen_engines(self.engines), names=list(self.names), devices=self.devices
        )
        comparison, _ = self.compare(
            "faults",
            experiment,
            cases,
        )
        print_faults(comparison, as_json=self.json)
        return 0 if caught_as_expected(comparison) else 1
