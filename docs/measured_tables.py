"""Tables of what the scripts beside this file measured: each from its JSON, or a word that there is none."""

from strategies import SWEEPS, read_sweeps
from survival import read_survival

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
