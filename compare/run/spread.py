"""A study of one layout, which --preset may give, and of the engines that can express it."""

from typing import Any, ClassVar

from compare.contract.request import Request
from compare.flags import EngineName, PresetName, chosen_engines
from compare.judge.outcome import Case, Grid
from compare.run.study import Study
from compare.setup.fitting import fitting
from compare.setup.presets import PRESETS, check_presets, spread
from compare.spec.experiment import Experiment, ExperimentError, revalidate


class Spread(Study, frozen=True, kw_only=True):
    """A study of one layout. A subclass has a docstring of its own."""

    engines: tuple[EngineName, ...] = ()
    """Engines to train; the first is the reference. Default: all that support the layout. A peer trains only
    if it is named; a missing peer is skipped, and its install command printed."""
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
        return spread(experiment, self.preset, self.devices, self.layout_flags)

    def against_first(self, experiment: Experiment, **request: Any) -> Grid:
        """A case for each named engine, or each that can express the layout, compared with the first.

        `request` are fields of every request. Raises ExperimentError: an engine is named twice, or none can
        express the layout.
        """
        engines, left_out = chosen_engines(self.engines), dict[str, str]()
        if not self.engines:
            engines, left_out = fitting(engines, experiment)
        cases = {
            name: Case(
                request=Request(engine=name, experiment=experiment, **request),
                against="" if name == engines[0] else engines[0],
            )
            for name in engines
        }
        return cases, left_out
