"""The blocks `optimizer` and `scheduler`: names, and each refusal."""

import pytest

from zeroamp import ConfigError, policy_from_config


def _optimizer(name, **params):
    return {"optimizer": {"type": name, "params": params}}


def _scheduler(name, **params):
    return {"scheduler": {"type": name, "params": params}}


BAD = [
    ({"optimizer": {}}, "type", "is missing", "Add it"),
    (_optimizer("Lamb"), "type", 'is "Lamb"', "Build the optimizer yourself"),
    (_optimizer("AdmaW"), "type", 'is "AdmaW"', "Did you mean 'AdamW'?"),
    ({"optimizer": {"type": "SGD", "legacy": True}}, "legacy", "is a key of neither", "legacy_fusion"),
    (_optimizer("AdamW", weight_decy=0.1), "params.weight_decy", "is not supported", "weight_decay"),
    (_optimizer("Adam", momentum=0.1), "params.momentum", "is not supported", "does not ignore unknown keys"),
    (_optimizer("AdamW", max_grad_norm=1.0), "params.max_grad_norm", "is 1.0", 'Write "gradient_clipping" at the top'),
    (_optimizer("Adam", bias_correction=False), "params.bias_correction", "is false", "Remove it: torch's Adam always"),
    (_optimizer("AdamW", adam_w_mode=False), "params.adam_w_mode", "is false", 'Write "type": "Adam"'),
    (_optimizer("SGD", lr="1e-3"), "params.lr", 'is the string "1e-3"', "Remove the quotes"),
    (_optimizer("Adam", betas=[0.9, 1]), "params.betas.1", "is 1", "Change the value"),
    (_scheduler("WarmupCosLR"), "type", 'is "WarmupCosLR"', "WarmupCosineLR"),
    (_scheduler("OneCycle"), "type", 'is "OneCycle"', "CyclicLR in place of OneCycle"),
    (_scheduler("WarmupDecayLR"), "params.total_num_steps", "is missing", "Add it"),
    (_scheduler("WarmupLR", last_batch_iteration=3), "params.last_batch_iteration", "is 3", "pass the saved state to"),
    (_scheduler("WarmupLR", warmup_type="cosine"), "params.warmup_type", 'is "cosine"', "Change the value"),
    (_scheduler("WarmupLR", warmup_num_steps=0), "params.warmup_num_steps", "is 0", "Change the value"),
    (_scheduler("WarmupLR", warmup_max_lr=float("inf")), "params.warmup_max_lr", "is Infinity", "Change the value"),
]


@pytest.mark.parametrize(("cfg", "key", "value", "remedy"), BAD, ids=str)
def test_bad_input_is_refused_with_key_value_and_remedy(cfg, key, value, remedy):
    with pytest.raises(ConfigError) as caught:
        policy_from_config(cfg)
    text = str(caught.value)
    (block,) = cfg
    assert text.startswith(f"{block}.{key} ")
    assert value in text
    assert remedy in text


def test_every_bad_key_of_params_has_a_line():
    with pytest.raises(ConfigError) as caught:
        policy_from_config(_optimizer("Adam", lr=-1, lrr=1, max_grad_norm=1.0, betas=[0.9, 2]))
    places = {line.split()[0] for line in str(caught.value).splitlines()}
    assert places == {f"optimizer.params.{key}" for key in ("lr", "lrr", "max_grad_norm", "betas.1")}
