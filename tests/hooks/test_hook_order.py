"""The order in which FSDP2's hooks and zeroamp's see a unit, and the table of it in `unit_hooks.py`."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.models.small import batch, loss_of
from tests.processes.training import config, wrapped
from zeroamp.hooks import unit_hooks
from zeroamp.hooks.collectives.gradient_reduction import GroupReduceScatter
from zeroamp.hooks.unit_hooks import BEFORE_RESHARD, RESHARDED, SHARDED, UNSHARDED, UnitHooks

BEFORE = (*SHARDED, "(FSDP2)", *UNSHARDED)
AFTER = (*BEFORE_RESHARD, "return no view again", "(FSDP2)", *RESHARDED)


def _seen(module):
    return ("sharded" if isinstance(module.weight, DTensor) else "gathered"), module.weight.dtype


class _Recording(GroupReduceScatter):
    def __call__(self, *args, **kwargs):
        self.events.append("reduce-scatter")
        return super().__call__(*args, **kwargs)


def _observe():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    unit = model[0]
    fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    seen, events = {}, []
    unit.register_forward_pre_hook(lambda m, a: seen.__setitem__("pre, prepended", _seen(m)), prepend=True)
    unit.register_forward_pre_hook(lambda m, a: seen.__setitem__("pre, appended", _seen(m)))
    unit.register_forward_hook(lambda m, a, o: seen.__setitem__("post, prepended", _seen(m)), prepend=True)
    unit.register_forward_hook(lambda m, a, o: seen.__setitem__("post, appended", _seen(m)))
    comm = _Recording(
        communication_dtype=torch.bfloat16, reduce_dtype=torch.float32, collective="all_to_all", world_size=2
    )
    comm.events = events
    unit.set_custom_reduce_scatter(comm)
    unit.weight.register_post_accumulate_grad_hook(
        lambda p: events.append(("accumulated", isinstance(p.grad, DTensor), p.grad.dtype))
    )
    model(torch.ones(1, 4)).sum().backward()
    return seen, events


def test_hooks_see_the_parameters_in_this_order(ranks2):
    seen, events = ranks2.run(_observe)[0]
    assert seen == {
        "pre, prepended": ("sharded", torch.float32),
        "pre, appended": ("gathered", torch.bfloat16),
        "post, prepended": ("gathered", torch.bfloat16),
        "post, appended": ("sharded", torch.float32),
    }
    assert events == ["reduce-scatter", ("accumulated", True, torch.float32)]


def test_the_table_of_the_docstring_has_all_places_in_their_order():
    rows = [line.split("|")[2].strip() for line in unit_hooks.__doc__.splitlines() if line.startswith("| ")]
    assert [row.strip('"') for row in rows[1:]] == [*BEFORE, "(forward)", *AFTER]


def test_hooks_run_in_the_order_of_the_table_and_not_of_their_registration():
    module, hooks, log = nn.Linear(2, 2), UnitHooks(), []
    module.register_forward_pre_hook(lambda *_: log.append("(FSDP2)"))
    module.register_forward_hook(lambda *_: log.append("(FSDP2)"))
    for place in (*RESHARDED, *UNSHARDED[::-1], *BEFORE_RESHARD, *SHARDED[::-1]):
        for number in (1, 2):
            hooks.add(module, place, lambda *_, logged=f"{place} {number}": log.append(logged))
    hooks.register()
    module(torch.ones(2))

    def twice(places, order=(1, 2)):
        return [f"{place} {number}" for place in places for number in order]

    before = [*twice(SHARDED), "(FSDP2)", *twice(UNSHARDED)]
    assert log == [*before, *twice(BEFORE_RESHARD, (2, 1)), "(FSDP2)", *twice(RESHARDED)]


def _places(cfg):
    """Return {FQN: (places of the forward pre-hooks, places of the forward hooks)} of a wrapped model, by place."""
    registered, register = [], UnitHooks.register
    UnitHooks.register = lambda self: (registered.append(self), register(self))[1]
    try:
        model = wrapped("llama_untied", cfg)
    finally:
        UnitHooks.register = register
    (hooks,) = registered
    loss_of(model, batch("llama_untied", 0)).backward()

    def place_of(module, hook):
        found = [place for place, own in hooks._hooks.get(module, {}).items() if hook in own]
        others = {"_pre_forward": "(FSDP2)", "_post_forward": "(FSDP2)", "return_no_view": "return no view again"}
        return found[0] if found else others.get(hook.__name__, repr(hook))

    return {
        fqn: tuple([place_of(module, each) for each in each_kind.values()] for each_kind in _hooks_of(module))
        for fqn, module in model.named_modules()
        if any(_hooks_of(module))
    }


def _hooks_of(module):
    return module._forward_pre_hooks, module._forward_hooks


ROOT = {"enter root", "begin root", "see root's output", "leave root", "(FSDP2)"}
TYPED = {"unshard typed groups", "reshard typed groups"}
UNIT = {"(FSDP2)"}


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        (config(3), {"": ROOT | TYPED, "blocks.0": UNIT | {"refuse sharded"}, "blocks.0.qkv": {"refuse autocast off"}}),
        (config(2, threshold=0), {"": ROOT | TYPED, "blocks.0": UNIT | TYPED}),
        (
            {**config(3, dtype=None), "bf16": {"enabled": True}},
            {"": ROOT | {"cast inputs"}, "blocks.0": UNIT | {"cast inputs"}},
        ),
    ],
    ids=["autocast", "a group more in every unit", "bf16"],
)
def test_a_wrapped_model_has_the_hooks_of_the_table_and_no_others(ranks2, cfg, expected):
    found = ranks2.run(_places, cfg)[0]
    for before, after in found.values():
        assert before == sorted(before, key=BEFORE.index)
        assert after == sorted(after, key=AFTER.index)
    for fqn, places in expected.items():
        assert {place for kind in found[fqn] for place in kind} == places
