"""Runs DeepSpeed's own unit tests against `zeroamp.deepspeed`: a plugin of pytest, and a table of the results.

    git clone https://github.com/deepspeedai/DeepSpeed
    cd DeepSpeed/tests/unit
    export DS_REPOSITORY=$PWD/../.. PYTHONPATH=ZEROAMP:ZEROAMP/benchmarks
    pytest -p no:warnings -p deepspeed_unit_tests runtime/test_no_sync_ctxt.py

`import deepspeed` imports `zeroamp.deepspeed`. Missing internal names of DeepSpeed become `Private` objects, so that a
file can be imported. A test that uses such a name fails as "private". The ranks of a test are forked, and use gloo.

Results go to the file `results.json`: per test its outcome and the error that decided it.
"""

import ast
import contextlib
import importlib
import importlib.abc
import importlib.util
import json
import os
import pickle
import re
import signal
import sys
import time
import traceback
import types
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zeroamp.checkpoint.load
import zeroamp.checkpoint.save
import zeroamp.deepspeed
import zeroamp.deepspeed.initialization  # so that forked ranks do not import it again
from zeroamp.deepspeed import comm
from zeroamp.deepspeed.accelerator import get_accelerator
from zeroamp.policies.errors import ZeroAmpError

REPOSITORY = Path(os.environ["DS_REPOSITORY"])
TIMEOUT_S = int(os.environ.get("DS_TIMEOUT_S", "90"))
RESULTS = Path(os.environ.get("DS_RESULTS", "results.json"))
INSIDE = (
    "Private",
    "Stub",
    "has no '_",
    "'loss_scaler'",
    "'loss_scale_config'",
    "'ds_status'",
    "'ds_tensor'",
    "'ds_id'",
)
"""Words of errors in tests that use DeepSpeed's internals."""
CONSTANT = re.compile(r"""^([A-Z][A-Z0-9_]*) = (["'].*?["']|[\d.e-]+|True|False|None)\s*$""", re.MULTILINE)


class PrivateError(Exception):
    """A test used an internal name of DeepSpeed."""


class PrivateMeta(type):
    """Lets an internal name of DeepSpeed be imported, read and compared, but not be called."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return "private" if name == "NAME" else Private

    def __call__(cls, *_, **__):
        """Raise PrivateError."""
        raise PrivateError(cls.__name__)

    def __instancecheck__(cls, instance):
        return False


class Private(metaclass=PrivateMeta):
    """Stands for a name that zeroamp.deepspeed does not have."""


class Stub(types.ModuleType):
    """A module of DeepSpeed that zeroamp.deepspeed does not have: constants of its source, else `Private`."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []
        path = REPOSITORY / Path(*name.split(".")).with_suffix(".py")
        if path.is_file():
            for constant, value in CONSTANT.findall(path.read_text()):
                with contextlib.suppress(SyntaxError, ValueError):
                    setattr(self, constant, ast.literal_eval(value))

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "required_torch_version":
            return lambda *_, **__: True
        if name == "MIN_SWAPPABLE_BYTES":  # the width of a layer, in some tests
            return 1024
        if name == "torch_info":
            return {"version": "2.13", "bf16_support": True, "cuda_version": "13.0", "nccl_version": "2.30"}
        if name == "OffloadDeviceEnum":
            return types.SimpleNamespace(none="none", cpu="cpu", nvme="nvme")
        return PrivateMeta(name, (Private,), {})


