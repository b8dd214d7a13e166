"""A step compiled by jaxpar for devices that are not here, in a process of its own; answers are kept."""

import hashlib
from pathlib import Path

import msgspec

from compare.contract.ahead_of_time import AheadRequest, CompiledAhead
from compare.execute.ask import ask
from compare.execute.launch import EnvironmentMissing, child_environment
from compare.execute.machine import git_state
from compare.host.disk import write_atomically
from compare.host.json_files import read_json
from compare.spec.engines.registry import side_of

FOLDER = "compiled"
"""Of the user's cache."""


def compiled_ahead(
    request: AheadRequest, python: str, *, cache: Path | None, timeout_s: float
) -> CompiledAhead:
    """What a compiler makes of a step; what it made of it before, if this very source was asked.

    Args:
        request: the engine is one of jaxpar.
        python: that runs it.
        cache: folder of answers, by their questions; None for none.
        timeout_s: seconds until it must have ended.

    Raises:
        EnvironmentMissing: it could not, and why: a compiler that is not installed, or no such topology.
    """
    question = msgspec.json.encode(request)
    kept = _kept_in(cache, question, python) if cache else None
    if kept and kept.is_file():
        return read_json(kept, CompiledAhead)
    side = side_of(request.engine)
    environment = child_environment(side, "cpu")
    words = ["--compile", question.decode()]
    found = ask(side.name, python, words, answer=CompiledAhead, environment=environment, timeout_s=timeout_s)
    if isinstance(found, str):
        raise EnvironmentMissing(found.removeprefix(f"{side.name}: "))
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, msgspec.json.encode(found))
    return found


def _kept_in(cache: Path, question: bytes, python: str) -> Path | None:
    """File of an answer; None for a source that no commit names."""
    commit, dirty = git_state()
    if dirty or not commit:
        return None
    key = hashlib.sha256(b"\0".join((question, commit.encode(), python.encode()))).hexdigest()[:32]
    return cache / FOLDER / f"{key}.json"
