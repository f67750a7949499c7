import sys

import pytest
import torch

from tests.processes.ranks import Ranks


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks2():
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def ranks4():
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def ranks8():
    ranks = Ranks(8)
    yield ranks
    ranks.stop()


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