class Aliases(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """`deepspeed.x` is `zeroamp.deepspeed.x`, or a stub."""

    def find_spec(self, name, _path=None, _target=None):
        """Take names of DeepSpeed."""
        if name.split(".")[0] == "deepspeed":
            return importlib.util.spec_from_loader(name, self)
        return None

    def create_module(self, spec):
        """Return the module of zeroamp, or a stub."""
        try:
            module = importlib.import_module(f"zeroamp.{spec.name}")
        except ImportError:
            return Stub(spec.name)
        return Alias(spec.name, module)

    def exec_module(self, module):
        """Do nothing: the module has run."""


class Alias(Stub):
    """A module of zeroamp.deepspeed, and what a stub has besides.

    An object of its own: the import of `deepspeed.utils.torch` sets `torch` on `deepspeed.utils`.
    """

    def __init__(self, name, module):
        super().__init__(name)
        self._module = module

    def __getattr__(self, name):
        try:
            return getattr(self._module, name)
        except AttributeError:
            return defaultdict(lambda: True) if name == "__compatible_ops__" else super().__getattr__(name)


sys.meta_path.insert(0, Aliases())
sys.modules["deepspeed"] = Alias("deepspeed", zeroamp.deepspeed)
sys.path[1:1] = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests" / "unit")]
get_accelerator().device_count = lambda: 8
torch.set_num_threads(1)
outcomes = {}


def on_cpu(init):
    """Make DDP ignore the `device_ids` that tests pass for GPUs."""

    def start(self, module, *_, **more):
        init(self, module, **{name: value for name, value in more.items() if not name.endswith(("ids", "_device"))})

    return start


def of_shards(allclose):
    """Make `torch.allclose`, which does not support DTensors, compare the shards of each rank."""

    def local(tensor):
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    return lambda first, second, *args, **kwargs: allclose(local(first), local(second), *args, **kwargs)


def of_one_element(gather):
    """Make `all_gather_into_tensor` accept a 0-D tensor, which gloo does not support."""
    return lambda output, tensor, *args, **kwargs: gather(output, tensor.reshape(-1), *args, **kwargs)


comm.all_gather_into_tensor = of_one_element(comm.all_gather_into_tensor)
DistributedDataParallel.__init__ = on_cpu(DistributedDataParallel.__init__)
torch.allclose = of_shards(torch.allclose)


def launch(self, num_procs, init_method):
    """Fork the ranks, and raise the first error of any of them."""
    if torch.distributed.is_initialized():  # a test without ranks has made a world of one
        torch.distributed.destroy_process_group()
    port = str(29500 + os.getpid() % 2000)
    readers, pids = [], []
    for rank in range(num_procs):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(TIMEOUT_S)
            try:
                answer = ("skip", self._dist_run(rank, num_procs, port, init_method))
            except BaseException as error:
                kind = type(error)
                is_ours = isinstance(error, ZeroAmpError)
                answer = ("error", kind.__name__, is_ours, str(error)[:600], traceback.format_exc()[-4000:])
            os.write(writer, pickle.dumps(answer))
            os._exit(0)
        os.close(writer)
        readers.append(reader)
        pids.append(pid)
    answers = []
    deadline = time.monotonic() + TIMEOUT_S
    for reader, pid in zip(readers, pids, strict=True):
        with os.fdopen(reader, "rb") as file:
            content = file.read()
        answers.append(pickle.loads(content) if content else ("error", "Timeout", False, "", f"rank {pid} died"))
        if answers[-1][0] == "error" and time.monotonic() < deadline:
            time.sleep(0.5)
            for other in pids:  # they would wait for this one
                os.kill(other, signal.SIGALRM)
    for pid in pids:
        os.waitpid(pid, 0)
    for answer in sorted(answers, key=lambda each: each[1] == "Timeout" if each[0] == "error" else False):
        if answer[0] == "error":
            self._outcome = answer
            raise RankError(answer)
        if answer[1]:
            pytest.skip(answer[1])


class RankError(Exception):
    """A rank raised: kind, class, whether it is one of zeroamp's, text, traceback."""

    def __init__(self, answer):
        self.answer = answer
        super().__init__(f"{answer[1]}: {answer[3]}\n{answer[4]}")


def pytest_collection_modifyitems(items):
    from unit.common import DistributedExec

    DistributedExec._launch_procs = launch
    DistributedExec.reuse_dist_env = False
    for item in items:
        if getattr(item, "cls", None) is not None and hasattr(item.cls, "reuse_dist_env"):
            item.cls.reuse_dist_env = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when in ("setup", "call") and (report.failed or report.skipped or call.when == "call"):
        error = call.excinfo.value if call.excinfo else None
        text = ""
        if report.passed:
            kind = "passed"
        elif report.skipped:
            kind, text = "skipped", str(error)
        else:
            name, is_ours, text = type(error).__name__, isinstance(error, ZeroAmpError), str(error)[:600]
            trace = str(error)
            if isinstance(error, RankError):
                _, name, is_ours, text, trace = error.answer
            private = name == "PrivateError" or any(word in trace + text for word in INSIDE)
            kind = "private" if private else "refused" if is_ours else "failed"
            text = f"{name}: {text}" if text else f"{name}: {trace[-300:]}"
        outcomes[item.nodeid] = (kind, text)
    return report


def pytest_runtest_logfinish():
    """Write the results so far, so that an interrupted run has them."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(known | outcomes, indent=1))
