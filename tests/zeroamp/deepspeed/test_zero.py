from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

import zeroamp
import zeroamp.deepspeed as deepspeed
from tests.models.small import batch, build, loss_of
from tests.processes.training import full_parameters, same_bits
from tests.selection import slow_but
from tests.zeroamp.deepspeed.engine_cases import NAME, config, start, train
from zeroamp.deepspeed import zero
from zeroamp.deepspeed.zero import ZeroParamStatus
from zeroamp.policies.errors import StepError


def _gathered(stage):
    rank = torch.distributed.get_rank()
    engine = start(config(stage))
    before = full_parameters(engine.module)
    weight = engine.module.blocks[0].down.weight
    assert hasattr(weight, "ds_id") == (stage > 0)
    others = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(others.items()):
        assert all(type(parameter.data) is torch.Tensor for parameter in engine.module.parameters())
        assert all(type(value) is torch.Tensor for value in engine.module.state_dict().values())
        assert weight.numel() == weight.cpu().numel() == weight.data.numel()
        assert same_bits({n: p.detach().clone() for n, p in engine.module.named_parameters()}, before) == []
        assert engine.module.blocks[0].down.weight is weight
        assert stage == 0 or weight.ds_status is ZeroParamStatus.AVAILABLE
        with torch.no_grad():  # a forward inside, as evaluations do
            loss_of(engine, batch(NAME, 0))
    assert type(weight) is DTensor
    if stage > 0:
        assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
        assert weight.ds_shape == before["blocks.0.down.weight"].shape
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=1):
        if rank == 1:
            torch.nn.init.constant_(weight, 0.25)
    assert torch.equal(zeroamp.full_parameter(weight), torch.full(weight.shape, 0.25))
    after = full_parameters(engine.module)
    assert same_bits(after, before) == ["blocks.0.down.weight"]
    with deepspeed.zero.GatheredParameters(weight):  # nested, as helpers do
        with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
            assert type(weight.data) is torch.Tensor
        weight.data.zero_()  # lost, as in DeepSpeed
    assert same_bits(full_parameters(engine.module), after) == []
    with pytest.raises(KeyError), deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
        raise KeyError
    assert isinstance(weight, DTensor)
    with deepspeed.zero.GatheredParameters(weight, enabled=False):
        assert isinstance(weight, DTensor)
    train(None, 2, engine=engine)  # and training goes on
    return full_parameters(engine.module)


@pytest.mark.parametrize("stage", slow_but((0, 3), 3))
def test_gathered_parameters_are_whole_inside_and_one_rank_writes(ranks2, stage):
    first, second = ranks2.run(_gathered, stage)
    assert same_bits(first, second) == []


def _init():
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    with deepspeed.zero.Init(config_dict_or_path=config(3), dtype=torch.bfloat16):
        model = build("conv")
        with deepspeed.zero.GatheredParameters(model.head.weight, modifier_rank=1):
            if rank == 1:
                torch.nn.init.constant_(model.head.weight, 0.125)
    assert torch.equal(model.head.weight, torch.full((5, 13), 0.125))
    deepspeed.zero.register_external_parameter(model, model.head.weight)
    engine = deepspeed.initialize(model=model, config=config(3))[0]
    return full_parameters(engine.module)


def test_a_model_is_built_inside_init_and_written_before_it_is_sharded(ranks2):
    first, second = ranks2.run(_init)
    assert torch.equal(first["head.weight"], torch.full((5, 13), 0.125))
    assert same_bits(first, second) == []
    for kwargs, word in (
        ({"remote_device": "nvme"}, "remote_device"),
        ({"mpu": 1}, "mpu"),
    ):
        with pytest.raises(deepspeed.UnsupportedError, match=word):
            deepspeed.zero.Init(**kwargs).__enter__()
    with pytest.raises(deepspeed.UnsupportedError, match="dp_replicate_size"):
        deepspeed.zero.MiCS_Init()
    with pytest.raises(deepspeed.UnsupportedError, match="GatheredParameters"):
        _ = deepspeed.zero.GatheredParams


def _from_before():
    model = build("conv")
    old = model.head.weight
    engine = deepspeed.initialize(model=model, config=config(2))[0]
    with pytest.raises(StepError, match="has replaced it"):
        deepspeed.zero.GatheredParameters([model.head.bias, old], modifier_rank=0).__enter__()
    assert type(engine.module.head.bias) is DTensor


def test_a_parameter_that_initialize_has_replaced_is_an_error(ranks2):
    ranks2.run(_from_before)


def _leaves():
    model = build("moe")
    found = deepspeed.utils.set_z3_leaf_modules(model, ["MoeBlock"])
    assert len(found) == 2
    with pytest.raises(StepError, match="no module of Conv2d"):
        deepspeed.utils.set_z3_leaf_modules(model, [torch.nn.Conv2d])
    engine = deepspeed.initialize(model=model, config=config(3))[0]
    assert engine.policy.leaf_modules.names == ("blocks.0", "blocks.1")
    assert loss_of(engine, batch("moe", 0)).isfinite()


def test_leaf_modules_become_one_unit(ranks2):
    ranks2.run(_leaves)


def _device_of_what_is_sent():
    """Return the device type of what is sent of a CPU parameter, where the accelerator is the meta device."""
    devices = []
    with (
        mock.patch.object(zero, "device_of_type", return_value=torch.device("meta")),
        mock.patch.object(torch.distributed, "broadcast", lambda tensor, src: devices.append(tensor.device.type)),
        pytest.raises(NotImplementedError, match="copy out of meta"),
        deepspeed.zero.GatheredParameters(torch.nn.Parameter(torch.ones(2)), modifier_rank=0),
    ):
        pass
    return devices


def test_a_parameter_on_the_cpu_is_sent_from_the_accelerator(ranks2):
    # NCCL refuses tensors on the CPU.
    assert ranks2.run(_device_of_what_is_sent) == [["meta"], ["meta"]]
