"""A `TrainStep` needs fp64 on the device, and tests devices that may lack it."""

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.processes.training import config, wrapped
from zeroamp.training import step
from zeroamp.training.fp64 import refuse_without_fp64


def no_fp64(*_args, **_kwargs):
    raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.\nmore")


def rounds(size, value, **options):
    return torch.tensor([value] * size[0], dtype=torch.float32)  # a device that computes in fp32 in its place


def nothing(*_args, **_kwargs):
    return None


def no_backend(*_args, **_kwargs):
    raise RuntimeError("HCCL has no double")


def on_the_cpu(size, value, **options):
    return torch.tensor([value] * size[0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("full", "all_reduce", "words"),
    [
        (no_fp64, nothing, "mps:0 .*TypeError: Cannot convert a MPS Tensor to float64"),
        (on_the_cpu, no_backend, "RuntimeError: HCCL has no double"),
        (rounds, nothing, r"\[4503599627370496.0, "),
    ],
)
def test_a_device_or_backend_without_fp64_is_refused_with_the_remedy(monkeypatch, full, all_reduce, words):
    monkeypatch.setattr(torch, "full", full)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with pytest.raises(zeroamp.StepError, match=words + ".*Train on a device with fp64, or without a TrainStep"):
        refuse_without_fp64(torch.device("mps", 0), None)


def test_a_device_that_computes_it_is_not_refused(monkeypatch):
    monkeypatch.setattr(torch, "full", on_the_cpu)
    monkeypatch.setattr(dist, "all_reduce", nothing)
    refuse_without_fp64(torch.device("xpu", 0), None)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_nothing_runs_on_devices_that_all_have_it(monkeypatch, kind):
    monkeypatch.setattr(torch, "full", no_fp64)
    refuse_without_fp64(torch.device(kind), None)


def test_two_fp32_numbers_do_not_hold_the_counts_of_three_parameters():
    count = 2**50 + 2**26 - 1  # 51 bits; two halves have 2 x 24
    high = torch.tensor(count, dtype=torch.float64).float()
    low = torch.tensor(count - int(high), dtype=torch.float64).float()
    assert int(high.double() + low.double()) == count + 1


def _asked():
    asked, original = [], step.refuse_without_fp64
    step.refuse_without_fp64 = lambda device, group: asked.append(device.type)
    try:
        model = wrapped("llama_tied", config(3))
        zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    finally:
        step.refuse_without_fp64 = original
    return asked


def test_the_device_of_the_mesh_is_asked(ranks2):
    assert ranks2.run(_asked)[0] == ["cpu"]
