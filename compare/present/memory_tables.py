"""Plain rows of what a device holds at the peak of a step, by class, beside the closed form."""

from collections.abc import Sequence

from msgspec import Struct

from compare.contract.memory_profile import CLASSES, Class, Peak
from compare.contract.record import Record
from compare.judge.closed_forms.peak_memory import PeakForm, peak_form
from compare.terminal import human_bytes

UNEXPLAINED = "unexplained"
"""Beside a figure that differs from its closed form, for no reason that is known."""


class AtPeak(Struct, frozen=True, kw_only=True):
    """A device at its peak, as it was measured and as it should be."""

    device: int
    peak: Peak
    form: PeakForm | None
    """None where there is none: `peak_form` says for what."""

    @property
    def sizes(self) -> dict[str, tuple[int, float | None]]:
        """Of every class that is there, or should be: bytes measured, and by the closed form."""
        expected = self.form.bytes if self.form else {}
        return {
            kind: (self.peak.bytes.get(kind, 0), expected.get(kind))
            for kind in CLASSES
            if self.peak.bytes.get(kind) or expected.get(kind)
        }

    @property
    def where(self) -> str:
        """Where the peak is, in words."""
        return where(self.peak)

    def is_explained(self, kind: Class) -> bool:
        """True if a class is as its closed form has it, or has none."""
        return self.form is None or self.form.fits(kind, self.peak.bytes.get(kind, 0))


def where(peak: Peak) -> str:
    """The operation at which a peak is, and its place; "" of a plan."""
    return peak.operation + (f" in {peak.place}" if peak.place else "")


def at_peak(record: Record, *, device: int | None = None) -> AtPeak | None:
    """One device at its peak, by default the fullest; None if the record has no profile."""
    profile = record.memory
    if profile is None or not profile.devices:
        return None
    chosen = profile.fullest if device is None else device
    return AtPeak(
        device=chosen,
        peak=profile.of(chosen).peak,
        form=peak_form(record.manifest.engine, record.manifest.experiment, device=chosen),
    )


def deviation(measured: float, expected: float | None) -> float | None:
    """Of a closed form, as a fraction of it; None without one."""
    return measured / expected - 1 if expected else None


def beside(measured: float, expected: float | None, *, is_explained: bool = True) -> str:
    """`12 MB of 11.8 MB, +1.7%`; with `unexplained` behind it if that is too far off."""
    if expected is None:
        return human_bytes(measured)
    off = deviation(measured, expected)
    percent = f", {off:+.1%}" if off is not None and round(off, 3) else ""
    words = "" if is_explained else f": {UNEXPLAINED}"
    return f"{human_bytes(measured)} of {human_bytes(expected)}{percent}{words}"


def rows(cases: Sequence[tuple[str, AtPeak]], *, kinds: Sequence[Class] = CLASSES) -> list[list[str]]:
    """A row for each case: its name, each class beside its closed form, and all together."""
    return [
        [
            name,
            *(
                beside(*one.sizes[kind], is_explained=one.is_explained(kind)) if kind in one.sizes else ""
                for kind in kinds
            ),
            human_bytes(one.peak.total),
        ]
        for name, one in cases
    ]
