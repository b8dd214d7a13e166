"""State files of processes, and the cause of an end that follows from them."""

import signal

import pytest

from compare.contract.record import Failure, leave_failure, read_failure
from compare.side.process_states import (
    Heartbeat,
    State,
    announce,
    describe_hang,
    find_first_cause,
    read_states,
    write_state,
)
from compare.side.processes import Process
from compare.spec.experiment import ExperimentError
from compare.system.signals import describe_exit


def test_heartbeat_outside_and_in_a_step():
    heartbeat = Heartbeat()
    assert (heartbeat.beats, heartbeat.where, heartbeat.when) == (0, "the start", "before the first step")
    heartbeat.at(3, "forward")
    assert (heartbeat.beats, heartbeat.where, heartbeat.when) == (1, "step 3, forward", "at step 3")
    assert heartbeat.in_step
    heartbeat.at(4, "the end")
    assert (heartbeat.in_step, heartbeat.when) == (False, "after the last step")


def test_announce_removes_older_states(tmp_path):
    write_state(tmp_path, State(number=1, host="host1"))
    write_state(tmp_path, State(number=2, host="host1", failure=Failure(message="of an earlier run")))
    first = Process(0, 4, 0, "host0", 29500)
    announce(tmp_path, first)
    assert list(read_states(tmp_path)) == [0, 1]
    with pytest.raises(ExperimentError, match=r"process 0 on .* cannot write into .*: No such file"):
        announce(tmp_path / "none", first)


LOST = Failure(message="rank 0 lost rank 1", rank=0, is_consequence=True)


@pytest.mark.parametrize(
    ("failures", "codes", "message"),
    [
        ([LOST, Failure(message="rank 1 failed", rank=1)], {0: 1, 1: 1}, "rank 1 failed"),
        ([LOST], {0: 1, 1: -signal.SIGKILL}, "rank 1 was killed by SIGKILL at step 3"),
        ([LOST], {0: 1}, "rank 0 lost rank 1"),
    ],
    ids=["error", "kill", "consequence"],
)
def test_first_cause_of_children(failures, codes, message, tmp_path):
    for failure in failures:
        write_state(tmp_path, State(number=failure.rank, failure=failure))
    cause = find_first_cause(tmp_path, lambda: codes, "rank {}".format, lambda number: "at step 3")
    assert cause.message.startswith(message)


def test_cause_replaces_consequence(tmp_path):
    failures = [
        Failure(message="connection closed by peer", is_consequence=True),
        Failure(message="ended by SIGTERM", is_consequence=True),
        Failure(message="out of memory", rank=3),
        Failure(message="too late", rank=1),
    ]
    for failure, kept in zip(failures, [0, 0, 2, 2], strict=True):
        leave_failure(tmp_path, failure)
        assert read_failure(tmp_path) == failures[kept]


def test_hang_on_one_host_names_no_host():
    states = {n: State(number=n, host="box", where="step 5, forward", beats=9 - n) for n in range(2)}
    failure = describe_hang(states, [], timeout_s=20)
    assert failure.message == (
        "process 1 stayed in step 5, forward: no progress for 20 s, while process 0 waited in step 5, forward"
    )


def test_hang_of_a_device_is_found_by_its_collectives():
    """The hosts of all ranks run ahead, to the same phase. Rank 0 waits for 1, and 2 and 3 wait for both."""
    begun = ({"tp 0": 8, "dp 0": 4}, {"tp 0": 7, "dp 1": 4}, {"tp 1": 8, "dp 0": 5}, {"tp 1": 8, "dp 1": 5})
    states = {
        number: State(number=number, host="box", where="step 5, optimizer", beats=9, begun=calls)
        for number, calls in enumerate(begun)
    }
    failure = describe_hang(states, [], timeout_s=20, noun="rank")
    assert failure == Failure(
        message="rank 1 did not begin collective 8 of group tp 0 on the device, in which rank 0 waited: "
        "no progress for 20 s in step 5, optimizer",
        rank=1,
    )


def test_signal_has_its_likely_cause():
    assert describe_exit(-signal.SIGBUS, when="at step 3") == (
        "killed by SIGBUS at step 3 (perhaps a data file became shorter, or a full disk)"
    )
