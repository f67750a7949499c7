"""Two hosts on one machine: two network namespaces, with a cable (a veth pair) between them. Needs root."""

import ctypes
import functools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PORT = 29511
INTERFACE = "cable"
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Hosts:
    """Two hosts. A host is the network namespace of a process that sleeps, and ends with it."""

    pids: tuple[int, ...]

    @property
    def init_method(self) -> str:
        """The address at which the first host's ranks wait for the others."""
        return f"tcp://{address(0)}:{_PORT}"

    def enter(self, host: int) -> None:
        """Move this process to a host."""
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = os.open(_network_of(self.pids[host]), os.O_RDONLY)
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE

    def run(self, host: int, *command: str) -> None:
        """Run a command on a host."""
        network = f"--net={_network_of(self.pids[host])}"
        subprocess.run(["nsenter", network, *command], capture_output=True, check=True, timeout=30)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make two hosts with a cable between them, and remove them at the end."""
    with ExitStack() as stack:
        keepers = []
        for _ in range(2):
            keepers.append(subprocess.Popen(["unshare", "--net", "sleep", "3600"], stderr=subprocess.PIPE))
            stack.enter_context(_at_end(functools.partial(_end, keepers[-1])))
        hosts = Hosts(tuple(keeper.pid for keeper in keepers))
        for keeper in keepers:
            _wait_for_namespace(keeper)
        peer = ("peer", "name", INTERFACE, "netns", str(hosts.pids[1]))
        hosts.run(0, "ip", "link", "add", INTERFACE, "type", "veth", *peer)
        for rank in range(2):
            hosts.run(rank, "ip", "address", "add", f"{address(rank)}/24", "dev", INTERFACE)
            hosts.run(rank, "ip", "link", "set", "lo", "up")
            hosts.run(rank, "ip", "link", "set", INTERFACE, "up")
        yield hosts


@contextmanager
def _at_end(clean_up: Callable[[], Any]) -> Iterator[None]:
    """Call `clean_up` at the end, also after an error, but in this process only and not in its forks."""
    owner = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == owner:
            clean_up()


def _wait_for_namespace(keeper: subprocess.Popen[bytes]) -> None:
    while os.readlink(_network_of(keeper.pid)) == os.readlink(_network_of(os.getpid())):
        if keeper.poll() is not None:
            raise OSError(f"no network of one's own: {keeper.communicate()[1].decode().strip()}")
        time.sleep(0.01)


def _network_of(pid: int) -> Path:
    return Path(f"/proc/{pid}/ns/net")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def address(rank: int) -> str:
    """Return the address of the host of a rank."""
    return f"10.213.77.{rank + 1}"
