"""What processes of several hosts tell each other: disagreements and hangs, each named with its host."""

import pytest

from compare.contract import other_hosts
from compare.contract.other_hosts import HostFacts, Waiting, agree, blame_for_hang
from compare.contract.record import WAITING, Failure, leave_failure, read_failure
from compare.host.json_files import write_json
from compare.spec.experiment import ExperimentError


def facts(host: str, *, numpy="2.0", sha256="a" * 64) -> HostFacts:
    return HostFacts(host=host, versions={"numpy": numpy}, corpus_sha256=sha256)


ALIKE = [facts("host0"), facts("host0", sha256=""), facts("host1"), facts("host1", sha256="")]


def test_hosts_that_differ_are_named_with_both_values(tmp_path):
    with pytest.raises(ExperimentError, match=r"host1 has numpy 2\.1, and host0 2\.0: install the same"):
        agree([*ALIKE, facts("host1", numpy="2.1")], tmp_path, is_first=True)
    with pytest.raises(ExperimentError, match="host1 reads other data than host0: SHA-256 of the tokens bb"):
        agree([*ALIKE, facts("host1", sha256="b" * 64)], tmp_path, is_first=True)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run of four processes on two hosts, in which process 0 is about to give up."""
    monkeypatch.setattr(other_hosts, "SETTLED_S", 0.0)
    agree(ALIKE, tmp_path, is_first=True)
    return tmp_path


def hang(folder, *others: Waiting) -> str:
    for one in others:
        write_json(folder / f"{WAITING}{one.number}.json", one)
    own = Waiting(number=0, where="step 5, forward", beats=9)
    return blame_for_hang(folder, own, count=4, timeout_s=20).message


def test_who_is_silent_or_behind_is_named_with_its_host(folder):
    others = {n: Waiting(number=n, where="step 5, forward", beats=9) for n in (1, 2, 3)}
    assert hang(folder, others[1]).startswith(
        "processes 2, 3 on host1 gave no answer: no progress for 20 s, while processes 0, 1 waited in step "
    )
    assert hang(folder, others[3]) == (
        "process 2 on host1 gave no answer: no progress for 20 s, while processes 0, 1, 3 waited in step 5, "
        "forward"
    )
    assert hang(folder, others[2]) == (
        "no process made progress for 20 s: all wait in step 5, forward, on host0, host1: is the link "
        "between them cut?"
    )
    late = Waiting(number=3, where="step 4, record", beats=7)
    assert hang(folder, late).startswith("process 3 on host1 stayed in step 4, record: ")


def test_a_cause_that_was_left_meanwhile_comes_first(folder):
    leave_failure(folder, Failure(message="process 3 on host1 failed"))
    assert hang(folder) == "process 3 on host1 failed"


def test_a_consequence_gives_way_to_the_first_cause(tmp_path):
    said = [
        Failure(message="connection closed by peer", is_consequence=True),
        Failure(message="ended by SIGTERM", is_consequence=True),
        Failure(message="out of memory", rank=3),
        Failure(message="too late", rank=1),
    ]
    for failure, left in zip(said, [said[0], said[0], said[2], said[2]], strict=True):
        leave_failure(tmp_path, failure)
        assert read_failure(tmp_path) == left
