"""AdamW with moments in bf16: the bits of fp32 AdamW whose moments are rounded after each update, in plain torch."""

import logging
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import zeroamp
from tests.models.small import batch, loss_of
from tests.oracles import one_process
from tests.processes.training import check_runs, config, full_parameters, same_bits, train, wrapped
from tests.selection import slow_but
from zeroamp.optimizers import bf16_states

KEY = "optimizer_states_dtype"
BF16 = {"data_types": {KEY: "bf16"}}
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
NAME = "llama_tied"


class Rounded(torch.optim.AdamW):
    """The oracle: torch's AdamW in fp32. After each update its moments are rounded to bf16."""

    def step(self):
        super().step()
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16())


def _expected(world_size):
    def make_optimizers(named):
        return [Rounded(named.values(), **SETTINGS)]

    return one_process.train(NAME, world_size=world_size, num_steps=6, make_optimizers=make_optimizers)


def _ours(stage):
    def make_optimizer(named):
        return zeroamp.Bf16StatesAdamW(named.values(), **SETTINGS)

    return train(NAME, config(stage, **BF16), 6, make_optimizer=make_optimizer)


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
def test_the_bits_are_those_of_rounded_moments(ranks4, stage):
    check_runs(ranks4.run(_ours, stage), _expected(4))


def _fp16():
    """The first steps overflow, and are skipped."""
    fp16 = {"initial_scale_power": 20, "hysteresis": 1}
    ours, theirs = (
        train(
            NAME,
            config(2, dtype="float16", fp16=fp16, **keys),
            8,
            make_optimizer=lambda named, make=make: make(named.values(), **SETTINGS),
        )
        for make, keys in ((zeroamp.Bf16StatesAdamW, BF16), (Rounded, {}))
    )
    assert same_bits(ours.parameters, theirs.parameters) == []
    assert [math.isfinite(norm) for norm in ours.norms[::7]] == [False, True]


def test_skipped_steps_leave_the_moments(ranks2):
    ranks2.run(_fp16)


def _plain_loop():
    """No `TrainStep`: the optimizer gets DTensors. Returns the parameters."""
    with mock.patch.object(bf16_states, "CHUNK", 64):
        model = wrapped(NAME, config(2, **BF16))
        optimizer = zeroamp.Bf16StatesAdamW(model.parameters(), **SETTINGS)
        for index in range(6):
            loss_of(model, batch(NAME, 4 * index + dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
    state = optimizer.state[next(model.parameters())]
    assert isinstance(state["exp_avg"], DTensor)
    assert (state["exp_avg"].dtype, float(state["step"])) == (torch.bfloat16, 6)
    return full_parameters(model)


def test_a_plain_loop_and_chunks_have_the_same_bits(ranks4):
    """A chunk of 64 elements: every parameter is updated in several parts, the last of which is shorter."""
    for parameters in ranks4.run(_plain_loop):
        assert same_bits(parameters, _expected(4)[2]) == []


def test_loaded_moments_are_rounded_and_bf16_ones_exact_in_fp32():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8, 8))
    weight.grad = torch.randn(8, 8)
    fp32, bf16 = torch.optim.AdamW([weight]), zeroamp.Bf16StatesAdamW([weight])
    fp32.step()
    bf16.load_state_dict(fp32.state_dict())
    moment = bf16.state[weight]["exp_avg"]
    assert torch.equal(moment, fp32.state[weight]["exp_avg"].bfloat16())
    assert moment.dtype == torch.bfloat16
    fp32.load_state_dict(bf16.state_dict())
    assert torch.equal(fp32.state[weight]["exp_avg"], moment.float())
    assert fp32.state[weight]["exp_avg"].dtype == torch.float32


def _verified():
    model = wrapped(NAME, config(3, **BF16))
    ledger = zeroamp.explain(model)
    optimizer = zeroamp.Bf16StatesAdamW(model.parameters())
    loss_fn = lambda output: output.float().mean()  # noqa: E731
    ledger.verify(model, batch(NAME, dist.get_rank()), loss_fn=loss_fn, optimizer=optimizer)
    return {row["optimizer"] for row in ledger.to_dict()["parameters"]}


def test_the_ledger_shows_the_dtype_and_verifies_it(ranks2):
    assert ranks2.run(_verified) == [{"bf16"}] * 2


@pytest.mark.parametrize(
    ("cfg", "text"),
    [
        ({"optimizer": {"type": "SGD"}, **BF16}, 'AdamW alone has, .* but optimizer.type is "SGD"'),
        ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}, **BF16}, "without amsgrad and foreach"),
        ({"data_types": {"optimizer_states_dtype": "fp16"}}, "optimizer_states_dtype"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": False}, **BF16}, 'is "bf16", but bf16.*is false'),
        (
            {"bf16": {"enabled": True, "bf16_optimizer_states": True}, "data_types": {KEY: "fp32"}},
            'is "fp32", but bf16.*is true',
        ),
    ],
)
def test_a_config_that_contradicts_it_is_an_error(cfg, text):
    with pytest.raises(zeroamp.ConfigError, match=text):
        zeroamp.policy_from_config(cfg)


def _other_optimizer():
    model = wrapped(NAME, config(3, **BF16))
    with pytest.raises(zeroamp.StepError, match=r"given a AdamW, .* Build a zeroamp.Bf16StatesAdamW"):
        zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters()))
    built = zeroamp.optimizer_from_config({"optimizer": {"type": "AdamW"}, **BF16}, model.parameters())
    zeroamp.TrainStep(model, built)


def test_another_optimizer_is_an_error_that_names_this_one(ranks2):
    ranks2.run(_other_optimizer)


def test_a_beta_with_which_second_moments_never_fall_is_warned_of(caplog):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with caplog.at_level(logging.WARNING, "zeroamp"):
        zeroamp.Bf16StatesAdamW([weight], betas=(0.9, 0.99))
        assert not caplog.records
        zeroamp.Bf16StatesAdamW([weight], betas=(0.9, 0.999))
    assert "second moments never fall" in caplog.text
