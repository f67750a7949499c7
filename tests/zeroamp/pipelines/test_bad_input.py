"""What a part of a pipeline is not supported with is one error on all ranks, at wrap time where it can be."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeroamp
from tests.processes import pipelines
from tests.processes.ranks import RankError
from zeroamp.wrapping.state import wrap_state

CONFIG = {"zero_optimization": {"stage": 2}}


def _wrap(sliced, configs, axes=("pp", "dp"), *, has_scalar=False):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
    policy = zeroamp.policy_from_config(configs[mesh[axes[0]].get_local_rank()], world_size=2)
    model = nn.Linear(4, 4)
    if has_scalar:
        model.scale = nn.Parameter(torch.ones(()))
    zeroamp.wrap_model(model, policy, mesh[axes[1:]] if sliced else mesh)


def test_a_0d_parameter_is_refused(ranks4):
    with pytest.raises(RankError, match="pipeline axis is not supported with the 0-D parameter scale"):
        ranks4.run(_wrap, True, (CONFIG, CONFIG), has_scalar=True)


@pytest.mark.parametrize(
    ("sliced", "other", "text"),
    [
        (False, {}, r"axis 'pp' of 2 ranks, .* pass the mesh without this axis, mesh=mesh\['dp'\]"),
        (
            True,
            {"zero_optimization": {"stage": 3}},
            "stage is 2 on ranks?.*same policy on all stages",
        ),
        (True, {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps 2, whose place .* n_microbatches"),
        (
            True,
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            "pipeline axis is not supported with zero_optimization.offload_param",
        ),
        (
            True,
            {"zeroamp": {"reproducible": True}},
            "pipeline axis is not supported with reproducible True",
        ),
    ],
)
def test_wrap_model_refuses_on_all_ranks(ranks4, sliced, other, text):
    """The last rows have the mistake on the second stage alone. The first stage raises the error too."""
    with pytest.raises(RankError, match=text) as caught:
        ranks4.run(_wrap, sliced, (CONFIG, CONFIG | other))
    assert str(caught.value).count("\nzeroamp.policies.errors.WrapError: ") >= 4


def _calls(folder):
    _, parts, _ = pipelines.start("GPipe", CONFIG, {"pp": 2, "dp": 2})
    (part,) = parts.values()
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    errors = {}
    for name, call in {
        "TrainStep": lambda: zeroamp.TrainStep(part, optimizer),
        "save_checkpoint": lambda: zeroamp.save_checkpoint(folder, part, None),
        "load_checkpoint": lambda: zeroamp.load_checkpoint(folder, part),
        "export_hf": lambda: zeroamp.export_hf(part, folder),
    }.items():
        with pytest.raises(zeroamp.WrapError) as caught:
            call()
        errors[name] = str(caught.value)
    return errors


def test_calls_that_need_the_whole_model_are_refused(ranks4, tmp_path):
    for errors in ranks4.run(_calls, str(tmp_path)):
        assert all(text.startswith(f"{name} got a part of a pipeline of 2 ranks") for name, text in errors.items())
    assert not list(tmp_path.iterdir())


def _unflattened():
    """The ranks of the data and the pipeline axis that a part has."""
    torch.manual_seed(0)
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    mesh = world._unflatten(0, (2, 2), ("pp", "dp"))
    axes = wrap_state(zeroamp.wrap_model(nn.Linear(4, 4), CONFIG, mesh)).axes
    return axes.fsdp.mesh.flatten().tolist(), axes.stages.mesh.flatten().tolist()


@pytest.mark.skipif(not hasattr(DeviceMesh, "_unflatten"), reason="this torch does not unflatten meshes")
def test_an_unflattened_mesh_may_contain_the_pipeline_axis(ranks4):
    """Its slices do not lead to the pipeline axis, because the mesh that they are slices of does not have it."""
    assert ranks4.run(_unflattened) == [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]


def _axis_of_one():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    with_replicas = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
    for given in (mesh, mesh["dp"], with_replicas):
        torch.manual_seed(0)
        model = zeroamp.wrap_model(nn.Linear(4, 4), zeroamp.policy_from_config(CONFIG), given)
        zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_pipeline_axis_of_one_rank_is_no_pipeline(ranks2):
    ranks2.run(_axis_of_one)


def _edited(how):
    def edit(parts, _mesh):
        if 0 in parts:
            if how == "frozen":
                parts[0].requires_grad_(False)
            else:
                parts[0] = nn.Identity()

    mesh, parts, schedule = pipelines.start("GPipe", CONFIG, {"pp": 2, "dp": 2}, edit=edit)
    pipelines.run_step(schedule, "GPipe", parts, mesh, 0)
    return zeroamp.clip_grad_norm_(parts.values(), 1.0).item()


def test_the_norm_beside_a_frozen_stage_is_that_of_the_others(ranks4):
    norms = ranks4.run(_edited, "frozen")
    assert norms == [norms[0]] * 4
    assert norms[0] > 0


def test_a_part_without_parameters_is_refused_on_all_ranks(ranks4):
    with pytest.raises(RankError, match="wrap_model failed on rank.*matches no module of Identity"):
        ranks4.run(_edited, "without parameters")


def _norms(stage):
    torch.manual_seed(0)
    norms = []
    for uses_step in (True, False):
        model = nn.Sequential(nn.Linear(64, 33), nn.GELU(), nn.Linear(33, 17))
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
        cfg = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
        model = zeroamp.wrap_model(model, cfg, auto_wrap_policy={"Linear"})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rank = torch.distributed.get_rank()
        loss = model(torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))).square().mean()
        if uses_step:
            train = zeroamp.TrainStep(model, optimizer)
            train.backward(loss)
            norms.append(train.clip_grad_norm(0.1).item())
        else:
            loss.backward()
            norms.append(zeroamp.clip_grad_norm_(model, 0.1).item())
        norms.append(torch.cat([zeroamp.full_gradient(each).flatten() for each in model.parameters()]))
    return norms


@pytest.mark.parametrize("stage", [0, 3])
def test_a_plain_loop_has_the_bits_of_train_step(ranks4, stage):
    for norm, gradient, plain_norm, plain_gradient in ranks4.run(_norms, stage):
        assert norm == plain_norm
        assert torch.equal(gradient, plain_gradient)
        assert torch.linalg.vector_norm(gradient) == pytest.approx(0.1, rel=1e-4)


def _misused(how):
    if how == "no part":
        zeroamp.clip_grad_norm_([], 1.0)
    mesh, parts, _ = pipelines.start("GPipe", CONFIG, {"pp": 2, "dp": 2})
    (part,) = parts.values()
    if how == "other mesh":
        zeroamp.clip_grad_norm_(part, 1.0, mesh=mesh["pp"])
    elif how == "no stages":
        zeroamp.clip_grad_norm_(part, 1.0, mesh=mesh["dp"])
    elif how == "not reduced":
        part.set_requires_gradient_sync(False)
        part(torch.ones(2, 16) if 1 in parts else torch.ones(2, 5).long()).sum().backward()
        zeroamp.clip_grad_norm_(part, 1.0)
    weight = part.embed.weight if 0 in parts else part.head.weight
    if how == "no peer":
        zeroamp.sum_tied_gradients(weight, mesh["pp"].get_local_rank(), mesh["pp"].get_group())
    elif how == "other shapes":
        weight = weight if 0 in parts else part.norm.weight
        zeroamp.sum_tied_gradients(weight, 1 if 0 in parts else 0, mesh["pp"].get_group())
    elif how == "low gradient":
        zeroamp.sum_tied_gradients(nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("no part", "clip_grad_norm_ got no part"),
        ("other mesh", "got a mesh of the ranks .*without rank"),
        ("no stages", "got a mesh of the ranks .*with the pipeline axis"),
        ("not reduced", "did not reduce its gradients"),
        ("no peer", "this rank itself"),
        ("other shapes", r"whose shard is \(24, 16\) here, but \(8,\) in the other copy"),
        ("low gradient", "a sharded fp32 parameter"),
    ],
)
def test_misuse_is_an_error_that_says_what_to_do(ranks4, how, text):
    with pytest.raises(RankError, match=f"StepError: .*{text}"):
        ranks4.run(_misused, how)
