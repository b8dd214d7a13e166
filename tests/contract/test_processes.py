"""Place of a process in a run, from a launcher's variables."""

import pytest

from compare.side.processes import Process, address_towards, find_process, first_host
from compare.spec.experiment import ExperimentError

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[03-06,9],login",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}


def test_torchrun_comes_before_slurm():
    place = find_process(SLURM | TORCHRUN)
    assert place == Process(3, 4, 1, "head", 29500)
    assert place.variables == TORCHRUN


def test_slurm_gives_place():
    slurm = find_process(SLURM)
    assert slurm is not None
    assert (slurm.number, slurm.count, slurm.local, slurm.host) == (5, 8, 1, "gpu03")
    assert not slurm.is_first


def test_slurm_steps_have_different_ports():
    first, second = find_process(SLURM), find_process(SLURM | {"SLURM_STEP_ID": "3"})
    other_task = find_process(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert first
    assert second
    assert other_task
    assert first.port == other_task.port != second.port
    assert other_task.is_first


@pytest.mark.parametrize(
    "environment",
    [
        {},
        SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"},
    ],
    ids=["nothing", "one task", "batch script", "one rank"],
)
def test_single_process_has_no_place(environment):
    assert find_process(environment) is None


@pytest.mark.parametrize(
    "environment",
    [{"RANK": "1", "WORLD_SIZE": "x"}, {"RANK": "1", "WORLD_SIZE": "2"}, SLURM | {"SLURM_PROCID": "x"}],
)
def test_incomplete_variables_are_rejected(environment):
    with pytest.raises(ExperimentError, match=r"variables are incomplete: .*: set RANK, .* MASTER_PORT"):
        find_process(environment)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("a,b", "a"),
        ("gpu[03-06,9].cluster,login", "gpu03.cluster"),
        ("rack[1-2]node[01-04],login", "rack1node01"),
    ],
)
def test_first_host_of_slurm_list(nodes, first):
    assert first_host(nodes) == first


def test_address_towards_loopback():
    assert address_towards("127.0.0.1", 29500) == "127.0.0.1"


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 99999), ("no-such-host.invalid", 29500)])
def test_wrong_coordinator_is_rejected(host, port):
    with pytest.raises(ExperimentError, match=rf"{host}:{port} \(the coordinator\): "):
        address_towards(host, port)
