import pytest
import torch

from tests.ranks import Ranks


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
