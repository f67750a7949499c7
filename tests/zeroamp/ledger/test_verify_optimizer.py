"""`Ledger.verify(optimizer=)`: the dtypes of the user's own optimizer state, and an optimizer that stays as it is."""

import copy
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.small import batch
from tests.processes.training import config, errors_of, wrapped
from zeroamp.hooks.tensors import tensors_in

NAME = "matrices"


class _In64Bits(torch.optim.SGD):
    """SGD whose momentum is in fp64."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].double()


class _ByPosition(torch.optim.SGD):
    """SGD whose momentum is in fp64, except that of the first parameter: settings by position, as in bitsandbytes."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"][1:]:
            if parameter in self.state:
                self.state[parameter]["momentum_buffer"] = self.state[parameter]["momentum_buffer"].double()


class _Wrapper(torch.optim.Optimizer):
    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.inner = optimizer


def _eight_bits(parameters):
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, min_8bit_size=1)


MAKERS = {
    "AdamW": torch.optim.AdamW,
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "fp64": lambda parameters: _In64Bits(parameters, lr=0.1, momentum=0.9),
    "by position": lambda parameters: _ByPosition(parameters, lr=0.1, momentum=0.9),
    "bf16": zeroamp.Bf16StatesAdamW,
    "Adafactor": torch.optim.Adafactor,
    "8 bits": _eight_bits,
}


def _as_it_is(optimizer, model):
    """All that an optimizer has, copied, and the bits of the model."""
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    own = {name: value for name, value in vars(optimizer).items() if name != "mng"}  # of the process, in bitsandbytes
    attributes = copy.deepcopy(own, dict(parameters))
    state = attributes.pop("state"), attributes.pop("param_groups")
    plain = {name: value for name, value in attributes.items() if isinstance(value, int | float | str | dict | list)}
    return str(plain), [tensor.detach().clone() for tensor in tensors_in(state)], str(state[1])


def _verified(model, optimizer):
    return zeroamp.explain(model).verify(
        model, batch(NAME, dist.get_rank()), loss_fn=lambda output: output.float().mean(), optimizer=optimizer
    )


def _states(verification):
    return {each for group in verification.to_dict()["groups"] for each in group["observed"]["optimizer"]}


def _observed(name, options):
    """Verify before the first update and after it. Return what was seen, or the error, and whether all is as before."""
    model = wrapped(NAME, config(2, **options))
    optimizer = MAKERS[name](list(model.parameters()))
    found = []
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # replaces `step` of the instance
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for _ in range(2):
        before = _as_it_is(optimizer, model)

        def verify():
            loss_fn = lambda output: output.float().square().mean()  # noqa: E731
            seen = zeroamp.explain(model).verify(
                model, batch(NAME, dist.get_rank()), loss_fn=loss_fn, optimizer=optimizer
            )
            return {each for group in seen.to_dict()["groups"] for each in group["observed"]["optimizer"]}, seen.title()

        try:
            dtypes, text = verify()
        except zeroamp.PrecisionError as error:
            dtypes, text = None, str(error)
        after = _as_it_is(optimizer, model)
        same = before[::2] == after[::2] and all(map(torch.equal, before[1], after[1]))
        found.append((dtypes, text, same and not calls))
        if name in ("8 bits", "Adafactor"):
            break  # they step in `TrainStep` only
        model(batch(NAME, 0)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        calls.clear()
    return found


BF16 = {"data_types": {"optimizer_states_dtype": "bf16"}}
CASES = [
    ("AdamW", {}, {"fp32"}),
    ("AdamW, fused", {}, {"fp32"}),
    ("SGD", {}, {"none"}),
    ("SGD, momentum", {}, {"fp32"}),
    ("fp64", {}, "optimizer must be fp32, but is fp64 \\(_In64Bits's momentum_buffer\\)"),
    ("by position", {}, "optimizer must be fp32, but is fp64 \\(_ByPosition's momentum_buffer\\)"),
    ("bf16", {}, "optimizer must be fp32, but is bf16 .*optimizer_states_dtype"),
    ("bf16", BF16, {"bf16"}),
    ("AdamW", BF16, "optimizer must be bf16, but is fp32"),
    ("Adafactor", {}, {"fp32"}),
    ("8 bits", {}, "optimizer must be fp32, but is uint8 \\(AdamW8bit's state1\\)"),
]


@pytest.mark.parametrize(("name", "options", "expected"), CASES, ids=[f"{name}, {o}" for name, o, _ in CASES])
def test_the_column_optimizer_is_that_of_the_given_optimizer(ranks2, name, options, expected):
    if name == "8 bits":
        pytest.importorskip("bitsandbytes")
    for found in ranks2.run(_observed, name, options):
        for dtypes, text, is_unchanged in found:
            assert is_unchanged
            if isinstance(expected, str):
                assert dtypes is None
                assert re.search(expected, text), text
            else:
                assert dtypes == expected
                assert text.endswith("every dtype is the expected one")


def _without():
    model = wrapped(NAME, config(2))
    seen = _verified(model, None)
    wrong = {
        "other": torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1),
        "wrapper": _Wrapper(torch.optim.SGD(model.parameters(), lr=0.1)),
        "type": [model],
    }
    errors = errors_of({name: partial(_verified, model, value) for name, value in wrong.items()})
    return str(seen), _states(seen), errors


def test_without_an_optimizer_the_column_is_not_observed(ranks2):
    for text, observed, errors in ranks2.run(_without):
        assert observed == set()
        assert "optimizer state was not observed" in " ".join(text.split())
        assert "without parameters of the model" in errors["other"]
        assert "which wraps another optimizer" in errors["wrapper"]
        assert "must be an optimizer or a list" in errors["type"]
