"""The schema itself: classes of keys, and docs that are generated from it, with our defaults beside DeepSpeed's."""

import pytest

from zeroamp import ConfigError, policy_from_config
from zeroamp.policies.json_values import nest
from zeroamp.policies.schema.config import Config
from zeroamp.policies.schema.keys import Native, Unsupported, iter_keys
from zeroamp.reporting.key_report import report_rows

KEYS = {key.path: key for key in iter_keys(Config)}


@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if isinstance(key.key_class, Unsupported)])
def test_an_unsupported_key_is_refused_with_a_remedy(path):
    """An unsupported key is refused with what to do and accepted where it asks for nothing."""
    key = KEYS[path]
    for value in (True, "auto_", 2, {"enabled": True}):
        if value not in key.key_class.off:
            with pytest.raises(ConfigError) as caught:
                policy_from_config(nest({path: value}))
            assert str(caught.value).startswith(f"{path} must be ")
    for value in key.key_class.off:
        if value is not None and not _is_refused_for_its_type(nest({path: value})):
            assert f"  {path} = " in policy_from_config(nest({path: value})).report()


def _is_refused_for_its_type(cfg):
    """`False` asks for nothing, and is still no value of a key that holds text."""
    try:
        policy_from_config(cfg)
    except ConfigError as error:
        return "Change the value" in str(error)
    return False


@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if isinstance(key.key_class, Native)])
def test_a_native_key_is_accepted_and_reported(path):
    value = KEYS[path].default
    cfg = nest({path: list(value) if isinstance(value, tuple) else value})
    required = {"optimizer": {"type": "SGD"}} if path.startswith("optimizer.") else {}
    policy = policy_from_config(
        {name: block | required.get(name, {}) if required else block for name, block in cfg.items()}
    )
    assert {row["status"] for row in report_rows(policy) if row["key"].startswith(path)} == {"native"}
    assert f"  {path} = " in policy.report().partition("Accepted, changes nothing: 1 key\n")[2]
    assert policy == policy_from_config(required)


def test_the_report_names_keys_without_effect():
    """The report says which key has no effect and which block is empty."""
    policy = policy_from_config({"bf16": {}, "zero_optimization": {"stage": 1, "stage3_max_live_parameters": 5}})
    notes = {row["key"]: (row["status"], row["note"]) for row in report_rows(policy)}
    assert notes["bf16"] == ("default", "an empty block")
    assert notes["zero_optimization.stage3_max_live_parameters"] == ("no effect", "stage is 1")
