"""What cannot be read is refused in one line: the wrong word, what would be right, and the right help."""

import re

import msgspec
import pytest

from compare.cli import COMMANDS, main, parse
from compare.commands.command_line import _flags, read_line, why_refused
from compare.commands.overview import GROUPS, overview
from compare.flags.arguments import Spec
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import ExperimentError

BAD = {
    "": "give a command, such as shardpair run; see shardpair --help",
    "runn": "runn: no such command (did you mean run?); see shardpair --help",
    "--model.n_layer 2": "--model.n_layer: no such command; see shardpair --help",
    "run --model.n_layer 0x10": "--model.n_layer 0x10: give a whole number; see shardpair run --help",
    "run --model.n_layer 2.5": "--model.n_layer 2.5: give a whole number; see shardpair run --help",
    "run --model.n_layer=": "--model.n_layer : give a whole number; see shardpair run --help",
    "run --model.n_layer": "--model.n_layer: give a whole number behind it; see shardpair run --help",
    "run --model.n_layer --quiet": "--model.n_layer: give a whole number behind it; see shardpair run --help",
    "run --layout.zero 4": "--layout.zero 4: give one of 0, 1, 2, 3; see shardpair run --help",
    "run --layout.remat dot": "--layout.remat dot: give one of auto, dots, full, none (did you mean dots?)",
    "run --platform tpu": "--platform tpu: give one of cpu, gpu",
    "run --engines A,B": f"--engines A,B: give one of {', '.join(sorted(ENGINES))}",
    "run --engines torch-manual jax": "--engines jax: give one of ",
    "run --model.n_layr 2": "--model.n_layr: no such flag (did you mean --model.n_layer?); see shardpair",
    "run -x": "-x: no such flag; see shardpair run --help",
    "run --timeout_s soon": "--timeout_s soon: give a number; see shardpair run --help",
    "run --devices two --preset ddp": "--devices two: give a whole number; see shardpair run --help",
    "run demo --model.bias true": "--model.bias true: a switch takes no value: --model.bias or --model.",
    "run --model.bias true": "true: no flag takes this (a switch is --model.bias or --model.no_bias",
    "run demo other": "other: no flag takes this; see shardpair run --help",
    "golden demo": "demo: no flag takes this; see shardpair golden --help",
    "bench --rounds many": "--rounds many: give a whole number; see shardpair bench --help",
    "buckets --bucket_mb 1 x": "--bucket_mb x: give a number; see shardpair buckets --help",
    "sweep --scaling big": "--scaling big: give one of none, strong, weak; see shardpair sweep --help",
    "lesson nosuch": "nosuch: give one of data_parallel, fully_sharded, pipeline_parallel, tensor_para",
    "convert only": "TARGET is missing: give a path; see shardpair convert --help",
    "report": "RUN_DIR is missing: give a path; see shardpair report --help",
    "list demo": "demo: no flag takes this; see shardpair list --help",
    "list --jsn": "--jsn: no such flag (did you mean --json?); see shardpair list --help",
    "run --model.n_head 0": "model.n_head = 0 must be at least 1",
    "run --model.dropout 1.5": "model.dropout = 1.5 must be less than 1.0",
    f"run --model.n_layer {'9' * 4000}": f"{'9' * 60}...",
    f"run --{'k' * 9000} 1": f"--{'k' * 58}...: no such flag; see shardpair run --help",
    f"{'k' * 9000}": f"{'k' * 60}...: no such command; see shardpair --help",
    f"run --layout.zero {'k' * 9000}": f"--layout.zero {'k' * 60}...: give one of 0, 1, 2, 3",
    "sample nope": "shardpair: error: nope: no checkpoint is there",
}  # fmt: skip


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:40])
def test_refused_in_one_line(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("shardpair: error: ")
    assert output.err.count("\n") == 1
    assert BAD[line] in output.err
    assert len(output.err) < 300
    assert not list(tmp_path.iterdir())


def test_what_no_one_foresaw_is_one_line_too():
    class Odd(msgspec.Struct, frozen=True, kw_only=True):
        pair: tuple[int, int] = (1, 2)

    with pytest.raises(ExperimentError, match="see shardpair odd --help") as refused:
        read_line(Odd, ["--pair", "1"], prog="shardpair odd", default=None)
    assert "\n" not in str(refused.value)
    assert "pair" in str(refused.value)


@pytest.mark.parametrize("word", COMMANDS)
def test_every_flag_of_the_help_is_known_to_the_messages(word, capsys):
    with pytest.raises(SystemExit) as ended:
        main([word, "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    flags = [flag for flag in _flags(COMMANDS[word]) if flag.name.startswith("--")]
    assert flags
    assert not re.search(r"--[a-z_.]+-[a-z]", printed)  # one spelling, though both are read
    for flag in flags:
        assert f"{flag.name} " in printed or f"{flag.name}," in printed, flag.name
        assert "no such flag" not in why_refused(COMMANDS[word], [flag.name])


def test_help_is_one_screen(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert printed == f"{overview()}\n"
    lines = printed.splitlines()
    assert len(lines) <= 44  # of a terminal as high as a laptop's screen
    assert max(map(len, lines)) <= 80
    assert sorted(word for words in GROUPS.values() for word in words) == sorted(COMMANDS)
    for said in ("shardpair run", "COMMAND --help", "--dry_run", "--json", "--version"):
        assert said in printed
    assert main(["-h"]) == 0


def test_completion_knows_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--tyro-print-completion", "bash"])
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert all(word in printed for word in COMMANDS)
    assert "--layout.microbatches" in printed


def test_negative_numbers_and_both_spellings_are_read():
    command, _ = parse(["run", "--layout.no-reshard-after-forward", "--optimizer.min-lr=1e-4", "--no-ladder"])
    assert isinstance(command, Spec)
    assert not command.layout.reshard_after_forward
    assert {"layout.reshard_after_forward", "optimizer.min_lr", "ladder"} <= command.given
