"""Values that are "auto" in the config, and the arguments that fill them."""

import pytest

from zeroamp import ConfigError, policy_from_config

ZERO = "zero_optimization"


def test_an_argument_is_named_by_part_path_or_block():
    """An argument is named by the last part by the path or by the block."""
    cfg = {"bf16": {"enabled": "auto"}, "gradient_clipping": "auto", ZERO: {"stage": "auto"}}
    policy = policy_from_config(cfg, bf16=True, gradient_clipping=0.5, zero_optimization__stage=2)
    assert (policy.mode, policy.gradient_clipping, policy.stage) == ("bf16", 0.5, 2)
    assert dict(policy.given)["gradient_clipping"] == 0.5
    assert policy == policy_from_config(
        cfg, **{"bf16.enabled": True, "gradient_clipping": 0.5, "zero_optimization.stage": 2}
    )


def test_hidden_size_fills_the_three_sizes_that_transformers_derives_from_it():
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    policy = policy_from_config({ZERO: {"stage": 3, **dict.fromkeys(sizes, "auto")}}, hidden_size=64)
    assert (policy.prefetch_bucket_size, policy.param_persistence_threshold) == (int(0.9 * 64 * 64), 640)


def test_every_auto_that_is_left_is_named():
    with pytest.raises(ConfigError) as caught:
        policy_from_config({"bf16": {"enabled": "auto"}, "gradient_clipping": "auto"})
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines] == ["bf16.enabled", "gradient_clipping"]


def test_an_argument_agrees_with_the_config_or_is_an_error():
    """An argument that agrees with the config is welcome and one that does not is an error."""
    assert policy_from_config({"gradient_clipping": 2.0}, gradient_clipping=2.0).gradient_clipping == 2.0
    with pytest.raises(ConfigError, match="gradient_clipping is 2.0 .*argument gradient_clipping is 1.0. Remove one"):
        policy_from_config({"gradient_clipping": 2.0}, gradient_clipping=1.0)
    with pytest.raises(ConfigError, match="bf16.enabled is true .*argument bf16 is 1. Remove one"):
        policy_from_config({"bf16": {"enabled": True}}, bf16=1)


@pytest.mark.parametrize("name", ["gradient_cliping", "enabled", "stage"])
def test_an_argument_that_fills_nothing_is_an_error(name):
    with pytest.raises(ConfigError, match=f"the argument {name} is 1, but fills no key.* Leave it out"):
        policy_from_config({"bf16": {"enabled": "auto"}}, **{name: 1})


def test_a_filled_value_is_checked_like_a_written_one():
    with pytest.raises(ConfigError, match='gradient_clipping must be a number, but is "much"'):
        policy_from_config({"gradient_clipping": "auto"}, gradient_clipping="much")
    with pytest.raises(ConfigError, match='the argument hidden_size .* is the string "64". Pass'):
        policy_from_config({ZERO: {"stage3_prefetch_bucket_size": "auto"}}, hidden_size="64")
