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
    """Two hosts: one process per rank, whose network namespace is the host. A host ends with its process."""

    keepers: tuple[subprocess.Popen[bytes], ...]

    @property
    def init_method(self) -> str:
        """The address at which the first host's rank waits for the other."""
        return f"tcp://{address(0)}:{_PORT}"

    def enter(self, rank: int) -> None:
        """Move this process to the host of a rank."""
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = os.open(self.namespace(rank), os.O_RDONLY)
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE

    def ip(self, rank: int, *arguments: str) -> None:
        """Run the command `ip` on the host of a rank."""
        command = ["nsenter", f"--net={self.namespace(rank)}", "ip", *arguments]
        subprocess.run(command, capture_output=True, check=True, timeout=30)

    def cut(self) -> None:
        """Cut the cable: set the second host's end down."""
        self.ip(1, "link", "set", INTERFACE, "down")

    def mend(self) -> None:
        """Connect the cable: set the second host's end up."""
        self.ip(1, "link", "set", INTERFACE, "up")

    def processes(self, rank: int) -> list[int]:
        """Return the ids of all processes on the host of a rank."""
        network = os.readlink(self.namespace(rank))
        return [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _is_in(pid, network)]

    def namespace(self, rank: int) -> Path:
        """Return the file of the network namespace of a rank's host."""
        return _network_of(self.keepers[rank].pid)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make two hosts with a cable between them, and remove them at the end."""
    with ExitStack() as stack:
        keepers = []
        for _ in range(2):
            keepers.append(subprocess.Popen(["unshare", "--net", "sleep", "3600"], stderr=subprocess.PIPE))
            stack.enter_context(_at_end(functools.partial(_end, keepers[-1])))
        hosts = Hosts(tuple(keepers))
        for keeper in keepers:
            _wait_for_namespace(keeper)
        peer = ("peer", "name", INTERFACE, "netns", str(keepers[1].pid))
        hosts.ip(0, "link", "add", INTERFACE, "type", "veth", *peer)
        for rank in range(2):
            hosts.ip(rank, "address", "add", f"{address(rank)}/24", "dev", INTERFACE)
            hosts.ip(rank, "link", "set", "lo", "up")
            hosts.ip(rank, "link", "set", INTERFACE, "up")
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


def _is_in(pid: int, network: str) -> bool:
    try:
        return os.readlink(_network_of(pid)) == network
    except OSError:  # it has ended
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def address(rank: int) -> str:
    """Return the address of the host of a rank."""
    return f"10.213.77.{rank + 1}"
