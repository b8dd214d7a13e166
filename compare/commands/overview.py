"""`shardpair --help`: every command on one screen, by what one wants to do."""

from compare.studies.registry import STUDIES

GROUPS: dict[str, dict[str, str]] = {
    "Train and compare": {
        "run": "train one experiment with each engine, compare, write a report",
        "resume": "go on from checkpoints, on any engines and layout",
        "sweep": "strategies side by side, or over growing numbers of devices",
        "report": "judge a finished run again, and write its page anew",
        "diff": "two finished runs of any settings: numbers, settings, costs",
    },
    "Prove": {
        "check": "every engine against one unsharded device, in float64",
        "matrix": "every layout on every engine against one device, as a grid",
        "golden": "every engine against the numbers of nanoGPT's own train.py",
        "faults": "plant each known mistake: every check must turn red",
    },
    "Measure": {word: study.brief for word, study in STUDIES.items()}
    | {
        "profile": "where the time of one step goes, device by device",
        "ledger": "what each engine sends in a step, beside the closed form",
        "collectives": "collectives by size: gloo or NCCL, our way, and XLA",
    },
    "Read": {
        "runs": "what was run here: layout, verdict, age, size; --prune",
        "lesson": "one strategy in every engine, side by side, on a page",
        "schedule": "draw pipeline schedules, with bubble and memory",
        "mirror": "lines of code of each strategy in each engine",
        "list": "names of experiments, presets, faults, engines, lessons",
        "doctor": "what is installed, and what can run here",
    },
    "Use a trained model": {
        "convert": "a training's state into another format: nanoGPT, Hugging Face",
        "sample": "draw text from a checkpoint",
    },
}

HEAD = """usage: shardpair COMMAND [arguments]

Sharded training in JAX and in PyTorch, side by side: proven equal, measured."""
TAIL = """Begin with      shardpair run                  (a minute; results in runs/)
More of one     shardpair COMMAND --help       (every flag, with examples)
Would it run?   shardpair COMMAND ... --dry_run
For machines    --json on every command
What this is    shardpair --version"""


def overview() -> str:
    """The screen: a line for each command."""
    blocks = [
        "\n".join([f"{group}:", *(f"  {word:<12} {does}" for word, does in words.items())])
        for group, words in GROUPS.items()
    ]
    return "\n\n".join([HEAD, "\n".join(blocks), TAIL])
