"""`zeroamp.reduce`: gradients summed over ranks, not averaged; and FSDP2's own divide factor."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import zeroamp
from tests.oracles import one_process
from tests.processes.training import SmallTraining, config, same_bits, wrapped
from tests.selection import slow_but

NAME = "two_blocks"
NUM_STEPS = 2
LR = 1 / 128


def _one_process(num_ranks, factor, **more):
    """The parameters of plain torch, with the sum over ranks divided by `factor`.

    Plain SGD by a mean is SGD by the sum with a learning rate that is so much larger: a power of two changes no bit.
    """

    def make_optimizers(named):
        return [torch.optim.SGD(named.values(), lr=LR * num_ranks / factor, momentum=0.9)]

    options = {"num_steps": NUM_STEPS, "make_optimizers": make_optimizers, **more}
    _, _, parameters = one_process.train(NAME, world_size=num_ranks, **options)
    return parameters


def _trained(cfg, factor=None, mesh_shape=None, num_steps=NUM_STEPS):
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=LR, momentum=0.9)

    training = SmallTraining(cfg, sgd, mesh_shape=mesh_shape)
    if factor is not None:  # as torchtitan does
        for module in training.model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)
    reports = [training.step(micro) for micro in range(num_steps * cfg["gradient_accumulation_steps"])]
    norms = [report.grad_norm for report in reports if report is not None]
    return training.parameters(), norms


SUM = {"zeroamp": {"reduce": "sum"}}


@pytest.mark.parametrize(
    ("stage", "options", "factor"),
    [
        (0, SUM, None),
        (3, SUM, None),
        (3, {**SUM, "dtype": None}, None),
        (3, {}, 1.0),
        (3, {}, 8.0),
    ],
    ids=["stage 0", "stage 3", "fp32", "factor 1", "factor 8"],
)
def test_sums_and_the_divide_factor_have_the_bits(ranks2, stage, options, factor):
    """Sums and the divide factor of FSDP have the bits of one process."""
    autocast = None if "dtype" in options else torch.bfloat16
    expected = _one_process(2, 1.0 if factor is None else factor, autocast=autocast)
    for ours, _ in ranks2.run(_trained, config(stage, **options), factor):
        assert same_bits(ours, expected) == []


def test_sums_with_replicas_have_the_bits_of_one_process(ranks4):
    expected = _one_process(4, 1.0, num_replicas=2)
    for ours, _ in ranks4.run(_trained, config(3, **SUM), None, (2, 2)):
        assert same_bits(ours, expected) == []


FP16 = {"dtype": "float16", "fp16": {"loss_scale": 64}}
SUMMED = {"data_types": {"grad_accum_dtype": "fp16"}}
NATIVE = {"reduce_accumulate_dtype": "native"}
PATHS = {
    "fp16": (3, None, FP16, {}),
    "fp16 native": (3, None, FP16, NATIVE),
    "fp16 accumulated": (1, None, {**FP16, **SUMMED}, {}),
    "fp16 accumulated, native, replicas": (3, (2, 2), {**FP16, **SUMMED, "accumulation": 2}, NATIVE),
    "bf16": (3, None, {"dtype": None, "bf16": {"enabled": True}}, {}),
    "bf16 native": (3, None, {}, NATIVE),
}


def _sum_and_mean(stage, mesh_shape, options, keys):
    """The norms of the first step."""
    cfgs = [config(stage, **options, zeroamp={"reduce": reduce, **keys}) for reduce in ("sum", "mean")]
    return [_trained(cfg, None, mesh_shape, 1)[1][0] for cfg in cfgs]


@pytest.mark.parametrize("path", slow_but(PATHS, *(path for path in PATHS if "replicas" not in path)))
def test_every_dtype_path_sums_and_averages_once(request, path):
    """A missed or doubled factor would be 2 or more."""
    _, mesh_shape, options, _ = PATHS[path]
    size, accumulation = (2 if mesh_shape is None else 4), options.get("accumulation", 1)
    _, (norm,), _ = one_process.train(NAME, world_size=size, num_steps=1, accumulation=accumulation)
    for total, mean in request.getfixturevalue(f"ranks{size}").run(_sum_and_mean, *PATHS[path]):
        assert total == pytest.approx(size * mean, rel=1e-6 if path in ("fp16", "bf16") else 1e-3)
        assert mean == pytest.approx(norm, rel=1e-2)


def _mixed_factors():
    model = wrapped(NAME, config(3))
    model.blocks[0].set_gradient_divide_factor(1.0)  # not its typed groups
    zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_factor_on_some_groups_of_a_unit_is_refused(ranks2):
    with pytest.raises(AssertionError, match="StepError: set_gradient_divide_factor: .*blocks.0.* by 1.0"):
        ranks2.run(_mixed_factors)
