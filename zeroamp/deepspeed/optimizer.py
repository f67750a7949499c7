"""`ZeroOptimizer`: the second value of `initialize`, which reads the engine's optimizer and loss scale."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from zeroamp.deepspeed.refused import refusal, unknown

if TYPE_CHECKING:
    from zeroamp.deepspeed.engine import DeepSpeedEngine


class ZeroOptimizer(torch.optim.Optimizer):
    """The engine's optimizer, for reading and for schedulers. `engine.step()` steps it.

    Other attributes, such as `param_groups` and `state`, are those of the torch optimizer inside, `optimizer`.
    """

    _opt_called = True  # without it, a scheduler of torch warns that the optimizer was not stepped before it

    def __init__(self, engine: "DeepSpeedEngine", optimizer: torch.optim.Optimizer) -> None:
        # The base is not initialized: groups and state are those of the optimizer inside.
        self._engine = engine
        self.optimizer = optimizer
        """The torch optimizer inside. It holds sharded parameters."""

    @property
    def loss_scale(self) -> float:
        """The factor of the next loss, by loss scaling. 1 except in float16."""
        return self._engine.cur_scale

    cur_scale = loss_scale

    @property
    def overflow(self) -> bool:
        """Whether the last optimizer step was skipped, because a gradient was not finite."""
        report = self._engine.report
        return report is not None and report.skipped

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Raise UnsupportedError: the engine reduces, clips and unscales in its own step."""
        raise refusal("optimizer.step", "Call engine.step().")

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002
        """Call `engine.zero_grad`."""
        self._engine.zero_grad()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, on the same number of ranks."""
        self.optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "_engine"):  # before __init__, and while a pickle is read
            raise AttributeError(name)
        if hasattr(self.optimizer, name):
            return getattr(self.optimizer, name)
        raise unknown("The optimizer", name, (each for each in dir(type(self)) if not each.startswith("_")))
