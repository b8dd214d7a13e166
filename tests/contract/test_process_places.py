"""A process's place among those of a run, from a launcher's variables or from flags."""

import pytest

from compare.contract.command import parse_arguments
from compare.contract.processes import Process, find_process, first_host
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


def find(environment=None, flags=()) -> Process | None:
    arguments = parse_arguments("torchpar", {}, ["RUN_DIR", *flags])
    return find_process(arguments, environment or {})


def flags(coordinator="head:1234", processes=2, process=1):
    return ["--coordinator", coordinator, "--processes", str(processes), "--process", str(process)]


def test_slurm_comes_first_then_torchrun_then_flags():
    slurm = find(SLURM | TORCHRUN, flags())
    assert slurm is not None
    assert (slurm.number, slurm.count, slurm.local) == (5, 8, 1)
    assert slurm.address[0] == "gpu03"
    torchrun = find(TORCHRUN, flags())
    assert torchrun == Process(3, 4, 1, "head:29500")
    assert torchrun.variables == TORCHRUN
    assert find({}, flags()) == Process(1, 2, 0, "head:1234")
    assert find() is None


def test_steps_of_a_job_meet_at_different_ports_and_tasks_of_a_step_at_one():
    first, second = find(SLURM), find(SLURM | {"SLURM_STEP_ID": "3"})
    other_task = find(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert first
    assert second
    assert other_task
    assert first.coordinator == other_task.coordinator != second.coordinator
    assert other_task.is_first
    assert not first.is_first


def test_one_task_is_alone():
    for alone in (
        SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script is no task
        TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"},
    ):
        assert find(alone) is None


def test_what_does_not_fit_is_one_line():
    for environment, given, words in (
        ({}, flags(coordinator="head"), "give HOST:PORT"),
        ({}, ["--processes", "2"], "give HOST:PORT"),
        ({}, flags(process=2), "numbers go from 0 to N - 1"),
        ({"RANK": "1", "WORLD_SIZE": "x"}, [], "do not fit each other"),
        (SLURM | {"SLURM_PROCID": "x"}, [], "do not fit each other"),
    ):
        with pytest.raises(ExperimentError, match=words):
            find(environment, given)


def test_first_host_of_slurms_lists():
    for nodes, first in (("node7", "node7"), ("a,b", "a"), ("gpu[03-06,9].cluster,login", "gpu03.cluster")):
        assert first_host(nodes) == first
