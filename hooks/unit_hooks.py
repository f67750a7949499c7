"""Registers zeroamp's hooks on the modules of a model: FSDP units, the root, and modules inside of units.

The forward of a module runs through this list, whatever the order in which its hooks were added:

| order | place | on | what |
|---|---|---|---|
| 1 | "refuse sharded" | modules that users may call | raises a WrapError if the module's parameters are sharded |
| 2 | "enter root" | the root | enters the context managers of `zeroamp.hooks.root_forward` |
| 3 | (FSDP2) | units | unshards the unit's own group |
| 4 | "take root's inputs" | the root, on accelerators | hands on the caller's lists and dicts, which FSDP2 copied |
| 5 | "cast inputs" | units, in modes bf16 and fp16 | casts floating-point inputs |
| 6 | "unshard typed groups" | units with group holders | unshards the groups of the holders |
| 7 | "begin root" | the root | records that the model's own code begins |
| 8 | "refuse autocast off" | safe modules | raises a PrecisionError if autocast is off |
| 9 | (forward) | modules | the module's own forward, wrapped for fp32 regions and float8 |
| 10 | "see root's output" | the root | casts the output to fp32 and hooks its tensors, before FSDP2 does |
| 11 | "return no view" | embeddings and heads | an output that is a view is no view any more: FSDP2 warns of views |
| 12 | "reshard typed groups" | units with group holders | reshards the groups of the holders, the last one first |
| 13 | "return no view again" | embeddings and heads | the same, after the hooks of `parallelize_module` |
| 14 | (FSDP2) | units | reshards the unit's own group |
| 15 | "end loans" | units | takes aliases and casts out of the lists and dicts of the caller, also after an error |
| 16 | "leave root" | the root | exits the context managers, also if the forward raised |

FSDP2's hooks are registered by `fully_shard`. Place 13 is registered before them, all others after. Hooks that a user
registers run at the places where torch puts them. After `wrap_model`: `prepend=True` before place 1 or 10, else after
place 8 or 16. Before `wrap_model`, as `parallelize_module` does: between places 2 and 3, and between 12 and 13.
`zeroamp.Profile` labels forwards there too.
Most places are thin: their functions are in the files that say why a hook is needed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal

import torch
from torch import nn

from zeroamp.hooks._torch.dispatch import without_base

HookPlace = Literal[
    "refuse sharded",
    "enter root",
    "take root's inputs",
    "cast inputs",
    "unshard typed groups",
    "begin root",
    "refuse autocast off",
    "see root's output",
    "return no view",
    "reshard typed groups",
    "end loans",
    "leave root",
]

Hook = Callable[..., Any]
"""A forward pre-hook of (module, args, kwargs) or (module, args), or a forward hook of (module, args, output)."""

SHARDED: tuple[HookPlace, ...] = ("refuse sharded", "enter root")
"""The places before FSDP2's pre-forward hook, in their order."""
UNSHARDED: tuple[HookPlace, ...] = (
    "take root's inputs",
    "cast inputs",
    "unshard typed groups",
    "begin root",
    "refuse autocast off",
)
"""The places between FSDP2's pre-forward hook and the forward."""
BEFORE_RESHARD: tuple[HookPlace, ...] = ("see root's output", "return no view", "reshard typed groups")
"""The places between the forward and "return no view again"."""
RESHARDED: tuple[HookPlace, ...] = ("end loans", "leave root")
"""The places after FSDP2's forward hook."""

WITH_KWARGS = ("enter root", "take root's inputs", "cast inputs", "unshard typed groups")
"""The places whose hooks take the keyword arguments of the forward too."""


@dataclass(slots=True)
class UnitHooks:
    """The hooks of one model, by module and place. Add all of them, then register them once."""

    _hooks: dict[nn.Module, dict[HookPlace, list[Hook]]] = field(default_factory=dict)

    def add(self, module: nn.Module, place: HookPlace, hook: Hook) -> None:
        """Run `hook` at a place of the table. Hooks of one place run in the order of their `add`.

        At "reshard typed groups" they run in the reverse order, as the groups of nested units would.
        """
        self._hooks.setdefault(module, {}).setdefault(place, []).append(hook)

    def register(self) -> None:
        """Register all hooks. Call once, after `fully_shard` of all units."""
        for module, hooks in self._hooks.items():
            _register(module, hooks)


def _register(module: nn.Module, hooks: dict[HookPlace, list[Hook]]) -> None:
    def at(places: Iterable[HookPlace]) -> list[tuple[HookPlace, Hook]]:
        return [(place, hook) for place in places for hook in hooks.get(place, ())]

    for place, hook in reversed(at(SHARDED)):  # the last one that is prepended runs first
        module.register_forward_pre_hook(hook, prepend=True, with_kwargs=place in WITH_KWARGS)
    for place, hook in at(UNSHARDED):
        module.register_forward_pre_hook(hook, prepend=False, with_kwargs=place in WITH_KWARGS)
    for _, hook in at(reversed(BEFORE_RESHARD)):  # so the group that was added last is resharded first
        module.register_forward_hook(hook, prepend=True)
    for _, hook in at(RESHARDED):
        module.register_forward_hook(hook, prepend=False, always_call=True)


def return_no_views(modules: Iterable[nn.Module]) -> None:
    """Register the place "return no view again" on embeddings and heads.

    Call right before `fully_shard`: FSDP2's hook must see the output after this one, and this one after the hooks of
    `parallelize_module`, which may return views.
    """
    for module in modules:
        module.register_forward_hook(return_no_view)


def return_no_view(_module: nn.Module, _args: object, output: object) -> object:
    """Return the output of a Linear with a bias, a view of a matrix, as no view. A hook after a forward."""
    return without_base(output) if isinstance(output, torch.Tensor) else output


def wrap_forward(module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace `module.forward` by `wrap(module.forward)`: place 9 of the table.

    The forward itself is wrapped, not hooked: a `with` inside a function can be compiled into one graph. A context that
    one hook enters and another exits cannot.
    """
    forward = module.forward
    module.forward = wraps(forward)(wrap(forward))
