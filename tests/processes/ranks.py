"""Rank processes that live as long as the test session and are forked from servers that have imported torch.

Importing torch in every rank of every test would take longer than the tests. Each rank number has a server of its own,
with its own hash seed: the order of a set differs between ranks, as under torchrun.
"""

import contextlib
import faulthandler
import gc
import itertools
import os
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import cache, partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

CALL_TIMEOUT_S = 240
COLLECTIVE_TIMEOUT_S = 60
GRACE_S = 3  # how long the other ranks get to fail by themselves, once one has
# A gloo group has three, which wake up a hundred times a second and slow every later test. torch 2.11 keeps meshes.
MOST_THREADS_LEFT = 200 if torch.__version__ >= (2, 13) else 2000
_ARE_LEFT = "Something keeps their process groups, or threads of their own still run."


class RankError(AssertionError):
    """A body raised on some ranks."""


@cache
def _server(number: int) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload(["tests.processes.preload"])
    return server


def _run_servers(numbers: Iterable[int]) -> list[forkserver.ForkServer]:
    """Return the servers with these numbers, each with another hash seed. All of them import at the same time."""
    servers = []
    for number in numbers:
        servers.append(_server(number))
        # With the seeds 1, 2, 3 and 4, many sets of two names of parameters have the same order.
        with mock.patch.dict(os.environ, PYTHONHASHSEED=str(5 * number + 1)):
            servers[-1].ensure_running()
    return servers


def _serve(rank: int, world_size: int, device: str, port: int, connection: Connection) -> None:
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU machine runs the same tests on its CPU
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    del os.environ["PYTHONHASHSEED"]  # the rank's own processes get others
    faulthandler.enable()  # where a rank is aborted, stderr then has the Python stack
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # Compilation looks at `.grad` of every input, which warns on tensors that are no leaves.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    warnings.filterwarnings("ignore", message=r"`torch\.jit", category=DeprecationWarning)  # inductor's imports
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, multi_tenant=True)
    start = partial(
        dist.init_process_group,
        backend,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    environment, num_threads, last = dict(os.environ), _num_threads(), None
    for num_calls in itertools.count():
        call = connection.recv()
        if call is None:
            return
        start(store=dist.PrefixStore(str(num_calls), store))
        body, args, kwargs = call
        try:
            if (left := _num_threads() - num_threads) > MOST_THREADS_LEFT:
                raise AssertionError(f"{left} threads of earlier calls are left, the last of {last}. {_ARE_LEFT}")
            answer = (True, body(*args, **kwargs))
        except BaseException:  # whatever it is, it is the answer
            answer = (False, traceback.format_exc())
        _restore(environment)
        last = getattr(body, "__name__", body)  # a partial has no name
        connection.send(answer)
        del call, body, args, kwargs, answer
        torch._dynamo.reset()
        _forget_meshes()
        # The first collection may free autograd graphs, and not the models that only they hold. The second frees these.
        # A model that is left keeps its process groups.
        gc.collect()
        gc.collect()
        gc.freeze()  # later collections need not look at what is left
        if connection.recv() is None:  # else every rank has answered
            return
        # A thread of each gloo group wakes up a hundred times a second: leave none to idle ranks.
        if dist.is_initialized():  # a script ends its own
            dist.destroy_process_group()


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _restore(environment: dict[str, str]) -> None:
    """Undo what a call changed in the environment: accelerate, for one, writes the launcher's variables into it."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name in {name for name, value in environment.items() if os.environ.get(name) != value}:
        os.environ[name] = environment[name]


def _forget_meshes():
    """Clear DTensor's caches of meshes. A later mesh that is equal would get their destroyed process groups."""
    from torch.distributed.tensor import _collective_utils, _redistribute, _sharding_prop
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    _sharding_prop.ShardingPropagator._propagate_tensor_meta_cached.cache_clear()


class Ranks:
    """`world_size` processes on this machine, one thread each: gloo on the CPU, or NCCL with a GPU each.

    Rank 0 is forked from the server `first_server`, and each further rank from the next one.
    """

    def __init__(self, world_size: int, device: str = "cpu", *, first_server: int = 0) -> None:
        self.world_size = world_size
        self.device = device
        self._servers = range(first_server, first_server + world_size)
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, body: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `body`, a module-level function, on every rank; return the results in rank order."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((body, args, kwargs))
        answers = self._collect(time.monotonic() + CALL_TIMEOUT_S)
        failed = {rank: text for rank, (ok, text) in answers.items() if not ok}
        missing = [rank for rank in range(self.world_size) if rank not in answers]
        is_full = any(_ARE_LEFT in text for text in failed.values())
        if missing or is_full or not all(process.is_alive() for process in self._processes):
            self.stop()  # some died, hang in a collective, or have too many threads: the next call starts fresh
        try:
            for connection in self._connections:
                connection.send("every rank has answered")
        except OSError:  # one is dying: the next call starts fresh
            self.stop()
        if failed or missing:
            report = "\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(failed.items()))
            raise RankError(f"{report}\n--- no answer from ranks {missing}" if missing else report)
        return [answers[rank][1] for rank in range(self.world_size)]

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        servers = _run_servers(self._servers)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank, server in enumerate(servers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world_size, self.device, port, theirs), daemon=True
            )
            with mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
                process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self, deadline: float) -> dict[int, tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < self.world_size and (left := deadline - time.monotonic()) > 0:
            waiting = {c: rank for rank, c in enumerate(self._connections) if rank not in answers}
            for connection in wait(list(waiting), timeout=left):
                rank = waiting[connection]
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    answers[rank] = (False, "the process died")
            if any(not ok for ok, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def stop(self) -> None:
        """End the processes, politely where they listen."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._connections = [], []
