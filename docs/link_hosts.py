"""Two hosts on this machine whose link can be capped: network namespaces with a name and an address each.

Needs root, iproute2 (ip, tc) and util-linux (nsenter, unshare). They are made and removed by `with`.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

RATES_GBIT = (0, 10, 1, 0.25)
"""Caps; 0 is none."""
NAMES = ("link0", "link1")
BRIDGE, NET = "links-br", "10.79.0"
PORT = 29400
PROBE_BYTES = {0: 2**28, 10: 2**28, 1: 2**26, 0.25: 2**24}
ROUND_TRIPS = 200
# A host has its name, and finds the others by theirs.
ENTER = 'hostname "$0"; mount --bind "$1" /etc/hosts; shift; exec "$@"'
SERVER = """
import socket
with socket.create_server(("{address}", {port})) as server:
    print("listens", flush=True)
    for _ in range(2):
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := connection.recv(2**20):
            if len(data) == 1:
                connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
"""
CLIENT = """
import socket, time
def connect():
    one = socket.create_connection(("{address}", {port}))
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one
with connect() as one:
    for _ in range(10): one.sendall(b"x"); one.recv(1)
    begun = time.monotonic()
    for _ in range({trips}): one.sendall(b"x"); one.recv(1)
    trip = (time.monotonic() - begun) / {trips} / 2
with connect() as one:
    block, left = bytes(2**16), {size}
    begun = time.monotonic()
    while left > 0: one.sendall(block); left -= len(block)
    one.shutdown(socket.SHUT_WR); one.recv(1)  # when all has arrived
    print({size} / (time.monotonic() - begun), trip)
"""


class TwoHosts:
    """The hosts, while it is entered; `cap` sets the speed of the link in both directions."""

    def __enter__(self) -> Self:
        if os.geteuid() or not shutil.which("tc"):
            raise SystemExit("hosts with a link of their own need root and iproute2 (ip, tc)")
        self._gbit = 0.0
        self._remove()
        file, path = tempfile.mkstemp(prefix="links-hosts.")
        os.close(file)
        self._hosts = Path(path)
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._remove()
        self._hosts.unlink()

    def cap(self, gbit: float) -> None:
        """Cap both directions; 0 lifts it."""
        self._gbit = gbit
        for name in NAMES:
            if gbit:
                shape = f"rate {gbit * 1000:g}mbit burst 256kb latency 200ms"
                _do(f"tc qdisc replace dev {name}-v root tbf {shape}")
            else:
                _do(f"tc qdisc del dev {name}-v root", may_fail=True)

    def sent(self) -> int:
        """Bytes that both hosts have sent so far, headers included."""
        return sum(int(Path(f"/sys/class/net/{name}-v/statistics/rx_bytes").read_text()) for name in NAMES)

    def probe(self) -> tuple[float, float]:
        """Bytes/s of one stream at the present cap, and seconds of half a round trip of a byte."""
        words = {
            "address": _address(0),
            "port": PORT + 1,
            "trips": ROUND_TRIPS,
            "size": PROBE_BYTES[self._gbit],
        }
        server = self._on(0, [sys.executable, "-c", SERVER.format(**words)], stdout=subprocess.PIPE)
        try:
            assert server.stdout
            server.stdout.readline()
            client = self._on(1, [sys.executable, "-c", CLIENT.format(**words)], stdout=subprocess.PIPE)
            said = client.communicate(timeout=60)[0].split()
        finally:
            server.kill()
            server.wait()
        return float(said[0]), float(said[1])

    def start(
        self, command: list[str], on_host: int, folder: Path, *, environment: Mapping[str, str]
    ) -> list[subprocess.Popen]:
        """Start the processes of a side on both hosts; what each says goes to folder/N.log."""
        count = len(NAMES) * on_host
        started = []
        for number in range(count):
            place = [
                "--coordinator",
                f"{NAMES[0]}:{PORT}",
                "--processes",
                str(count),
                "--process",
                str(number),
            ]
            place += ["--local_process", str(number % on_host)]
            with (folder / f"{number}.log").open("wb") as log:
                started.append(
                    self._on(
                        number // on_host,
                        [*command, *place],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=dict(environment),
                    )
                )
        return started

    def study(self, words: Sequence[str], folder: Path) -> dict[str, Any]:
        """Run a study on both hosts, its harness on the first one; what it asks of the other is run there.

        Args:
            words: of its command line.
            folder: for its results; must not exist.

        Returns:
            Its outcome.

        Raises:
            RuntimeError: it did not finish, or did not pass.
        """
        slots = folder.parent / "hostfile"
        slots.write_text("".join(f"{name} slots=8\n" for name in NAMES))
        how = ["--launcher", "torchrun", "--hostfile", str(slots), "--run_dir", str(folder), "--json"]
        command = [sys.executable, "-m", "compare", *words, *how]
        said, quiet = [], {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with (folder.parent / "outcome.json").open("w+") as outcome, contextlib.ExitStack() as ends:
            harness = self._on(0, command, stdout=outcome, stderr=subprocess.PIPE, text=True)
            ends.callback(harness.wait)
            ends.callback(harness.kill)
            for line in harness.stderr or ():
                said.append(line)
                if asked := re.match(rf"on {NAMES[1]}: (.*)", line):
                    other = self._on(1, shlex.split(asked[1]), **quiet)
                    ends.callback(other.wait)
                    ends.callback(other.kill)
            if harness.wait():
                last = "".join(said[-5:])
                raise RuntimeError(f"{shlex.join(words)}: exit code {harness.returncode}:\n{last}")
            outcome.seek(0)
            return json.load(outcome)

    def _on(self, host: int, command: list[str], **options) -> subprocess.Popen:
        name = NAMES[host]
        enter = [
            "nsenter",
            f"--net=/run/netns/{name}",
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-c",
            ENTER,
            name,
        ]
        return subprocess.Popen([*enter, str(self._hosts), *command], **options)

    def _make(self) -> None:
        lines = [f"{_address(host)} {name}\n" for host, name in enumerate(NAMES)]
        self._hosts.write_text(Path("/etc/hosts").read_text() + "\n" + "".join(lines))
        _do(f"ip link add {BRIDGE} type bridge")
        _do(f"ip link set {BRIDGE} up")
        for host, name in enumerate(NAMES):
            _do(f"ip netns add {name}")
            _do(f"ip link add {name}-v type veth peer name eth0 netns {name}")
            _do(f"ip link set {name}-v master {BRIDGE} up")
            _do(f"ip -n {name} addr add {_address(host)}/24 dev eth0")
            _do(f"ip -n {name} link set eth0 up")
            _do(f"ip -n {name} link set lo up")

    @staticmethod
    def _remove() -> None:
        with contextlib.suppress(FileNotFoundError):
            for name in NAMES:
                _do(f"ip netns del {name}", may_fail=True)  # its end of the link goes with it
            _do(f"ip link del {BRIDGE}", may_fail=True)


def _address(host: int) -> str:
    return f"{NET}.{host + 1}"


def _do(command: str, *, may_fail: bool = False) -> None:
    subprocess.run(command.split(), check=not may_fail, stderr=subprocess.DEVNULL if may_fail else None)
