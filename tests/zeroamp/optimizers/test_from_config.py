"""`optimizer_from_config`: torch's own optimizer, with the config's arguments."""

import json

import pytest
import torch
from torch import nn

from zeroamp import ConfigError, optimizer_from_config, policy_from_config

ADAM = {"lr": 0.1, "betas": [0.8, 0.95], "eps": 1e-3, "weight_decay": 0.3}
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}

CASES = [
    ({"type": "ADAM"}, torch.optim.AdamW, {"weight_decay": 0.0}),
    ({"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}}, torch.optim.Adam, {}),
    ({"type": "Adam", "params": {**ADAM, "adam_w_mode": False}}, torch.optim.Adam, ADAM),
    ({"type": "AdamW", "params": {**ADAM, "fused": True}}, torch.optim.AdamW, {**ADAM, "fused": True}),
    (
        {"type": "AdamW", "params": {**ADAM, "amsgrad": True, "foreach": True, "maximize": True}},
        torch.optim.AdamW,
        {**ADAM, "amsgrad": True, "foreach": True, "maximize": True},
    ),
    ({"type": "SGD", "params": {**SGD, "dampening": 0.5}}, torch.optim.SGD, {**SGD, "dampening": 0.5}),
]


def trained(build, num_steps=5):
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(size, generator=generator)) for size in (7, 5)]
    optimizer = build([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.01, "weight_decay": 0.05}])
    for _ in range(num_steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return optimizer, [weight.detach() for weight in weights]


def settings(optimizer):
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


@pytest.mark.parametrize(("block", "torch_class", "arguments"), CASES, ids=str)
def test_two_groups_train_to_the_bits_of_torch(block, torch_class, arguments):
    """Two groups train to the same bits as the torch optimizer built by hand."""
    ours, weights = trained(lambda groups: optimizer_from_config({"optimizer": block}, groups))
    arguments = {key: tuple(value) if key == "betas" else value for key, value in arguments.items()}
    by_hand, expected = trained(lambda groups: torch_class(groups, **arguments))
    assert type(ours) is type(by_hand)
    assert settings(ours) == settings(by_hand)
    assert all(torch.equal(weight, other) for weight, other in zip(weights, expected, strict=True))


def test_a_policy_a_mapping_and_a_file_build_the_same(tmp_path):
    cfg = {"optimizer": {"type": "Adam", "params": {"lr": 0.5}}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(cfg))
    built = [
        trained(lambda groups, c=c: optimizer_from_config(c, groups))[0] for c in (cfg, path, policy_from_config(cfg))
    ]
    assert settings(built[0]) == settings(built[1]) == settings(built[2])
    assert [group["lr"] for group in built[0].param_groups] == [0.5, 0.01]


def test_a_config_without_an_optimizer_says_what_to_add():
    with pytest.raises(ConfigError, match='"optimizer".* Add it, such as {"type": "AdamW"'):
        optimizer_from_config({}, [nn.Parameter(torch.zeros(1))])


def test_auto_values_are_filled_by_arguments_and_refused_beside_a_policy():
    cfg = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}
    parameters = [nn.Parameter(torch.zeros(1))]
    optimizer = optimizer_from_config(cfg, parameters, lr=0.25, weight_decay=0.5)
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.25, 0.5)
    policy = policy_from_config({"optimizer": {"type": "SGD"}})
    with pytest.raises(ConfigError, match=r"lr\b.* total_num_steps .*Policy.* policy_from_config"):
        optimizer_from_config(policy, parameters, total_num_steps=10, lr=0.1)


class _OnCuda(torch.Tensor):
    """A tensor whose `device` is a CUDA device. The builder reads only the device."""

    @property
    def device(self):
        return torch.device("cuda", 0)


def _parameter(kind):
    tensor = torch.zeros(2)
    return nn.Parameter(tensor) if kind == "cpu" else tensor.as_subclass(_OnCuda).requires_grad_()


@pytest.mark.parametrize(
    ("devices", "params", "fused", "foreach"),
    [
        (("cuda", "cuda"), {}, True, None),
        (("cuda", "cuda"), {"fused": False}, False, None),
        (("cuda", "cuda"), {"foreach": True}, None, True),
        (("cuda", "cpu"), {}, None, None),
        (("cpu", "cpu"), {}, None, None),
        (("cpu", "cpu"), {"fused": True}, True, None),
    ],
)
def test_the_default_is_fused_where_all_parameters_are_on_cuda(devices, params, fused, foreach):
    for kind in ("AdamW", "Adam", "SGD"):
        held = [_parameter(device) for device in devices]
        cfg = {"optimizer": {"type": kind, "params": {"lr": 0.1, **params}}}
        named = list(zip("ab", held, strict=True))
        for given in (held, iter(held), [{"params": held[:1]}, {"params": held[1:], "lr": 1.0}], named):
            group = optimizer_from_config(cfg, given).param_groups[-1]
            assert (group["fused"], group["foreach"]) == (fused, foreach)
