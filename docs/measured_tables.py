"""Tables of what the scripts beside this file measured: each from its JSON, or a word that there is none."""

from profiles import CLASSES, Profile, read_profiles
from strategies import SWEEPS, read_sweeps
from survival import read_survival
from torch_profiles import CLASSES as TORCH_CLASSES
from torch_profiles import TorchProfile, read_torch_profiles

from compare.present.sweep import sweep_table, worth
from compare.show.markdown import markdown_rows as markdown


def sweep(name: str) -> str:
    """A sweep's table, the command that makes it, and what it is worth; or that it was not run yet."""
    outcome, command = read_sweeps().get(name), f"```sh\nshardpair {SWEEPS[name]}\n```"
    if outcome is None:
        return f"{command}\n\nNot measured yet: `make sweeps` measures it."
    found = sweep_table(outcome)
    rows = [[row.head.text, *(cell.text for cell in row.cells)] for row in found.rows]
    table = markdown([found.corner, *found.columns], rows, numbers_from=2)
    versions = ", ".join(f"{package} {version}" for package, version in sorted(outcome.versions.items()))
    words = [
        f"{outcome.sentence}.",
        worth(outcome),
        f"Machine: {outcome.machine}; {versions}; shardpair {outcome.git_commit[:12]}.",
        *(f"Left out: {case}: {why}." for case, why in outcome.left_out.items()),
    ]
    return "\n\n".join([command, f"**{found.name}**", table, " ".join(words)])


def endings() -> str:
    """What is left after kills and stops."""
    stored = read_survival()
    if stored is None:
        return "Not measured yet: `make survival` measures it."
    rows = [
        (
            f"`{one.engine}`",
            one.fault,
            one.moment,
            one.message.removeprefix("shardpair: "),
            str(one.exit_code),
            f"{one.seconds:.1f}",
            str(one.left),
            f"step {one.newest}, whole" if one.newest else "none yet",
        )
        for one in stored.endings
    ]
    header = ["engine", "fault", "when", "last line", "exit code", "seconds to end", "processes left"]
    return markdown([*header, "newest checkpoint"], rows)


def refusals() -> str:
    """What damaged checkpoints are met with."""
    stored = read_survival()
    if stored is None:
        return "Not measured yet: `make survival` measures it."
    rows = [
        (one.damage, one.message.removeprefix("shardpair: error: "), str(one.exit_code), "nothing")
        for one in stored.refusals
        if one.unchanged
    ]
    return markdown(["damage", "message", "exit code", "changed on disk"], rows)


def torch_profiles(*, pipelines: bool = False) -> str:
    """Where the time of a step of torchpar's engines goes, and what both have in common."""
    stored = [profile for profile in read_torch_profiles() if (profile.microbatches > 1) == pipelines]
    if not stored:
        return "Not measured yet: `make profiles` measures it."
    header = ["ms of a rank in a step", *(f"`{p.engine}` {p.preset}{_microbatches(p)}" for p in stored)]
    rows = [
        [words, *(f"{p.operations_ms[name]:.0f}" for p in stored)] for name, words in TORCH_CLASSES.items()
    ]
    rows.append(["CPU time of a step, unprofiled", *(f"{p.cpu_ms:.0f}" for p in stored)])
    rows.append(["CPU time without messages", *(f"{p.silent_cpu_ms:.0f}" for p in stored)])
    rows.append(["wall time of a step, unprofiled", *(f"{p.wall_ms:.0f}" for p in stored)])
    return markdown(header, rows)


def profiles(*, layers: int = 6) -> str:
    """Where the time of a step of jaxpar goes."""
    stored = [profile for profile in read_profiles() if profile.layers == layers]
    if not stored:
        return "Not measured yet: `make profiles` measures it."
    header = [
        "of a step's operations",
        *(f"`{p.engine}` {p.preset}, {p.devices}{_microbatches(p)}" for p in stored),
    ]
    totals = [sum(p.operations_ms.values()) for p in stored]
    rows = [
        [words, *(f"{p.operations_ms[name] / total:.0%}" for p, total in zip(stored, totals, strict=True))]
        for name, words in CLASSES.items()
    ]
    rows.append(["their sum, ms", *(f"{total:.0f}" for total in totals)])
    rows.append(["CPU time of a step, ms", *(f"{p.cpu_ms:.0f}" for p in stored)])
    rows.append(["wall time of a step, ms", *(f"{p.wall_ms:.0f}" for p in stored)])
    return markdown(header, rows)


def _microbatches(profile: Profile | TorchProfile) -> str:
    return f", {profile.microbatches} microbatches" if profile.microbatches > 1 else ""
