"""The network interface on which gloo's ranks of several hosts meet."""

import os
import socket

import psutil

from compare.contract.processes import Process
from compare.spec.experiment import ExperimentError

INTERFACE = "GLOO_SOCKET_IFNAME"


def choose_interface(process: Process) -> None:
    """Have gloo listen where the coordinator is reached; a user's own choice is left alone, if there is such.

    Left to itself gloo takes the address that the host's name resolves to, often one of the loopback.

    Raises:
        ExperimentError: the user's choice, or the coordinator's name, does not exist.
    """
    there = [name for _, name in socket.if_nameindex()]
    if chosen := os.environ.get(INTERFACE):
        if chosen.split(",")[0] not in there:
            raise ExperimentError(f"{INTERFACE} = {chosen}: {process.name} has {', '.join(there)}")
        return
    host, port = process.address
    if host and (name := interface_to(host, port)):
        os.environ[INTERFACE] = name


def interface_to(host: str, port: int) -> str:
    """The interface by which this host reaches another one; '' if the system does not tell.

    Raises:
        ExperimentError: there is no such host.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect((host, port))
        except OSError as error:
            raise ExperimentError(f"{host}:{port} (the coordinator): {error.strerror}") from None
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == own for one in addresses):
            return name
    return ""
