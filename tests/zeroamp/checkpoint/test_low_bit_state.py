"""Optimizer state in tensor subclasses (torchao's): class and bytes stay through a checkpoint."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroamp
from tests.models.small import ThreeUnits
from tests.processes.ranks import RankError
from tests.processes.training import config, full_parameters, policy, same_bits
from tests.selection import slow_but

WIDTH = 128  # a shard of a weight is 8192 elements: more than 4096, so that it is quantized


def _optimizer(name, parameters):
    optimizers = pytest.importorskip("torchao.optim", reason="the optimizers are torchao's")
    return getattr(optimizers, name)(parameters, lr=1e-2)


def _training(name, seed=0):
    torch.manual_seed(seed)
    model = ThreeUnits()
    model.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
    model = zeroamp.wrap_model(model, policy(config(3)), auto_wrap_policy={"Linear"})
    return zeroamp.TrainStep(model, _optimizer(name, model.parameters()))


def _advance(step, start, stop):
    with torch.compiler.set_stance("force_eager"):
        for index in range(start, stop):
            generator = torch.Generator().manual_seed(2 * index + dist.get_rank())
            step.backward(step.model(torch.randn(4, WIDTH, generator=generator)))
            step.step()
    return full_parameters(step.model)


def _state(step):
    """(class, bytes of each part) of every tensor of the optimizer's state."""
    found = []
    for parameter in step.model.parameters():
        for key, value in sorted(step.optimizers[0].state[parameter].items()):
            local = value.to_local() if hasattr(value, "to_local") else value
            parts = local.__tensor_flatten__()[0] if hasattr(local, "__tensor_flatten__") else []
            tensors = [getattr(local, part) for part in parts] or [local]
            found.append((key, type(local).__name__, [tensor.clone() for tensor in tensors]))
    return found


def _bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def _saved(folder, name):
    step = _training(name)
    _advance(step, 0, 2)
    zeroamp.save_checkpoint(folder, step.model, step)
    return _state(step), _advance(step, 2, 4)


def _loaded(folder, name):
    step = _training(name, seed=3)
    zeroamp.load_checkpoint(folder, step.model, step)
    return _state(step), _advance(step, 2, 4)


@pytest.mark.parametrize("name", slow_but(["AdamW8bit", "AdamW4bit", "AdamWFp8"], "AdamW8bit"))
def test_class_and_bytes_stay(ranks2, tmp_path, name):
    pytest.importorskip("torchao", reason="the optimizers are torchao's")
    saved, loaded = ranks2.run(_saved, tmp_path, name), ranks2.run(_loaded, tmp_path, name)
    for (before, expected), (after, parameters) in zip(saved, loaded, strict=True):
        assert any(kind.startswith("OptimState") for _, kind, _ in before)
        assert [entry[:2] for entry in after] == [entry[:2] for entry in before]
        for (*_, ours), (*_, theirs) in zip(after, before, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert torch.equal(_bits(one), _bits(other))
        assert same_bits(parameters, expected) == []


def test_another_number_of_ranks_is_refused_by_name(ranks2, ranks4, tmp_path):
    pytest.importorskip("torchao", reason="the optimizers are torchao's")
    ranks2.run(_saved, tmp_path, "AdamW8bit")
    with pytest.raises(RankError, match=r"CheckpointError: .* of layers\.0\.weight that cannot be resharded"):
        ranks4.run(_loaded, tmp_path, "AdamW8bit")
