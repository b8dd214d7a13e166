"""Hosts on one machine: network namespaces on a bridge, each with a host name and an address of its own.

Needs root and iproute2; where they cannot be made, tests that ask for them skip and say why. Programs on them
are real interpreters: a fork of a warm server would live in the server's namespace.
"""

import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager

import pytest

_TOOLS = ("ip", "nsenter", "unshare")


class NetHosts:
    """Some hosts that reach each other.

    Args:
        count: of hosts.
    """

    def __init__(self, count: int):
        self.count, self._mark = count, f"t{os.getpid()}"
        self._net = f"10.78.{os.getpid() % 250}"

    def address(self, number: int) -> str:
        """The address of a host."""
        return f"{self._net}.{number + 1}"

    def command(self, number: int, command: list[str]) -> list[str]:
        """A command as it runs on a host, whose name is host0, host1 and so on."""
        enter = ["nsenter", f"--net=/run/netns/{self._mark}-{number}", "unshare", "--uts", "sh", "-c"]
        return [*enter, 'hostname "$0" && exec "$@"', f"host{number}", *command]

    def unplug(self, number: int) -> None:
        """Cut a host's link."""
        _ip("link", "set", f"{self._mark}v{number}", "down")

    def plug(self, number: int) -> None:
        """Put it back."""
        _ip("link", "set", f"{self._mark}v{number}", "up")

    def up(self) -> None:
        """Make them. Raises CalledProcessError: the system does not allow it."""
        bridge = f"{self._mark}b"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for number in range(self.count):
            name, link = f"{self._mark}-{number}", f"{self._mark}v{number}"
            _ip("netns", "add", name)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", link, "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", name, "link", "set", device, "up")

    def down(self) -> None:
        """Remove them, and whatever of them is there."""
        for number in range(self.count):
            subprocess.run(["ip", "netns", "del", f"{self._mark}-{number}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", f"{self._mark}b"], capture_output=True, check=False)


@contextmanager
def net_hosts(count: int) -> Generator[NetHosts]:
    """Hosts as long as the block lasts; a test skips where they cannot be made."""
    if missing := [tool for tool in _TOOLS if not shutil.which(tool)]:
        pytest.skip(f"hosts need {', '.join(missing)} (iproute2, util-linux)")
    if os.geteuid():
        pytest.skip("hosts of network namespaces need root")
    hosts = NetHosts(count)
    try:
        try:
            hosts.up()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        yield hosts
    finally:
        hosts.down()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
