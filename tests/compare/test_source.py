"""The commit in an outcome: of this source tree, or none."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compare.execute import this_machine

AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *AUTHOR, *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def install(folder: Path) -> Path:
    (folder / "compare" / "execute").mkdir(parents=True)
    return Path(shutil.copy(this_machine.__file__, folder / "compare" / "execute" / "this_machine.py"))


@pytest.mark.skipif(not shutil.which("git"), reason="git is missing")
def test_commit_is_of_our_own_repository(tmp_path, monkeypatch):
    def state(module: Path) -> tuple[str, bool]:
        monkeypatch.setattr(this_machine, "__file__", str(module))
        return this_machine.git_state()

    git(tmp_path, "init", "--quiet")
    wheel = install(tmp_path / ".venv" / "lib" / "site-packages")
    for added in ((), ("--force", ".venv")):  # untracked, then committed
        git(tmp_path, "add", *added)
        git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "another project")
        assert state(wheel) == ("", False)
    module = install(tmp_path)
    assert state(module) == ("", False)
    git(tmp_path, "add", "compare")
    git(tmp_path, "commit", "--quiet", "--message", "this project")
    assert state(module) == (git(tmp_path, "rev-parse", "HEAD"), False)
    module.write_text(module.read_text() + "\n")
    assert state(module) == (git(tmp_path, "rev-parse", "HEAD"), True)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent / "nowhere"))
    assert state(module) == ("", False)
