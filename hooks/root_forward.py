"""Runs the root's forward inside an ordered list of context managers.

| order | place | when | what |
|---|---|---|---|
| 1 | "report" | outermost, with gradients | a `RunReport` measures the time and counts tokens |
| 2 | "outer autocast" | every forward | the caller's autocast is checked; without gradients it caches no casts |
| 3 | "random state" | outermost, with gradients, training mode | `zeroamp.reproducible` seeds the generators |
| 4 | "autocast" | every forward | `torch.autocast` of the config is entered |
| 5 | "reshard" | outermost | when it ends: without gradients, all groups are resharded |
| 6 | "before unshard" | every forward | what FSDP2's all-gathers need is computed, such as scales of float8 weights |
| 7 | (FSDP2) | every forward | FSDP2 unshards the root, then the typed groups of the root unshard |
| 8 | (model) | every forward | the model's own forward |

The context managers of places 1 to 6 are entered in this order before FSDP2's hooks run. They are exited in the reverse
order after FSDP2's hooks, also if the forward raised. Methods given to `register_forward_method` run inside the same
list. A forward inside a forward (`generate` calls the model) is not outermost.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal, cast, get_args

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from zeroamp.hooks._torch.dispatch import untraced
from zeroamp.hooks._torch.fsdp import (
    PostForward,
    PreForward,
    forget_forwards,
    init_unsharded,
    recorded_forwards,
    release,
)
from zeroamp.hooks.unit_hooks import UnitHooks

ContextPlace = Literal["report", "outer autocast", "random state", "autocast", "reshard", "before unshard"]
PLACES: tuple[ContextPlace, ...] = get_args(ContextPlace)


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """The arguments of one call of the root's forward, or of a registered forward method."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_outermost: bool
    """Whether no other forward of the same root is running."""


ForwardContext = Callable[[ForwardCall], AbstractContextManager[Any] | None]
"""Returns the context manager in which one call runs, or None. If it raises, nothing has been unsharded yet."""


class _AbandonedError(Exception):
    """Thrown into context managers of forwards that ended without their hooks."""


@dataclass(slots=True)
class _OpenForward:
    """A running forward, and the context managers to exit when it ends."""

    handled_before: BaseException | None
    """The exception that was being handled when the forward began."""
    is_method: bool
    """Whether it is a registered method, and not a call of the root."""
    has_begun: bool = False
    """Whether the model's own code runs, after FSDP2 has unsharded the root."""
    entered: ExitStack = field(default_factory=ExitStack)
    """The context managers that were entered. Empty until all of them are."""

    def leave(self, error: BaseException | None) -> None:
        """Exit the context managers with the exception that ended the forward, or None."""
        if error is None:
            self.entered.close()
        else:
            self.entered.__exit__(type(error), error, error.__traceback__)


