"""Tables of what the scripts beside this file measured: each from its JSON, or a word that there is none."""

from survival import read_survival

from compare.show.markdown import markdown_rows as markdown


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
