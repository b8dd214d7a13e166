"""What processes of several hosts tell each other: disagreements and hangs, each named with its host."""

import pytest
from msgspec.structs import replace

from compare.contract.record import Failure, leave_failure, read_failure
from compare.side import host_facts, process_states
from compare.side.host_facts import HostFacts, agree
from compare.side.process_states import State, announce, blame_for_hang, say, states_in
from compare.side.processes import Process
from compare.spec.experiment import ExperimentError


def facts(host: str, *, numpy="2.0", sha256="a" * 64) -> HostFacts:
    return HostFacts(host=host, versions={"numpy": numpy}, corpus_sha256=sha256)


ALIKE = [facts("host0"), facts("host0", sha256=""), facts("host1"), facts("host1", sha256="")]


def test_hosts_that_differ_are_named_with_both_values():
    agree(ALIKE)
    for other, words in (
        (facts("host1", numpy="2.1"), r"host1 has numpy 2\.1, and host0 2\.0: install the same"),
        (facts("host1", sha256="b" * 64), "host1 reads other data than host0: SHA-256 of the tokens bb"),
    ):
        with pytest.raises(ExperimentError, match=words):
            agree([*ALIKE, other])


def test_a_changed_line_of_source_is_seen(tmp_path, monkeypatch):
    package = tmp_path / "side"
    package.mkdir()
    file = package / "__init__.py"
    file.write_text("rate = 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = host_facts.facts_here("side", ["numpy"])
    file.write_text("rate = 1.5\n")
    with pytest.raises(ExperimentError, match=r"has shardpair [0-9a-f]{12}, and .* [0-9a-f]{12}: install"):
        agree([before, host_facts.facts_here("side", ["numpy"])])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run of four processes on two hosts, in which process 0 is about to give up."""
    monkeypatch.setattr(process_states, "SETTLED_S", 0.0)
    for number, one in enumerate(ALIKE):
        say(tmp_path, State(number=number, host=one.host))
    return tmp_path


def hang(folder, *others: State) -> str:
    for one in others:
        say(folder, one)
    own = State(number=0, host="host0", where="step 5, forward", beats=9)
    failure = blame_for_hang(folder, own, count=4, timeout_s=20)
    assert failure
    return failure.message


def test_who_is_silent_or_behind_is_named_with_its_host(folder):
    others = {
        n: State(number=n, host=f"host{n // 2}", where="step 5, forward", beats=9, waits=True)
        for n in (1, 2, 3)
    }
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
    late = State(number=3, host="host1", where="step 4, record", beats=7, waits=True)
    assert hang(folder, late).startswith("process 3 on host1 stayed in step 4, record: ")


def test_who_sees_the_time_out_later_has_not_been_silent(folder, monkeypatch):
    """The four begin to wait a second apart, one after the other: the link is cut, and nobody is to blame."""
    own = State(number=0, host="host0", where="step 5", beats=9)
    later = (replace(own, number=number, host="host1", waits=True) for number in (1, 2, 3))
    monkeypatch.setattr(process_states.time, "sleep", lambda seconds: say(folder, next(later)))
    failure = blame_for_hang(folder, own, count=4, timeout_s=20)
    assert failure
    assert failure.message.endswith("on host0, host1: is the link between them cut?")


def test_who_still_computes_before_its_first_step_is_waited_for(folder, monkeypatch):
    monkeypatch.setattr(
        process_states.time, "sleep", lambda seconds: say(folder, State(number=3, host="host1", looks=1))
    )
    assert blame_for_hang(folder, State(number=0), count=4, timeout_s=20) is None
    assert not states_in(folder)[0].waits


def test_a_process_tells_of_itself_from_its_first_line_on(folder):
    say(folder, State(number=2, host="host1", failure=Failure(message="of an earlier run")))
    first = Process(0, 4, 0, "host0", 29500)
    announce(folder, first)
    assert {number: state.failure for number, state in states_in(folder).items()} == {
        0: None,
        1: None,
        3: None,
    }
    with pytest.raises(ExperimentError, match=r"process 0 on .* cannot write into .*: No such file"):
        announce(folder / "none", first)


def test_a_cause_that_was_left_meanwhile_comes_first(folder):
    say(folder, State(number=3, host="host1", failure=Failure(message="process 3 on host1 failed")))
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
