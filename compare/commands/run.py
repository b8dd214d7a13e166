"""`shardpair run`: train one experiment with several engines, compare, measure, report."""

import msgspec

from compare.arguments import EngineName, Spec, chosen_engines
from compare.contract.experiment import Experiment, ExperimentError, revalidate
from compare.outcome import print_outcome
from compare.pairing import engine_cases
from compare.presets import apply_preset
from compare.report.render import write_report

DEVICES = 4


class Run(Spec, frozen=True, kw_only=True):
    """Train one experiment with each engine, hold the results against each other, and write a report.

    Try:
      shardpair run
      shardpair run demo --engines jax-manual torch-manual
      shardpair run cpu --data.source input.txt --model.n_layer 6
      shardpair run demo --preset ddp --devices 4
      shardpair run --continue runs/demo-20260101-120000
    """

    engines: tuple[EngineName, ...] = ()
    """Which engines, the first being what the others are held against. Default: all four."""
    preset: str = ""
    """A layout by name: single, ddp, ddp_naive, ddp_flat, ddp_overlapped, zero1, zero2, fsdp, shard_grad_op,
    hsdp, tp, tp_sp, ddp_tp, fsdp_tp, fsdp_tp_sp, hsdp_tp, pp, pp_gpipe, pp_interleaved, pp_zero_bubble,
    ddp_pp, fsdp_pp, tp_pp, ddp_tp_pp, fsdp_tp_pp."""
    devices: int | None = None
    """How many devices --preset spreads over. Default: 4."""
    ladder: bool = True
    """Compare gradients, weights and moments, at any size; --no-ladder compares losses and norms alone."""

    def __call__(self, default: Experiment) -> int:
        """Run it. Returns the exit code: 0 if all engines agree, else 1."""
        experiment = self.resolved()
        if self.devices is not None and not self.preset:
            raise ExperimentError(
                f"--devices {self.devices} without --preset has no effect: say how they are used, with "
                f"--preset or with the layout's degrees, such as --layout.dp_replicate {self.devices}"
            )
        if self.preset:
            devices = DEVICES if self.devices is None else self.devices
            layout = apply_preset(
                experiment.layout, preset=self.preset, devices=devices, default=default.layout
            )
            experiment = revalidate(msgspec.structs.replace(experiment, layout=layout))
        self.require_nothing_else(default, engines=self.engines, preset=self.preset)
        comparison, folder = self.compare(
            self.experiment,
            experiment,
            engine_cases(experiment, chosen_engines(self.engines)),
            settings=msgspec.structs.replace(self.settings(), ladder=self.ladder),
            needs_first=False,
        )
        page = write_report(folder)
        print_outcome(comparison, page, as_json=self.json)
        return 0 if comparison.passed else 1
