"""glibc keeps freed memory: a new process counts its page faults."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from torchpar.host_memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
for step in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(size) for size in range(1_000_000, 3_000_000, 100_000)]
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


PAGES = sum(range(1_000_000, 3_000_000, 100_000)) * 4 // 4096


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_memory_stays_mapped():
    command = [sys.executable, "-c", FAULTS, "keep"]
    faults = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert faults < 0.1 * PAGES
