"""A process's place among those of a run, from a launcher's variables."""

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


def test_slurm_comes_first_and_then_torchrun():
    slurm = find_process(SLURM | TORCHRUN)
    assert slurm is not None
    assert (slurm.number, slurm.count, slurm.local, slurm.host) == (5, 8, 1, "gpu03")
    torchrun = find_process(TORCHRUN)
    assert torchrun == Process(3, 4, 1, "head", 29500)
    assert torchrun.variables == TORCHRUN


def test_steps_of_a_job_meet_at_different_ports_and_tasks_of_a_step_at_one():
    first, second = find_process(SLURM), find_process(SLURM | {"SLURM_STEP_ID": "3"})
    other_task = find_process(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert first
    assert second
    assert other_task
    assert first.port == other_task.port != second.port
    assert other_task.is_first
    assert not first.is_first


def test_one_task_is_alone():
    for alone in (
        {},
        SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script is no task
        TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"},
    ):
        assert find_process(alone) is None


def test_variables_that_do_not_fit_are_refused():
    for environment in ({"RANK": "1", "WORLD_SIZE": "x"}, SLURM | {"SLURM_PROCID": "x"}):
        with pytest.raises(ExperimentError, match="do not fit each other"):
            find_process(environment)


def test_first_host_of_slurms_lists():
    for nodes, first in (
        ("node7", "node7"),
        ("a,b", "a"),
        ("gpu[03-06,9].cluster,login", "gpu03.cluster"),
        ("rack[1-2]node[01-04],login", "rack1node01"),
    ):
        assert first_host(nodes) == first


def test_a_coordinator_that_cannot_be_is_one_line():
    assert address_towards("127.0.0.1", 29500) == "127.0.0.1"
    for host, port in (("127.0.0.1", 99999), ("no-such-host.invalid", 29500)):
        with pytest.raises(ExperimentError, match=rf"{host}:{port} \(the coordinator\): "):
            address_towards(host, port)
