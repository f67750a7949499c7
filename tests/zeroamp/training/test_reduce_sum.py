"""`zeroamp.reduce`: gradients summed over ranks, not averaged; and FSDP2's own divide factor."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.processes.training import config, full_parameters, same_bits, wrapped
from tests.selection import slow_but

NAME = "llama_tied"
NUM_STEPS = 2


def _one_process(num_ranks, autocast, factor, num_replicas=1):
    """Plain torch, the ranks written out: the sum over ranks, neighbours first, divided by `factor`."""
    model = build(NAME)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    parameters = list(model.parameters())
    for step in range(NUM_STEPS):
        of_ranks = []
        for rank in range(num_ranks):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = loss_of(model, batch(NAME, step * num_ranks + rank))
            of_ranks.append(torch.autograd.grad(loss.float(), parameters))
        shards = num_ranks // num_replicas
        for parameter, gradients in zip(parameters, zip(*of_ranks, strict=True), strict=True):
            sums = [sum(gradients[i + 1 : i + shards], gradients[i]) for i in range(0, num_ranks, shards)]
            parameter.grad = sum(sums[1:], sums[0]) / factor
        optimizer.step()
    return {fqn: parameter.detach() for fqn, parameter in model.named_parameters()}


def _trained(cfg, factor=None, mesh_shape=None):
    model = wrapped(NAME, cfg, mesh_shape=mesh_shape)
    if factor is not None:  # as torchtitan does
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)
    train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))
    norms = []
    for step in range(NUM_STEPS):
        train.backward(loss_of(model, batch(NAME, step * dist.get_world_size() + dist.get_rank())))
        norms.append(train.step().grad_norm)
    return full_parameters(model), norms


SUM = {"zeroamp": {"reduce": "sum"}}
MODES = {"autocast": {}, "fp32": {"dtype": None}}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
def test_sums_have_the_bits_of_one_process(ranks2, stage, mode):
    expected = _one_process(2, mode == "autocast", 1.0)
    for ours, _ in ranks2.run(_trained, config(stage, **MODES[mode], **SUM)):
        assert same_bits(ours, expected) == []


def test_sums_with_replicas_have_the_bits_of_one_process(ranks4):
    expected = _one_process(4, True, 1.0, num_replicas=2)
    for ours, _ in ranks4.run(_trained, config(3, **SUM), None, (2, 2)):
        assert same_bits(ours, expected) == []


@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
@pytest.mark.parametrize("stage", slow_but([0, 3], 3))
def test_the_divide_factor_of_fsdp_is_honoured(ranks2, stage, factor):
    expected = _one_process(2, True, factor)
    for ours, _ in ranks2.run(_trained, config(stage), factor):
        assert same_bits(ours, expected) == []


LOW = {
    "fp16": {"dtype": "float16", "fp16": {"loss_scale": 64}},
    "fp16 native": {"dtype": "float16", "fp16": {"loss_scale": 64}, "native": True},
    "fp16 accumulated": {"dtype": "float16", "fp16": {"loss_scale": 64}, "data_types": {"grad_accum_dtype": "fp16"}},
    "bf16": {"dtype": None, "bf16": {"enabled": True}},
    "bf16 native": {"native": True},
}


def _sum_and_mean(stage, options):
    options = dict(options)
    native = {"reduce_accumulate_dtype": "native"} if options.pop("native", False) else {}
    runs = []
    for reduce in ("sum", "mean"):
        cfg = config(stage, **options, zeroamp={"reduce": reduce, **native})
        runs.append(_trained(cfg)[1][0])
    return runs


@pytest.mark.parametrize("path", LOW)
@pytest.mark.parametrize("stage", slow_but([1, 3], 3))
def test_every_dtype_path_sums(ranks2, stage, path):
    """On two ranks the sum is twice the mean: the same bits but for the exponent, where nothing over- or underflows."""
    for total, mean in ranks2.run(_sum_and_mean, stage, LOW[path]):
        assert total == pytest.approx(2 * mean, rel=1e-3 if "native" in path or "accum" in path else 1e-6)


def _mixed_factors():
    model = wrapped(NAME, config(3))
    model.blocks[0].set_gradient_divide_factor(1.0)  # not its typed groups
    zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_factor_on_some_groups_of_a_unit_is_refused(ranks2):
    with pytest.raises(AssertionError, match="StepError: set_gradient_divide_factor: .*blocks.0.* by 1.0"):
        ranks2.run(_mixed_factors)
