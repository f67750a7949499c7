"""Libraries that give each rank samples of its own refuse meshes whose tensor or context ranks need the same ones."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zeroamp
from tests.processes.ranks import RankError
from tests.processes.trainer import forget_accelerate
from tests.processes.training import config

REFUSED = "gives each of 2 ranks samples of its own, but .*only 1 ranks? get different samples"


def _parallelized(names, make):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
    torch.manual_seed(0)  # the ranks live across tests, which leave them other generators
    model = make()
    if names[1] == "tp":
        linear = next(name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
        parallelize_module(model, mesh["tp"], {linear: ColwiseParallel()})
    return model, mesh


def _with_accelerate(names):
    from zeroamp.integrations.accelerate import ZeroampAccelerator

    forget_accelerate()
    model, mesh = _parallelized(names, lambda: torch.nn.Sequential(torch.nn.Linear(8, 8)))
    accelerator = ZeroampAccelerator(cpu=True, zeroamp=config(3, accumulation=None), wrap_arguments={"mesh": mesh})
    accelerator.prepare(model)
    return zeroamp.explain(model) is not None


def test_accelerate_refuses_an_axis_whose_ranks_share_samples(ranks2):
    """Accelerate refuses an axis whose ranks share samples and takes an expert axis."""
    pytest.importorskip("accelerate", reason="its data loaders are what is refused")
    with pytest.raises(RankError, match=f"WrapError: accelerate {REFUSED}"):
        ranks2.run(_with_accelerate, ("dp", "tp"))
    assert all(ranks2.run(_with_accelerate, ("dp", "ep")))


def _with_lightning(folder):
    from tests.processes.lightning_loops import fit, module_of
    from zeroamp.integrations.lightning import ZeroampStrategy

    cfg = {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 1}
    model, mesh = _parallelized(("dp", "tp"), module_of)
    fit(zeroamp.wrap_model(model, zeroamp.policy_from_config(cfg), mesh), folder, ZeroampStrategy(cfg))


@pytest.mark.slow
def test_lightning_refuses_a_tensor_axis(ranks2, tmp_path):
    pytest.importorskip("lightning", reason="its data loaders are what is refused")
    with pytest.raises(RankError, match=f"WrapError: Lightning's Trainer {REFUSED}"):
        ranks2.run(_with_lightning, tmp_path)


def _with_sampler(names):
    model, mesh = _parallelized(names, lambda: torch.nn.Sequential(torch.nn.Linear(8, 8)))
    zeroamp.wrap_model(model, zeroamp.policy_from_config(config(3)), mesh)
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters()))
    return list(zeroamp.MicroBatchSampler(train, range(8), 2, shuffle=False))


def test_a_micro_batch_sampler_deals_the_same_samples_to_tensor_ranks(ranks2):
    assert ranks2.run(_with_sampler, ("dp", "tp")) == [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 2


def test_a_micro_batch_sampler_refuses_a_context_axis(ranks2):
    with pytest.raises(RankError, match="StepError: MicroBatchSampler .*2 ranks of a context axis"):
        ranks2.run(_with_sampler, ("dp", "cp"))
