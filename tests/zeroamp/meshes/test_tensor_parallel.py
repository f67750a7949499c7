"""Tensor parallelism: units, whole parameters, overflows, and what is refused or an error."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zeroamp
from tests.models import parallel
from tests.processes import parallel_training
from tests.processes.parallel_training import mesh_of
from tests.processes.ranks import RankError
from tests.processes.training import config, full_parameters, same_bits
from zeroamp.policies.errors import StepError

AXES = {"dp": 2, "tp": 2}


@pytest.mark.slow
def test_an_embedding_and_a_head_have_the_same_bits(ranks4):
    """FSDP2 warns of outputs that are views, as those of parallelize_module are. Warnings are errors in ranks."""
    own, in_root = (
        ranks4.run(parallel_training.train, AXES, config(3, dtype=None, clip=0.5, threshold=threshold), 2)[0]
        for threshold in (1000, None)
    )
    assert own.losses == in_root.losses
    assert same_bits(own.parameters, in_root.parameters) == []


def _overflowed(axes, overflowing_rank):
    """Three steps in float16; in the second, one element of one rank's gradients is infinite."""
    mesh = mesh_of(**axes)
    cfg = config(3, dtype="float16", clip=0.5) | {"fp16": {"initial_scale_power": 8, "hysteresis": 1}}
    model, train = parallel_training.start(mesh, cfg)
    found = []
    for index in range(3):
        train.backward(model(*parallel_training.inputs_of(mesh, index)))
        if index == 1 and dist.get_rank() == overflowing_rank:
            model.get_parameter("blocks.0.up.weight").grad.to_local().view(-1)[0] = float("inf")
        report = train.step()
        found.append((report.loss, report.skipped, report.loss_scale))
    return found, full_parameters(model)


def test_an_overflow_on_one_tensor_rank_skips_the_step_on_all(ranks4, ranks2):
    runs = ranks4.run(_overflowed, AXES, 1)
    losses, skipped, scales = zip(*runs[0][0], strict=True)
    assert skipped == (False, True, False)
    assert scales == (256, 256, 128)
    for found, parameters in runs[1:]:
        assert found == runs[0][0]
        assert same_bits(parameters, runs[0][1]) == []
    alone = ranks2.run(_overflowed, {"dp": 2}, 1)[0][0]
    assert losses == pytest.approx([loss for loss, *_ in alone], rel=2**-9)  # activations are rounded to float16


class _Head(nn.Module):
    """A norm or a 0-D scale of the heads of one rank, which the plan leaves out."""

    def __init__(self, part):
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.norm = nn.RMSNorm(4, eps=1e-5) if part == "norm" else nn.Identity()
        self.scale = nn.Parameter(torch.tensor(1.0)) if part == "scale" else 1.0

    def forward(self, x):
        x = self.up(x) * self.scale
        return self.norm(x.view(*x.shape[:-1], -1, 4)).square().mean()


def _part_of_a_gradient(part):
    mesh = mesh_of(**AXES)
    torch.manual_seed(0)
    model = parallelize_module(_Head(part), mesh["tp"], {"up": ColwiseParallel()})
    model = zeroamp.wrap_model(model, zeroamp.policy_from_config(config(3, dtype=None)), mesh)
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters()))
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    train.backward(model(torch.randn(4, 8, generator=generator)))
    try:
        train.step()
    except StepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("part", "fqn"), [("norm", "norm.weight"), ("scale", "scale")])
def test_parts_of_gradients_that_nobody_adds_are_an_error(ranks4, part, fqn):
    for text in ranks4.run(_part_of_a_gradient, part):
        assert "different gradients" in text
        assert fqn in text
        assert "SequenceParallel" in text


def _unsupported_optimizer(how):
    mesh = mesh_of(**AXES)
    model, _ = parallel_training.start(mesh, config(3))
    if how == "verify":
        zeroamp.explain(model).verify(model, parallel.samples(0))
    else:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        zeroamp.TrainStep(model, torch.optim.Muon(matrices))


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("muon", "StepError: .*torch's Muon, which is not updated on plain shards.*AdamW"),
        ("verify", "WrapError: Ledger.verify is not supported with tensor"),
    ],
)
def test_what_is_not_built_is_refused(ranks4, how, text):
    with pytest.raises(RankError, match=text):
        ranks4.run(_unsupported_optimizer, how)


def _differing_copies():
    mesh = mesh_of(**AXES)
    model = parallel_training.prepared(mesh)
    if mesh["tp"].get_local_rank() == 1:
        with torch.no_grad():
            model.norm.weight.add_(1e-3)
    zeroamp.wrap_model(model, zeroamp.policy_from_config(config(3)), mesh["dp"])


def test_copies_that_differ_over_the_tensor_axis_are_refused(ranks4):
    with pytest.raises(RankError, match=r"WrapError: norm\.weight has values that differ between ranks"):
        ranks4.run(_differing_copies)


def _synced():
    mesh = mesh_of(**AXES)
    model = parallel_training.prepared(mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter.to_local() if hasattr(parameter, "to_local") else parameter).fill_(dist.get_rank())
    policy = zeroamp.policy_from_config({**config(3), "zeroamp": {"sync_module_states": True}})
    whole = full_parameters(zeroamp.wrap_model(model, policy, mesh))
    return whole["norm.weight"], whole["blocks.0.up.weight"]


def test_module_states_are_those_of_the_first_ranks_with_the_same_part(ranks4):
    for norm, up in ranks4.run(_synced):
        assert (norm == 0).all()
        first, second = up.chunk(2)
        assert (first == 0).all()
        assert (second == 1).all()
