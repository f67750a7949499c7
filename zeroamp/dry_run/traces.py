"""Traces of one model at several batch sizes, each made once."""

import torch
from torch import nn

from zeroamp.dry_run.inputs import Arguments, InputFactory, arguments_for
from zeroamp.dry_run.repeats import trace_by_few
from zeroamp.dry_run.trace import LossFunction, Trace
from zeroamp.planning.plan import Plan
from zeroamp.policies.errors import ConfigError, ZeroAmpError, describe


class Traces:
    """Stages whose units and gather dtypes are the same share a trace: it holds nothing of the ranks."""

    def __init__(
        self,
        model: nn.Module,
        seq: int,
        *,
        device_type: str,
        inputs: InputFactory | None = None,
        loss_fn: LossFunction | None = None,
    ) -> None:
        self._model, self._seq, self._device_type = model, seq, device_type
        self._inputs, self._loss_fn = inputs, loss_fn
        self._made: dict[tuple[object, ...], Trace] = {}

    def arguments(self, batch: int) -> Arguments:
        """Return (args, kwargs) of the forward of a batch."""
        return arguments_for(self._model, batch, self._seq, self._inputs)

    def of(self, plan: Plan, batch: int, *, checkpointing: bool) -> Trace:
        """Return the trace of one micro-batch of `batch` samples.

        Raises:
            ConfigError: fake tensors cannot run the model, or there is no loss.
        """
        dtypes: tuple[tuple[str, torch.dtype], ...] = tuple((p.fqn, p.dtypes.param) for p in plan.params)
        key = (frozenset(dtypes), plan.units, tuple(plan.merged), batch, checkpointing)
        if key not in self._made:
            arguments = self.arguments(batch)
            try:
                self._made[key] = trace_by_few(
                    *(self._model, plan, arguments),
                    device_type=self._device_type,
                    checkpointing=checkpointing,
                    loss_fn=self._loss_fn,
                )
            except ZeroAmpError:
                raise
            # Whatever fake tensors make a forward raise: there is no one class for "this needs a value".
            except Exception as error:
                raise _cannot_trace(self._model, error) from error
        return self._made[key]


def _cannot_trace(model: nn.Module, error: Exception) -> ConfigError:
    message = (str(error).splitlines() or [""])[0]
    return ConfigError(
        describe(
            "model",
            f"a {type(model).__name__} whose forward or backward raises {type(error).__name__}: {message}",
            "a step that runs on tensors without values: neither its control flow nor its shapes depend on any",
            "Check the inputs. Of a model that routes by value, plan one that routes by a fixed rule.",
        )
    )
