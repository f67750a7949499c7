"""`scheduler_from_config`: what the optimizer has at each step, and what a scheduler must be able to do."""

import json

import pytest
import torch
from torch import nn

from tests.oracles import learning_rates as oracle
from zeroamp import ConfigError, scheduler_from_config

NUM_STEPS = 1000
LRS = (0.5, 0.03)


def adam(lrs=LRS):
    return torch.optim.AdamW([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs])


def cfg(name, **params):
    return {"scheduler": {"type": name, "params": params}}


def seen(optimizer, scheduler, num_steps=NUM_STEPS):
    """Train; return the learning rates of each param group at each optimizer step."""
    values = []
    for _ in range(num_steps):
        values.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return [list(group) for group in zip(*values, strict=True)]


ORACLES = {
    "WarmupLR": oracle.warmup_lr,
    "WarmupDecayLR": oracle.warmup_decay_lr,
    "WarmupCosineLR": oracle.warmup_cosine_lr,
}
# Our keys, and what the oracle calls them; of each param group if they differ.
CURVES = [
    ("WarmupLR", {}, {}),
    (
        "WarmupLR",
        {"warmup_min_lr": 1e-4, "warmup_max_lr": 0.02, "warmup_num_steps": 137, "warmup_type": "linear"},
        {"lo": 1e-4, "hi": 0.02, "steps": 137, "kind": "linear"},
    ),
    (
        "WarmupLR",
        {"warmup_min_lr": [1e-4, 0.5], "warmup_max_lr": [0.3, 0.1], "warmup_num_steps": 300},
        ({"lo": 1e-4, "hi": 0.3, "steps": 300}, {"lo": 0.5, "hi": 0.1, "steps": 300}),
    ),
    ("WarmupDecayLR", {"total_num_steps": 1500}, {"total": 1500}),
    (
        "WarmupDecayLR",
        {"total_num_steps": 250, "warmup_min_lr": 1e-3, "warmup_max_lr": [0.1, 0.2], "warmup_num_steps": 50},
        ({"total": 250, "lo": 1e-3, "hi": 0.1, "steps": 50}, {"total": 250, "lo": 1e-3, "hi": 0.2, "steps": 50}),
    ),
    ("WarmupDecayLR", {"total_num_steps": 50, "warmup_num_steps": 77}, {"total": 50, "steps": 77}),
    (
        "WarmupCosineLR",
        {"total_num_steps": 800, "warmup_min_ratio": 0.1, "warmup_num_steps": 60, "cos_min_ratio": 0.02},
        {"total": 800, "lo": 0.1, "steps": 60, "end": 0.02},
    ),
    ("WarmupCosineLR", {"total_num_steps": 30, "warmup_num_steps": 60}, {"total": 30, "steps": 60}),
]


def expected(name, of_groups):
    """What each param group has at each step."""
    of_groups = of_groups if isinstance(of_groups, tuple) else 2 * (of_groups,)
    curves = [ORACLES[name](lr, **each) for lr, each in zip(LRS, of_groups, strict=True)]
    return [oracle.take(curve, NUM_STEPS) for curve in curves]


@pytest.mark.parametrize(("name", "params", "of_groups"), CURVES, ids=str)
def test_each_optimizer_step_of_each_group_has_the_learning_rate_of_deepspeed(name, params, of_groups):
    optimizer = adam()
    rates = seen(optimizer, scheduler_from_config(cfg(name, **params), optimizer))
    assert rates == expected(name, of_groups)
    assert len(set(rates[0])) > 20, "the curve moves"


@pytest.mark.parametrize("is_late", [False, True], ids=["optimizer first", "scheduler first"])
@pytest.mark.parametrize(("name", "params", "of_groups"), [CURVES[2], CURVES[4], CURVES[6]], ids=str)
def test_a_saved_state_resumes_the_curve(name, params, of_groups, is_late):
    optimizer, resumed = adam(), adam()
    case = cfg(name, **params)
    scheduler, again = scheduler_from_config(case, optimizer), scheduler_from_config(case, resumed)
    seen(optimizer, scheduler, 77)
    loads = [
        lambda: resumed.load_state_dict(optimizer.state_dict()),
        lambda: again.load_state_dict(json.loads(json.dumps(scheduler.state_dict()))),
    ]
    for load in reversed(loads) if is_late else loads:
        load()
    assert again.get_last_lr() == scheduler.get_last_lr()
    assert seen(resumed, again, NUM_STEPS - 77) == [group[77:] for group in expected(name, of_groups)]


def test_it_is_a_torch_scheduler():
    """It is a torch scheduler that goes to any step and warns of nothing."""
    optimizer = adam()
    params = {"warmup_max_lr": 8.0, "warmup_num_steps": 8, "warmup_type": "linear"}
    scheduler = scheduler_from_config(cfg("WarmupLR", **params), optimizer)
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    assert scheduler.get_last_lr() == [0.0, 0.0]
    scheduler.step()
    scheduler.step()  # before any optimizer.step(), as after a step that float16 skips: torch's own would warn
    assert scheduler.get_last_lr() == scheduler.get_lr() == [1.0, 1.0]
    scheduler.step(7)
    assert (scheduler.last_epoch, scheduler.get_last_lr()) == (7, [6.0, 6.0])


def test_a_learning_rate_that_is_a_tensor_stays_that_tensor():
    rates = [torch.tensor(lr) for lr in LRS]
    optimizer = adam(rates)
    scheduler = scheduler_from_config(cfg("WarmupCosineLR", total_num_steps=9, warmup_num_steps=4), optimizer)
    assert [float(rate) for rate in rates] == [0.0, 0.0]
    scheduler.step(4)  # the last of the warm-up
    torch.testing.assert_close(rates, [torch.tensor(lr) for lr in LRS])
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True))
    assert {type(lr) for lr in scheduler.get_last_lr() + scheduler.state_dict()["base_lrs"]} == {float}


def test_a_warm_up_longer_than_the_run_warns(caplog):
    scheduler_from_config(cfg("WarmupDecayLR", total_num_steps=100, warmup_num_steps=200), adam())
    assert "warmup_num_steps is 200, but total_num_steps is 100: the run ends before" in caplog.text


@pytest.mark.parametrize(
    ("case", "optimizer", "words"),
    [
        ({}, adam(), '"scheduler".* Add it, such as {"type": "WarmupLR"'),
        (
            cfg("WarmupLR", warmup_max_lr=[0.1, 0.2, 0.3]),
            adam(),
            "scheduler.params.warmup_max_lr has 3 values.* 2 param groups.* one per param group",
        ),
    ],
    ids=["no block", "values per group"],
)
def test_what_does_not_fit_is_refused_before_the_optimizer_is_touched(case, optimizer, words):
    before = [group["lr"] for group in optimizer.param_groups]
    with pytest.raises(ConfigError, match=words):
        scheduler_from_config(case, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == before