class RootForward:
    """The ordered list of context managers around the forward of one root."""

    def __init__(self) -> None:
        self._by_place: dict[ContextPlace, list[ForwardContext]] = {place: [] for place in PLACES}
        self._contexts: tuple[ForwardContext, ...] = ()
        self._open: list[_OpenForward] = []
        """One entry per running forward, outermost first."""
        self._output_hooks: list[Callable[[object], None]] = []
        self._change_output: Callable[[Any], Any] | None = None

    @property
    def depth(self) -> int:
        """The number of forwards that are running, one inside the other."""
        return len(self._open)

    @property
    def runs_model(self) -> bool:
        """Whether the model's own code runs in a forward, after FSDP2 has unsharded the root."""
        return bool(self._open) and self._open[-1].has_begun

    def add(self, place: ContextPlace, context: ForwardContext) -> None:
        """Run all later forwards inside `context`. Those of one place are entered in the order of their `add`."""
        self._by_place[place].append(context)
        self._sort()

    def remove(self, place: ContextPlace, context: ForwardContext) -> None:
        """Stop running forwards inside `context`."""
        self._by_place[place].remove(context)
        self._sort()

    def _sort(self) -> None:
        self._contexts = tuple(context for place in PLACES for context in self._by_place[place])

    def on_output(self, hook: Callable[[object], None]) -> None:
        """Call `hook` with the output of each forward, before FSDP2's own forward hook."""
        self._output_hooks.append(hook)

    def change_output(self, change: Callable[[Any], Any]) -> None:
        """Return `change(output)` from outermost forwards. The hooks of `on_output`, and FSDP2's, get its result."""
        self._change_output = change

    def add_hooks(self, root: nn.Module, hooks: UnitHooks) -> None:
        """Add the hooks on `root`. Call once."""
        hooks.add(root, "enter root", self._enter)
        hooks.add(root, "begin root", lambda _module, _args: self._begin())
        hooks.add(root, "see root's output", lambda _module, _args, output: self._see_output(output))
        hooks.add(root, "leave root", lambda _module, _args, _output: self._leave())

    def register_method(
        self,
        root: nn.Module,
        name: str,
        *,
        pre_forwards: Sequence[PreForward],
        groups: Sequence[tuple[PreForward, PostForward]],
    ) -> None:
        """Run `root.name(...)` as a forward: unsharded, and inside the same context managers.

        Extends FSDP2's `register_fsdp_forward_method` by typed groups and the context managers.

        Args:
            root: the wrapped model.
            name: of the method.
            pre_forwards: further forward pre-hooks of the root. They run before those of `groups`.
            groups: the forward hooks of the root's typed groups.
        """
        method = getattr(root, name)

        @wraps(method)
        def inside(*args: Any, **kwargs: Any) -> Any:
            for pre_forward in (*pre_forwards, *(before for before, _ in groups)):
                args, kwargs = pre_forward(root, args, kwargs)
            self._begin()
            output = method(*args, **kwargs)
            output = self._see_output(output)
            for _, post_forward in reversed(groups):
                output = post_forward(root, args, output)
            return output

        setattr(root, name, inside)
        register_fsdp_forward_method(root, name)
        registered = getattr(root, name)

        @wraps(method)
        def outside(*args: Any, **kwargs: Any) -> Any:
            depth = self.depth
            try:
                self._enter(root, args, kwargs, is_method=True)
                return registered(*args, **kwargs)
            finally:
                while self.depth > depth:  # a KeyboardInterrupt may have ended a call of the root, without its hooks
                    self._leave()

        setattr(root, name, outside)

    def reset(self) -> None:
        """Exit the context managers of forwards that a KeyboardInterrupt ended: it calls no hooks."""
        while self._open:
            with suppress(_AbandonedError):
                self._open.pop().leave(_AbandonedError())

    @untraced
    def _enter(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_method: bool = False
    ) -> None:
        if self._open and not self._open[-1].is_method and not _is_nested(root):
            self.reset()
        call = ForwardCall(args, kwargs, is_outermost=not self._open)
        # Appended before anything can raise, because torch calls `_leave` then too.
        self._open.append(forward := _OpenForward(sys.exception(), is_method))
        with ExitStack() as entered:
            for new_context in self._contexts:
                if (context := new_context(call)) is not None:
                    entered.enter_context(context)
            forward.entered = entered.pop_all()

    @untraced
    def _begin(self) -> None:
        if self._open:
            self._open[-1].has_begun = True

    @untraced
    def _leave(self) -> None:
        if self._open:
            forward, error = self._open.pop(), sys.exception()
            forward.leave(error if error is not forward.handled_before else None)

    @untraced
    def _see_output(self, output: Any) -> Any:
        if self._open:
            self._open[-1].has_begun = False
        if self._change_output is not None and self.depth == 1:
            output = self._change_output(output)
        for hook in self._output_hooks:
            hook(output)
        return output


def _is_nested(root: nn.Module) -> bool:
    """Return whether the call of `root` that begins runs inside another one, as in Lightning's `training_step`.

    Otherwise a KeyboardInterrupt has ended the other one without calling its hooks. Only the stack tells them apart. It
    is read only if a forward seems to be running.
    """
    frame, num_calls = inspect.currentframe(), 0
    while frame is not None:
        is_call = frame.f_code.co_name == "_call_impl" and frame.f_code.co_filename == nn.modules.module.__file__
        num_calls += is_call and frame.f_locals.get("self") is root
        frame = frame.f_back
    return num_calls > 1


def reshard_after_no_grad(root: nn.Module) -> ForwardContext:
    """Return a `ForwardContext` that reshards every group of `root` after an outermost forward with gradients off.

    At stages 0 to 2, and for the root at stage 3, FSDP2 retains unsharded parameters after a forward for the backward.
    A forward without gradients has no backward. If its unsharded parameters were retained, an optimizer step would
    update the shards, and the next forward would read the old unsharded values. An optimizer that is built at that
    moment would train the unsharded copies. All-gathers that were prefetched for a unit that did not run are discarded
    too: a later forward would use their old values. FSDP2's record of forwards is restored: the next backward would
    prefetch a group of the forward without gradients.

    Before a forward in `torch.inference_mode`, groups that were never unsharded are unsharded once outside of that
    mode. Call after all groups were made.
    """
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]

    @contextmanager
    def around() -> Iterator[None]:
        if torch.is_inference_mode_enabled():
            # FSDP2 would otherwise make its unsharded parameters as inference tensors, which cannot be trained later.
            with torch.inference_mode(False):
                init_unsharded(cast(FSDPModule, root))
        num_recorded = len(recorded_forwards(root))
        try:
            yield
        finally:
            if not torch.is_grad_enabled():
                for unit in units:
                    release(unit)
                forget_forwards(root, num_recorded)

    return lambda call: around() if call.is_outermost else None
