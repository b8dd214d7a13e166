"""The circumstances of what begins now."""

import datetime
import platform as host

from compare.execute.machine import memory_bytes
from compare.execute.source import git_state
from compare.host.facts import cores, cpu_model
from compare.judge.circumstances import Circumstances, MachineFacts


def here_and_now(*busy_cores: float) -> Circumstances:
    """This machine, this moment, this source; and the cores that others use."""
    commit, dirty = git_state()
    return Circumstances(
        created_utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=MachineFacts(
            system=f"{host.system()} {host.machine()}",
            cpu_model=cpu_model(),
            cores=cores(),
            memory_bytes=memory_bytes(),
        ),
        git_commit=commit,
        git_dirty=dirty,
        busy_cores=list(busy_cores),
    )
