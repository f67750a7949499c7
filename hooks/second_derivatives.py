"""Second derivatives: backwards with `create_graph=True`, and the backward that differentiates their gradients.

FSDP2 ends the backward of a group when the gradient of its unit's input is known: it reduces the group's gradients and
frees the unsharded parameters. A backward with `create_graph=True` saves these parameters for the next backward, which
no hook of FSDP2 precedes: it would read freed memory. The next backward also adds to gradients of parameters after the
group was reduced. So while one is awaited, groups are neither reduced nor resharded, and its end does both.
"""

from collections.abc import Callable, Iterable

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from zeroamp.hooks._torch.dispatch import accumulates_in, at_end_of_backward, is_in_backward
from zeroamp.hooks._torch.fsdp import end_backward
from zeroamp.hooks.tensors import tensors_in
from zeroamp.policies.errors import StepError


class SecondDerivatives:
    """Allows second derivatives of a model at stage 0, and refuses them at other stages."""

    def __init__(self, root: FSDPModule, leaves: Callable[[], Iterable[torch.Tensor]], stage: int) -> None:
        """Take the root, a function that returns the leaves of autograd (unsharded parameters), and the ZeRO stage."""
        self._root = root
        self._leaves = leaves
        self._stage = stage
        self._handles: list[RemovableHandle] = []
        """Hooks on the leaves, while the backward that sets their gradients is awaited."""
        self._is_ending = False

    def watch(self, output: object) -> None:
        """Look for `create_graph=True` in backwards through an output of the model, before FSDP2's hooks run."""
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._check)  # type: ignore[no-untyped-call]

    def awaits_backward(self) -> bool:
        """Return whether a group must not be reduced or resharded now. Call when FSDP2 would end its backward.

        Raises:
            StepError: the running backward has `create_graph=True`, and the stage is not 0, or it sets `grad` of
                parameters.
        """
        if not self._handles and torch.is_grad_enabled() and is_in_backward():  # which create_graph alone enables
            self._begin()
        return bool(self._handles)

    def _check(self, _grad: torch.Tensor) -> None:
        self.awaits_backward()

    def _begin(self) -> None:
        if self._stage > 0:
            raise StepError(
                f"A gradient was computed with create_graph=True at ZeRO stage {self._stage}. Second derivatives read "
                "parameters that a sharded model has freed by then; they are supported at stage 0 only, which holds "
                'whole parameters: set "zero_optimization": {"stage": 0}, or leave create_graph out.'
            )
        leaves = [leaf for leaf in self._leaves() if leaf.requires_grad]
        if accumulates_in(leaves):
            raise StepError(
                "backward() was called with create_graph=True, but a parameter's gradient is averaged over the ranks "
                "and cannot be differentiated again. Call torch.autograd.grad(loss, inputs, create_graph=True), whose "
                "inputs may be list(model.parameters()) after the forward, and add the penalty to the loss."
            )
        for leaf in leaves:
            self._handles.append(leaf.register_post_accumulate_grad_hook(self._on_gradient))  # type: ignore[no-untyped-call]

    def _on_gradient(self, _leaf: torch.Tensor) -> None:
        if not self._is_ending:
            self._is_ending = True
            at_end_of_backward(self._end)

    def _end(self) -> None:
        """Let FSDP2 end the backward of all groups, which may have done so already, with no effect."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._is_ending = [], False
        end_backward(self._root)
