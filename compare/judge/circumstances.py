"""When and where something was measured, on what machine, beside what load, by which source."""

from msgspec import Struct


class Circumstances(Struct, frozen=True, kw_only=True):
    """When and where a study was run, and by which version of the source."""

    created_utc: str = ""
    system: str = ""
    cpu_model: str = ""
    cores: int = 0
    memory_bytes: int = 0
    git_commit: str = ""
    git_dirty: bool = False
    versions: dict[str, str] = {}
    """Of Python and the frameworks, as the processes said."""
    busy_cores: list[float] = []
    """In use by others before each round."""

    @property
    def made_by(self) -> str:
        """The version of shardpair, in words."""
        if not self.git_commit:
            return "shardpair, not from a git checkout"
        return f"shardpair {self.git_commit[:12]}{' with uncommitted changes' if self.git_dirty else ''}"

    @property
    def words(self) -> str:
        """The version, the machine, the moment and the load, for the end of a page."""
        loads = ", ".join(f"{cores:.2f}" for cores in self.busy_cores)
        return (
            f"{self.made_by}. {self.system}, {self.cpu_model}, {self.cores} cores. "
            f"{self.created_utc[:16].replace('T', ' ')} UTC. Cores in use by others before each round: "
            f"{loads or 'none'}."
        )
