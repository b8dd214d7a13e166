"""Arguments of commands that train one layout on several engines: which layout, and which engines."""

import msgspec

from compare.flags.arguments import EngineName, Spec, chosen_engines
from compare.flags.pythons import pythons_of
from compare.spec.experiment import Experiment, ExperimentError, revalidate
from compare.studies.fitting import fitting, installed
from compare.studies.presets import PRESETS, apply_preset, check_names
from compare.terminal import errors_console, printable

DEVICES = 4


class Spread(Spec, frozen=True, kw_only=True):
    """An experiment, a layout by name, and engines that can express it."""

    engines: tuple[EngineName, ...] = ()
    """Which engines, the first being what the others are held against. Default: all that can express
    the layout; the others are named, with the reason. A peer runs if it is named, and is left out, with the
    line that installs it, where it is missing."""
    preset: str = ""
    """A layout by name: single, ddp, ddp_naive, ddp_flat, ddp_overlapped, zero1, zero2, fsdp, shard_grad_op,
    hsdp, tp, tp_sp, ddp_tp, fsdp_tp, fsdp_tp_sp, hsdp_tp, pp, pp_gpipe, pp_interleaved, pp_zero_bubble,
    ddp_pp, fsdp_pp, tp_pp, ddp_tp_pp, fsdp_tp_pp. It gives the degrees; what you say of the rest, such as
    --layout.microbatches or --layout.schedule, wins."""
    devices: int | None = None
    """How many devices --preset spreads over. Default: what the matrix takes, which is 4 for most."""

    def laid_out(self, experiment: Experiment) -> Experiment:
        """The experiment, with the user's overrides in it, under --preset, if one was given.

        Raises:
            ExperimentError: a preset that does not fit, or devices without one.
        """
        if self.devices is not None and not self.preset:
            raise ExperimentError(
                f"--devices {self.devices} without --preset has no effect: say how they are used, with "
                f"--preset or with the layout's degrees, such as --layout.dp_replicate {self.devices}"
            )
        if not self.preset:
            return experiment
        check_names("--preset", "preset", [self.preset], PRESETS)
        devices = PRESETS[self.preset].devices if self.devices is None else self.devices
        layout, notes = apply_preset(experiment.layout, self.preset, devices, self.said)
        if not self.quiet:
            for note in notes:
                errors_console().print(
                    printable(f"{self.experiment}: {note}"), style="yellow", soft_wrap=True
                )
        return revalidate(msgspec.structs.replace(experiment, layout=layout))

    def chosen(self) -> tuple[EngineName, ...]:
        """The engines asked for; () for all that can express the layout."""
        return self.engines

    def fitting(self, experiment: Experiment) -> tuple[list[str], dict[str, str]]:
        """The engines to run, and why others were left out: of those asked for only what is not installed.

        Raises:
            ExperimentError: an engine is named twice, or none can express the layout.
            EnvironmentMissing: none of them is installed.
        """
        chosen = self.chosen()
        engines = chosen_engines(chosen)
        if chosen:
            return installed(engines, pythons_of(self))
        return fitting(engines, experiment.layout, platform=self.platform)
