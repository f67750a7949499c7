from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

import zeroamp.deepspeed as deepspeed
from tests.models.small import batch, build, loss_of
from tests.processes.training import full_parameters, same_bits
from tests.selection import slow_but
from tests.zeroamp.deepspeed.engine_cases import config, start, train
from zeroamp.deepspeed import zero
from zeroamp.deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from zeroamp.deepspeed.zero import ZeroParamStatus
from zeroamp.policies.errors import StepError

NAME = "llama_tied"


def _gathered(stage):
    rank = torch.distributed.get_rank()
    engine = start(NAME, config(stage))
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
    assert stage == 0 or (weight.ds_status is ZeroParamStatus.NOT_AVAILABLE and weight.ds_shape == before_shape(before))
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=1):
        if rank == 1:
            torch.nn.init.constant_(weight, 0.25)
    assert torch.equal(safe_get_full_fp32_param(weight), torch.full(weight.shape, 0.25))
    after = full_parameters(engine.module)
    assert same_bits(after, before) == ["blocks.0.down.weight"]
    with pytest.raises(StepError, match="in-place modification"), deepspeed.zero.GatheredParameters(weight):
        torch.nn.init.zeros_(weight)
    for change in (
        lambda data: data.zero_(),
        lambda data: data.view(-1).zero_(),
        lambda data: setattr(weight, "data", torch.zeros(data.shape)),
    ):
        with pytest.raises(StepError, match="in-place modification"), deepspeed.zero.GatheredParameters(weight):
            change(weight.data)
    assert same_bits(full_parameters(engine.module), after) == []
    with pytest.raises(KeyError), deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
        raise KeyError
    assert isinstance(weight, DTensor)
    with deepspeed.zero.GatheredParameters(weight, enabled=False):
        assert isinstance(weight, DTensor)
    train(NAME, None, 2, engine=engine)  # and training goes on
    return full_parameters(engine.module)


def before_shape(parameters):
    return parameters["blocks.0.down.weight"].shape


@pytest.mark.parametrize("stage", slow_but((0, 1, 2, 3), 3))
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
        ({"remote_device": "nvme"}, "nvme"),
        ({"mpu": 1}, "mpu"),
        ({"zero_quantized_weights": True}, "quant"),
    ):
        with pytest.raises(deepspeed.UnsupportedError, match=word):
            deepspeed.zero.Init(**kwargs)
    with pytest.raises(deepspeed.UnsupportedError, match="nn.Linear"):
        deepspeed.zero.TiledLinear(1, 2)
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


def _tensors(stage):
    engine = start(NAME, config(stage, accumulation=2, dtype=None, fp16={"enabled": True, "initial_scale_power": 3}))
    engine.module.norm.weight.requires_grad_(False)
    weight, frozen = engine.module.blocks[0].down.weight, engine.module.norm.weight
    assert safe_get_full_optimizer_state(weight, "exp_avg") is None
    assert safe_get_full_grad(weight) is None
    for i in range(2):
        loss = loss_of(engine, batch(NAME, i))
        engine.backward(loss)
        if i == 0:
            with pytest.raises(StepError, match="last micro-batch"):
                safe_get_full_grad(weight)
            with pytest.raises(StepError, match="last micro-batch"):
                safe_get_local_grad(weight)
            engine.step()
    gradient, local = safe_get_full_grad(weight), safe_get_local_grad(weight)
    whole = DTensor.from_local(local, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride())
    assert torch.equal(whole.full_tensor(), gradient)
    assert gradient.abs().max() > 0
    assert safe_get_full_grad(frozen) is None
    assert safe_get_full_fp32_param(frozen) is None
    safe_set_full_grad(weight, gradient * 0)
    safe_set_local_grad(weight, local)
    assert torch.equal(safe_get_full_grad(weight), gradient)
    safe_update_full_grad_vectorized([weight], lambda old, param: old * 0 + 0.5 if param is weight else old)
    assert torch.equal(safe_get_full_grad(weight), torch.full(weight.shape, 0.5))
    with pytest.raises(StepError, match="this rank's shard"):
        safe_set_local_grad(weight, torch.zeros(1, 1))
    engine.step()
    assert torch.equal(safe_get_full_optimizer_state(weight, "exp_avg"), torch.full(weight.shape, 0.5).mul(1 - 0.9))
    assert safe_get_local_optimizer_state(weight, "exp_avg").shape == local.shape
    safe_set_full_optimizer_state(weight, torch.ones(weight.shape), "exp_avg_sq")
    assert bool((safe_get_local_optimizer_state(weight, "exp_avg_sq") == 1).all())
    safe_set_local_optimizer_state(weight, torch.full(local.shape, 2.0), "exp_avg_sq")
    assert torch.equal(safe_get_full_optimizer_state(weight, "exp_avg_sq"), torch.full(weight.shape, 2.0))
    assert safe_get_full_optimizer_state(frozen, "exp_avg") is None
    safe_set_full_fp32_param(weight, torch.ones(weight.shape))
    assert bool((safe_get_local_fp32_param(weight) == 1).all())
    safe_set_local_fp32_param(weight, torch.full(local.shape, 3.0))
    assert torch.equal(safe_get_full_fp32_param(weight), torch.full(weight.shape, 3.0))
    with pytest.raises(StepError, match="no optimizer state"):
        safe_set_full_optimizer_state(frozen, torch.ones(3), "exp_avg")


@pytest.mark.parametrize("stage", slow_but((0, 1, 2, 3), 2))
def test_whole_and_local_tensors_are_read_and_set(ranks2, stage):
    ranks2.run(_tensors, stage)


def _leaves():
    model = build("moe")
    found = deepspeed.utils.set_z3_leaf_modules(model, ["MoeBlock"])
    assert [deepspeed.utils.z3_leaf_module(each) for each in found] == [True, True]
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
