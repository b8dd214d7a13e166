"""Planted mistakes: text changes of source files, and copies of the source with such changes.

`shardpair faults` trains with them (`compare/faults.toml`); `make mutations` runs tests on them
(`tests/data/mutations.toml`).
"""

import difflib
import shutil
import tomllib
from collections.abc import Iterable, Sequence
from importlib.util import cache_from_source
from pathlib import Path

import msgspec
from msgspec import Struct

from compare.spec.experiment import ExperimentError

ROOT = Path(__file__).parents[2]
"""The folder with the packages compare, jaxpar and torchpar."""


class Diff(Struct, frozen=True, forbid_unknown_fields=True):
    """A change of one file."""

    file: str
    """The path below `ROOT`, such as torchpar/optimizer.py."""
    old: str
    """A text that occurs once in the file."""
    new: str
    engines: tuple[str, ...] = ()
    """Engines that make the mistake with this change; empty for all."""

    def applied(self, root: Path) -> str:
        """The changed text of the file below `root`. Raises ExperimentError: `old` does not occur once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if (count := text.count(self.old)) != 1:
            first = self.old.strip().splitlines()[0]
            raise ExperimentError(
                f"{self.file}: the old text of a planted mistake occurs {count} times, not once: {first!r}: "
                "move the mistake with the code"
            )
        return text.replace(self.old, self.new)

    def unified(self) -> str:
        """The change as `diff -U0` prints it, with the line number. Raises as `applied`."""
        before = (ROOT / self.file).read_text(encoding="utf-8").splitlines()
        after = self.applied(ROOT).splitlines()
        lines = difflib.unified_diff(before, after, self.file, self.file, n=0, lineterm="")
        return "\n".join([*lines][1:])


class Fault(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One mistake of the ladder's test."""

    name: str
    mistake: str
    rung: str
    """The first rung that must fail."""
    preset: str = ""
    """The layout that shows the mistake; empty for data parallelism over the devices asked for."""
    settings: str = ""
    """Fields of the experiment, beyond the preset, as in `presets.edits_of`."""
    edit: str = ""
    """Fields with a wrong value, given to one engine; empty for a mistake in the code."""
    diff: tuple[Diff, ...] = ()
    impossible: dict[str, str] = {}
    """Engines that cannot make the mistake, and the reason."""

    def is_planted_in(self, engine: str) -> bool:
        """True if there is a way to plant the mistake in an engine."""
        return bool(self.edit or self.diffs(engine))

    def diffs(self, engine: str) -> list[Diff]:
        """The changes that plant the mistake in an engine; [] for an `edit`."""
        return [one for one in self.diff if not one.engines or engine in one.engines]


def load_faults() -> dict[str, Fault]:
    """The mistakes of the ladder's test, by name."""
    listed = tomllib.loads((ROOT / "compare" / "faults.toml").read_text(encoding="utf-8"))["fault"]
    return {fault.name: fault for fault in msgspec.convert(listed, list[Fault])}


def patched_copy(folder: Path, diffs: Sequence[Diff], names: Iterable[str]) -> None:
    """Copy files and packages below `ROOT`, given by name, into a folder, and apply the changes there.

    The copy has the compiled files of unchanged sources: Python need not compile a hundred files again.

    Raises ExperimentError: an old text does not occur once.
    """
    for name in names:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy2(source, target)
    for diff in diffs:
        changed = folder / diff.file
        changed.write_text(diff.applied(folder), encoding="utf-8")
        if changed.suffix == ".py":
            Path(cache_from_source(changed)).unlink(missing_ok=True)
