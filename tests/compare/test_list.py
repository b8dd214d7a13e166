"""The command line before any training: names and completion."""

import json
import subprocess

import pytest

from compare.cli import main
from compare.commands.faults import FAULTS
from compare.setup.lessons import LESSONS
from compare.setup.presets import PRESETS
from compare.spec.engines.registry import PEERS, STUDIED
from compare.spec.experiment import named_experiments


def test_list_names_everything_a_line_each(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first_words = [line.split()[0] for line in lines if line.strip()]
    assert main(["list", "--json"]) == 0
    everything = json.loads(capsys.readouterr().out)["values"]
    for title, known in {
        "experiments": named_experiments(),
        "presets": PRESETS,
        "faults": FAULTS,
        "engines": STUDIED,
        "peers": PEERS,
        "lessons": LESSONS,
    }.items():
        assert [entry["name"] for entry in everything[title]] == list(known)
        assert all(first_words.count(name) == 1 for name in known), title
        assert all(entry["description"] for entry in everything[title])


def test_completion_has_commands_and_flags(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["--tyro-print-completion", "bash"])
    assert ended.value.code in (0, None)
    script = tmp_path / "shardpair"
    script.write_text(capsys.readouterr().out)
    ask = (
        f"source {script}; COMP_WORDS=(shardpair run --pre); COMP_CWORD=2; "
        f"$(complete -p shardpair | sed 's/.*-F \\([^ ]*\\).*/\\1/'); echo ${{COMPREPLY[@]}}"
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=False)
    assert "--preset" in done.stdout, done.stderr
