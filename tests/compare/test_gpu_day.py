"""`make gpu-day`: commands that the command line knows, done once, gone on with where one failed."""

import gpu_day
import pytest

from compare.cli import main, parse


@pytest.mark.parametrize("name", gpu_day.STEPS)
def test_every_step_is_a_command_line(name, tmp_path):
    command, _ = parse(gpu_day.arguments_of(name, tmp_path, dry_run=False))
    assert getattr(command, "platform", "gpu") == "gpu"
    if name != "doctor":
        assert command.run_dir == str(tmp_path / name)
        plan = gpu_day.arguments_of(name, tmp_path, dry_run=True)
        assert "gpu" not in plan
        assert main(plan) == 0


def test_what_is_done_is_not_done_again_and_a_failure_stops_nothing(tmp_path):
    ran = []

    def run(arguments: list[str]) -> int:
        ran.append(arguments[0])
        folder = tmp_path / arguments[-1] if "--run_dir" in arguments else None
        if folder:
            folder.mkdir(parents=True)  # as `create_run_dir` does: it must not exist
        return 1 if arguments[0] == "golden" and ran.count("golden") < 3 else 0

    names = ["doctor", "golden", "ledger"]
    assert gpu_day.run_steps(names, tmp_path, run, dry_run=False) == {"doctor": 0, "golden": 1, "ledger": 0}
    assert gpu_day.run_steps(names, tmp_path, run, dry_run=False) == {"golden": 1}
    assert gpu_day.run_steps(names, tmp_path, run, dry_run=False) == {"golden": 0}
    assert gpu_day.run_steps(names, tmp_path, run, dry_run=False) == {}
    assert ran == ["doctor", "golden", "ledger", "golden", "golden"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "golden",
        "golden-1",
        "golden-2",
        "ledger",
    ]


def test_an_unknown_step_is_named(capsys):
    assert gpu_day.main(["dance"]) == 2
    assert "dance: no such step (there are doctor, check-float64" in capsys.readouterr().err
