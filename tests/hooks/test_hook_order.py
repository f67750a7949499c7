"""The order in which FSDP2's hooks and zeroamp's run around a unit: that of the table in `unit_hooks.py`."""

import torch
from torch import nn

from zeroamp.hooks.unit_hooks import BEFORE_RESHARD, RESHARDED, SHARDED, UNSHARDED, UnitHooks


def test_hooks_run_in_the_order_of_the_table():
    """Hooks run in the order of the table and not of their registration."""
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
