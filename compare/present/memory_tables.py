"""Plain rows of what a device holds at the peak of a step, by class, beside the closed form."""

from collections.abc import Sequence

from msgspec import Struct

from compare.contract.memory_profile import CLASSES, Class, Peak
from compare.contract.record import Record
from compare.judge.closed_forms.peak_memory import PeakForm, peak_form
from compare.judge.closed_forms.xla_memory import PATTERNS
from compare.terminal.units import human_bytes

SCOPES = 3
"""How much of the path of a JAX operation is shown: its last parts."""


class AtPeak(Struct, frozen=True, kw_only=True):
    """A device at its peak, as it was measured and as it should be."""

    device: int
    peak: Peak
    form: PeakForm | None
    """None where there is none: `peak_form` says for what."""
    planned_bytes: int = 0
    """What a compiler set aside."""

    @property
    def sizes(self) -> dict[str, tuple[int, float | None]]:
        """Of every class that is there, or should be: bytes measured, and by the closed form."""
        expected = self.form.bytes if self.form else {}
        return {
            kind: (self.peak.bytes[kind], expected.get(kind))
            for kind in CLASSES
            if self.peak.bytes[kind] or expected.get(kind)
        }

    @property
    def where(self) -> str:
        """Where the peak is, in words."""
        return where(self.peak)

    def why(self, kind: Class) -> str | None:
        """How a class stands to its closed form: `PeakForm.why`; "" where it has none."""
        has_form = self.form is not None and kind in self.form.bytes
        return self.form.why(kind, self.peak.bytes[kind]) if self.form and has_form else ""


def where(peak: Peak) -> str:
    """The operation at which a peak is, and its place; of JAX's path of scopes the end."""
    line, _, path = peak.place.partition(": ")
    place = ": ".join(filter(None, (line, "/".join(path.split("/")[-SCOPES:]))))
    return peak.operation + (f" in {place}" if place else "")


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
        planned_bytes=profile.planned_bytes,
    )


def deviation(measured: float, expected: float | None) -> float | None:
    """Of a closed form, as a fraction of it; None without one."""
    return measured / expected - 1 if expected else None


def beside(measured: float, expected: float | None, why: str | None = "") -> str:
    """`12 MB of 11.8 MB, +1.7%`, and what explains it; NOT EXPLAINED if nothing does."""
    if expected is None:
        return human_bytes(measured)
    off = deviation(measured, expected)
    percent = f", {off:+.1%}" if off is not None and round(off, 3) else ""
    words = "NOT EXPLAINED" if why is None else why
    return f"{human_bytes(measured)} of {human_bytes(expected)}{percent}{f': {words}' if words else ''}"


def patterns_in(cases: Sequence[AtPeak]) -> list[str]:
    """The patterns that explain some class of these, in the order in which they are known."""
    found = {name for one in cases for kind in CLASSES for name in (one.why(kind) or "").split(", ")}
    return [name for name in PATTERNS if name in found]


def rows(cases: Sequence[tuple[str, AtPeak]], *, kinds: Sequence[Class] = CLASSES) -> list[list[str]]:
    """A row for each case: its name, each class beside its closed form, and all together."""
    return [
        [
            name,
            *(beside(*one.sizes[kind], one.why(kind)) if kind in one.sizes else "" for kind in kinds),
            human_bytes(one.peak.total),
        ]
        for name, one in cases
    ]
