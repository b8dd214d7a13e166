"""The commit that a comparison names is that of this project's own source tree, or none."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compare.execute import machine

AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *AUTHOR, *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """A repository with a file in it, and nothing else."""
    if not shutil.which("git"):
        pytest.skip("there is no git")
    git(tmp_path, "init", "--quiet")
    (tmp_path / "README").write_text("another project\n")
    git(tmp_path, "add", "README")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


def install(folder: Path) -> Path:
    """Copy the module to where it would be installed."""
    (folder / "compare" / "execute").mkdir(parents=True)
    return Path(shutil.copy(machine.__file__, folder / "compare" / "execute" / "machine.py"))


def state(module: Path, monkeypatch) -> tuple[str, bool]:
    monkeypatch.setattr(machine, "__file__", str(module))
    return machine.git_state()


def test_another_projects_repository_lends_no_commit_unless_it_tracks_us(repository, monkeypatch):
    wheel = install(repository / ".venv" / "lib" / "site-packages")
    assert state(wheel, monkeypatch) == ("", False)
    git(repository, "add", "--force", ".venv")
    git(repository, "commit", "--quiet", "--message", "an environment, committed")
    assert state(wheel, monkeypatch) == ("", False)
    module = install(repository)
    assert state(module, monkeypatch) == ("", False)
    git(repository, "add", "compare")
    git(repository, "commit", "--quiet", "--message", "this project")
    assert state(module, monkeypatch) == (git(repository, "rev-parse", "HEAD"), False)
    module.write_text(module.read_text() + "\n")
    assert state(module, monkeypatch) == (git(repository, "rev-parse", "HEAD"), True)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent / "nowhere"))
    assert state(module, monkeypatch) == ("", False)
