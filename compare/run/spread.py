"""A study of one layout, which --preset may give, and of the engines that can express it."""

from typing import ClassVar

from msgspec.structs import replace

from compare.flags import EngineName, PresetName, chosen_engines
from compare.run.study import Study
from compare.setup.fitting import fitting
from compare.setup.presets import PRESETS, check_presets, preset_layout
from compare.spec.experiment import Experiment, ExperimentError, revalidate


class Spread(Study, frozen=True, kw_only=True):
    """A study of one layout. A subclass has a docstring of its own."""

    engines: tuple[EngineName, ...] = ()
    """Engines; the others are compared with the first. Default: all that can express the layout. A peer runs
    only if named; a missing peer is skipped, and its install command printed."""
    preset: PresetName = ""
    devices: int | None = None
    """Number of devices of --preset. Default: see `shardpair list`."""

    needs: ClassVar = {**Study.needs, "devices": "preset"}

    def resolve(self) -> Experiment:
        """The checked experiment under --preset, or under its own layout. Raises ExperimentError."""
        experiment = super().resolve()
        if not self.preset:
            return revalidate(experiment)
        check_presets(experiment.layout, [(self.preset, self.devices)], self.layout_flags)
        if self.devices not in (None, 1) and not PRESETS[self.preset].axis:
            raise ExperimentError(f"--devices {self.devices} has no effect: {self.preset} is one device")
        layout = preset_layout(experiment.layout, self.preset, self.devices, self.layout_flags)
        return revalidate(replace(experiment, layout=layout))

    def fitting(self, experiment: Experiment) -> tuple[list[str], dict[str, str]]:
        """The engines to run: all that were named, or all that can express the layout; why others cannot.

        Raises ExperimentError: an engine is named twice, or none can express the layout.
        """
        engines = chosen_engines(self.engines)
        return (engines, {}) if self.engines else fitting(engines, experiment.layout)
