"""A rank's device is chosen before the first collective, by the launcher's local rank. The accelerator is fake."""

import os
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeroamp
from zeroamp import deepspeed
from zeroamp.deepspeed import comm
from zeroamp.planning import mesh
from zeroamp.planning.rank_device import choose_device
from zeroamp.wrapping import wrap


def _choices(environment, *, num_devices=8, is_initialized=False):
    """Return the indices that `choose_device` sets."""
    chosen = []
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(
            torch, "get_device_module", return_value=types.SimpleNamespace(is_initialized=lambda: is_initialized)
        ),
        mock.patch.object(torch.accelerator, "device_count", return_value=num_devices),
        mock.patch.object(torch.accelerator, "set_device_index", chosen.append),
    ):
        choose_device("cuda")
    return chosen


@pytest.mark.parametrize(
    ("environment", "options", "expected"),
    [
        ({"LOCAL_RANK": "3"}, {}, [3]),
        ({"SLURM_LOCALID": "2"}, {}, [2]),
        ({"LOCAL_RANK": "1", "SLURM_LOCALID": "0"}, {}, [1]),
        ({"LOCAL_RANK": "3"}, {"num_devices": 1}, [0]),  # the launcher shows each process its own device
        ({"LOCAL_RANK": "3"}, {"is_initialized": True}, []),  # the program has chosen
        ({}, {}, [0]),
    ],
)
def test_the_local_rank_is_the_index(monkeypatch, environment, options, expected):
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    assert _choices(environment, **options) == expected


def test_a_local_rank_without_a_device_is_an_error():
    with pytest.raises(zeroamp.WrapError, match=r"LOCAL_RANK is 4, but this process sees 4 devices of type cuda"):
        _choices({"LOCAL_RANK": "4"}, num_devices=4)


class _FirstCollectiveError(Exception):
    pass


def _enter(entrance):
    if entrance == "wrap_model":
        zeroamp.wrap_model(torch.nn.Linear(2, 2), zeroamp.policy_from_config({}))
    elif entrance == "start_process_group":
        mesh.start_process_group()
    elif entrance == "deepspeed.initialize":
        deepspeed.initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 2})
    else:
        with mock.patch.object(dist, "is_initialized", return_value=False):
            comm.init_distributed()


def _order_in(entrance, local_ranks):
    """Return what happens before the first collective of `entrance` on this rank."""
    events = []
    fake = types.SimpleNamespace(is_initialized=lambda: bool(events))

    def collective(*_args, **_kwargs):
        events.append("collective")
        raise _FirstCollectiveError

    rank = dist.get_rank()
    with (
        mock.patch.dict(os.environ, LOCAL_RANK=local_ranks[rank], RANK=str(rank)),
        mock.patch.object(wrap, "current_device_type", return_value="cuda"),
        mock.patch.object(mesh, "current_device_type", return_value="cuda"),
        mock.patch.object(comm, "current_device_type", return_value="cuda"),
        mock.patch.object(wrap, "device_of_type", torch.device),
        mock.patch.object(torch, "get_device_module", return_value=fake),
        mock.patch.object(torch.accelerator, "device_count", return_value=2),
        mock.patch.object(torch.accelerator, "set_device_index", events.append),
        mock.patch.object(wrap, "run_alike", collective),
        mock.patch.object(dist, "init_process_group", collective),
        pytest.raises(_FirstCollectiveError),
    ):
        _enter(entrance)
    return events


@pytest.mark.parametrize(
    "entrance", ["wrap_model", "start_process_group", "deepspeed.initialize", "deepspeed.init_distributed"]
)
def test_each_rank_chooses_its_device_before_the_first_collective(ranks2, entrance):
    assert ranks2.run(_order_in, entrance, ("0", "1")) == [[0, "collective"], [1, "collective"]]


def test_without_a_local_rank_the_index_is_the_rank_modulo_the_devices(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with mock.patch.multiple(dist, is_initialized=lambda: True, get_backend=lambda: "nccl", get_rank=lambda: 5):
        assert _choices({}, num_devices=4) == [1]
