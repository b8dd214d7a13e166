"""`shardpair --help`: every command on one screen, by what one wants to do."""

from compare.studies.registry import STUDIES

_COMMANDS: dict[str, dict[str, str]] = {
    "Train and compare": {
        "report": "judge a finished run again, and write its page anew",
        "diff": "two finished runs of any settings: numbers, settings, costs",
    },
    "Prove": {},
    "Measure": {},
    "Read": {
        "runs": "what was run here: layout, verdict, age, size; --prune",
        "lesson": "one strategy in every engine, side by side, on a page",
        "list": "names of experiments, presets, faults, engines, lessons",
        "doctor": "what is installed, and what can run here",
    },
    "Use a trained model": {
        "convert": "a training's state into another format: nanoGPT, Hugging Face",
        "sample": "draw text from a checkpoint",
    },
}

GROUPS = {
    group: {word: study.brief for word, study in STUDIES.items() if study.group == group} | words
    for group, words in _COMMANDS.items()
}
"""What each command does, by its word, in groups: a study says itself where it belongs."""

HEAD = """usage: shardpair COMMAND [arguments]
Sharded training in JAX and in PyTorch, side by side: proven equal, measured."""
TAIL = """Begin with      shardpair run                  (a minute; results in runs/)
More of one     shardpair COMMAND --help       (every flag, with examples)
Everywhere      --dry_run: what would run; --json: for machines; also --version"""


def overview() -> str:
    """The screen: a line for each command."""
    blocks = [
        "\n".join([f"{group}:", *(f"  {word:<12} {does}" for word, does in words.items())])
        for group, words in GROUPS.items()
    ]
    return "\n".join([HEAD, "", *blocks, TAIL])
