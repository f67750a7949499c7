"""`offload`: shards on the CPU. Without an accelerator here, the meta device stands in for it where one can."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.models.small import RMSNorm
from tests.processes.training import SmallTraining, config, policy, same_bits, wrapped
from zeroamp.accumulation.shard_accumulator import RoundedSum, ShardAccumulator
from zeroamp.hooks._torch.fsdp import groups_of
from zeroamp.planning.mesh import shard_device
from zeroamp.policies.derived import NO_OFFLOAD, Offload
from zeroamp.training.norm_and_clip import local_sum_of_squares, multiply_gradients
from zeroamp.weights.materialize import materialize_model
from zeroamp.wrapping.shard import offload_policy
from zeroamp.wrapping.state import wrap_state

ON_CPU = {"offload": {"device": "cpu"}}


LOW = {"accumulation": 3, "data_types": {"grad_accum_dtype": "bf16"}}


class _WithBuffer(RMSNorm):
    def __init__(self):
        super().__init__(8)
        self.register_buffer("scale", torch.ones(2))
        self.empty = nn.Parameter(torch.empty(0, 4))

    def reset_parameters(self):
        super().reset_parameters()
        self.scale.fill_(1)


def _materialize_apart():
    mesh = init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        model = _WithBuffer()
    fully_shard(model, mesh=mesh, ignored_params={model.empty})
    materialize_model(model, mesh, torch.device("cpu"), torch.device("meta"))
    return {name: tensor.device.type for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def test_only_shards_are_materialised_where_shards_live(ranks2):
    devices = {"weight": "meta", "scale": "cpu", "empty": "cpu"}
    assert ranks2.run(_materialize_apart) == [devices] * 2


def _gradient(values, device="cpu"):
    parameter = nn.Parameter(torch.zeros(len(values), device=device))
    parameter.grad = torch.tensor(values, device=device)
    return parameter


def test_the_norm_of_gradients_on_any_device_is_on_the_meshs():
    parameters = [_gradient([3.0]), _gradient([4.0])]
    assert local_sum_of_squares(parameters, torch.device("cpu")) == 25
    assert local_sum_of_squares(parameters, torch.device("meta")).device.type == "meta"
    mixed = [*parameters, _gradient([1.0, 2.0], "meta")]
    assert local_sum_of_squares(mixed, torch.device("meta")).dtype == torch.float64
    assert local_sum_of_squares([], torch.device("meta")).device.type == "meta"


def test_the_clip_factor_follows_the_gradients(monkeypatch):
    # On CUDA it would not be enough that a 0-D CPU factor may multiply a CUDA tensor: here it is the other way round.
    seen = []
    monkeypatch.setattr(torch, "_foreach_mul_", lambda tensors, factor: seen.append((tensors[0].device, factor.device)))
    multiply_gradients([_gradient([1.0], "meta")], torch.ones(()))
    assert seen == [(torch.device("meta"), torch.device("meta"))]


def _train_beside_an_accelerator(is_offloaded):
    """Two steps of three micro-batches whose shards are on another device than "cuda", and the number of waits."""
    training = SmallTraining(config(3, **LOW, comm="fp32"), fields=ON_CPU)
    if is_offloaded:
        accumulator = ShardAccumulator(partial(RoundedSum, torch.bfloat16), "cuda")
        wrap_state(training.model).step.shard_accumulator = accumulator
    waits = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "synchronize", lambda: waits.append(1))
        for index in range(6):
            training.step(index)
    return training.parameters(), len(waits)


def test_offloaded_gradients_accumulate_to_the_same_bits(ranks2):
    """Offloaded gradients accumulate to the same bits with one wait per micro batch."""
    ours, num_waits = ranks2.run(_train_beside_an_accelerator, True)[0]
    expected, no_waits = ranks2.run(_train_beside_an_accelerator, False)[0]
    assert same_bits(ours, expected) == []
    assert (num_waits, no_waits) == (6, 0)


def test_memory_is_pinned_only_beside_an_accelerator(caplog):
    with caplog.at_level("INFO", logger="zeroamp"):
        assert offload_policy(Offload(to_cpu=True), "cuda") == CPUOffloadPolicy(pin_memory=True)
        assert offload_policy(Offload(to_cpu=True, pin_memory=False), "cuda") == CPUOffloadPolicy(pin_memory=False)
        assert offload_policy(Offload(to_cpu=True, pin_memory=False), "cpu") == CPUOffloadPolicy(pin_memory=False)
        assert type(offload_policy(NO_OFFLOAD, "cuda")) is OffloadPolicy
        assert caplog.records == []
        assert offload_policy(Offload(to_cpu=True), "cpu") == CPUOffloadPolicy(pin_memory=False)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "pin_memory has no effect without an accelerator"
    ]


def _policies_of_all_groups():
    model = wrapped("llama_tied", config(3, threshold=0), fields=ON_CPU)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [group.offload_policy for unit in units for group in groups_of(unit._get_fsdp_state())]


def test_units_holders_and_root_are_offloaded_alike(ranks2):
    assert ranks2.run(_policies_of_all_groups)[0] == [CPUOffloadPolicy(pin_memory=False)] * (3 + 3 + 1)


class _Mesh:
    device_type = "cuda"


def test_shards_live_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    assert shard_device(policy(config(3), ON_CPU), _Mesh()) == torch.device("cpu")
    assert shard_device(policy(config(3)), _Mesh()) == torch.device("cuda:1")
