"""What of a config only shows when a model, a mesh and a device are there."""

import json
import re

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.small import build
from tests.processes.training import check_same_run, config, train, wrapped
from zeroamp.wrapping.model_checks import check_device

NAME = "two_blocks_untied"


def _error_of(cfg, mesh_shape=None):
    with pytest.raises(zeroamp.ConfigError) as caught:
        wrapped(NAME, cfg, mesh_shape=mesh_shape)
    return str(caught.value)


def _total_of_another_world():
    cfg = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    zeroamp.wrap_model(build(NAME), cfg)
    policy = zeroamp.policy_from_config({**cfg, "train_batch_size": 18}, world_size=3)
    words = "train_batch_size (?=.*18)(?=.*12 = 2 train_micro_batch_size_per_gpu x 3 ).*Change one"
    with pytest.raises(zeroamp.ConfigError, match=f"^{words}"):
        zeroamp.wrap_model(build(NAME), policy)


def test_batch_sizes_are_checked_against_the_mesh(ranks2):
    ranks2.run(_total_of_another_world)


def _by_config(path):
    expected = zeroamp.explain(wrapped(NAME, config(3))).to_dict()
    for given in (config(3), path, str(path)):
        assert zeroamp.explain(zeroamp.wrap_model(build(NAME), given)).to_dict() == expected
    with pytest.raises(zeroamp.ConfigError, match="config must be .*NoneType"):
        zeroamp.wrap_model(build(NAME), None)
    broken = {"zero_optimisation": {}} if dist.get_rank() == 1 else config(3)
    with pytest.raises(zeroamp.ZeroAmpError) as caught:
        zeroamp.wrap_model(build(NAME), broken)
    return str(caught.value)


def test_a_config_or_its_path_is_taken_for_its_policy(ranks2, tmp_path):
    """A config or its path is taken for its policy and one rank's error is raised on all."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config(3)))
    assert all("zero_optimisation" in text for text in ranks2.run(_by_config, path))


def _same_with_the_mesh():
    cfg = config(3, zeroamp={"dp_replicate_size": 2})
    assert tuple(next(wrapped(NAME, cfg).parameters()).device_mesh.mesh.shape) == (2, 2)
    check_same_run(train(NAME, cfg, 1), train(NAME, config(3), 1, mesh_shape=(2, 2)))


def test_dp_replicate_size_makes_the_mesh(ranks4):
    """`dp_replicate_size` makes the mesh and is the same as passing it."""
    ranks4.run(_same_with_the_mesh)


def test_a_number_of_replicas_that_does_not_fit_is_refused(ranks4):
    words = ranks4.run(_error_of, config(3, zeroamp={"dp_replicate_size": 3}))[0]
    assert re.match(r"zeroamp.dp_replicate_size (?=.*\b3\b)(?=.*divisor of the 4 ranks)", words)
    words = ranks4.run(_error_of, config(3, zeroamp={"dp_replicate_size": 4}), (2, 2))[0]
    assert re.match(r"zeroamp.dp_replicate_size (?=.*\b4\b)(?=.*\b2\b).*mesh", words)


def test_a_dtype_that_the_device_cannot_do_is_refused(monkeypatch):
    policy = zeroamp.policy_from_config(config(3))
    check_device(policy, "cpu")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    with pytest.raises(zeroamp.ConfigError, match=r"torch_autocast.dtype is bf16 .*cuda \(Some GPU\).* Use float16"):
        check_device(policy, "cuda")
    with pytest.raises(zeroamp.ConfigError, match=r"bf16.enabled is bf16 .*cuda.* Use float16"):
        check_device(zeroamp.policy_from_config({"bf16": {"enabled": True}}), "cuda")
    check_device(zeroamp.policy_from_config({"fp16": {"enabled": True}}), "cuda")
    with pytest.raises(zeroamp.ConfigError, match="torch_autocast.dtype is bf16 .*meta, which has no"):
        check_device(policy, "meta")
