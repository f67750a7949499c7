import gc
import sys

import pytest
import torch

from tests.processes.ranks import Ranks


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _frozen():
    """Collections, of which a run on fake tensors makes several, need not look at torch and at all tests."""
    gc.collect()
    gc.freeze()


def _started(num_ranks, scope):
    @pytest.fixture(scope=scope)
    def ranks():
        started = Ranks(num_ranks)
        yield started
        started.stop()

    return ranks


ranks1, ranks8 = _started(1, "module"), _started(8, "module")
ranks2, ranks4 = _started(2, "session"), _started(4, "session")


@pytest.fixture
def python_file(tmp_path, monkeypatch):
    """Return a function that writes a module into tmp_path; what is imported from there is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
        return path

    yield write
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
