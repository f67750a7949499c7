"""Checks of a step with tensor parallelism: the optimizer, and gradients of parameters that each rank holds whole.

[Note: Gradients of copies]
Tensor parallelism distributes some parameters. Each rank of the tensor axis has a copy of the others, and the copies
stay equal only if their gradients are equal. A module that sees only a part of the heads, or of the sequence, computes
a partial gradient on each rank. These are added only if the plan of `parallelize_module` has a style for the module
(SequenceParallel, for example). So the step's all-reduce has two more fp64 numbers. Let n be the number of ranks in the
axis, and q the squared norm of a rank's gradients of copies. The first rank sends (n - 1) q, every other rank -q: the
sum is 0 if all q are equal. The second number is q / n. The step fails if the first sum is larger than `TOLERANCE`
times the second. Kernels that are not deterministic round differently; partial gradients differ by much more.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.dtensor import split_dim
from zeroamp.planning.mesh import device_of
from zeroamp.planning.mesh_axes import MeshAxes
from zeroamp.policies.errors import StepError, some_of
from zeroamp.training.norm_and_clip import local_sum_of_squares
from zeroamp.training.update import kind_of
from zeroamp.wrapping.optimizer_hooks import full_name

TOLERANCE = 1e-3


class GradientsOfCopies:
    """Compares the gradients in each optimizer step of a model with a tensor axis: see [Note: Gradients of copies]."""

    def __init__(self, axes: MeshAxes, axis: DeviceMesh, named: Callable[[], dict[str, nn.Parameter]]) -> None:
        """`axis` is the tensor axis. `named` returns the model's sharded parameters by name."""
        self._axes, self._axis = axes, axis
        self._named = named
        self._is_copy: dict[nn.Parameter, bool] = {}
        self._device = device_of(axes.fsdp)

    def statistics(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """Return this rank's two numbers, as one 1-D fp64 tensor.

        `parameters` must have gradients. Leave out `ignored_params`, whose gradients may differ between ranks.
        """
        copies = [parameter for parameter in parameters if self._holds_copy(parameter)]
        squares = local_sum_of_squares(copies, self._device)
        size = self._axis.size()
        return [torch.stack([squares * (size - 1 if self._axis.get_local_rank() == 0 else -1), squares / size])]

    def _holds_copy(self, parameter: nn.Parameter) -> bool:
        if parameter not in self._is_copy:
            self._is_copy[parameter] = not is_split(parameter, self._axes)
        return self._is_copy[parameter]

    def compare(self, sums: Sequence[float]) -> None:
        """Compare the two sums over ranks.

        Raises:
            StepError: on all ranks, if the copies' gradients differ.
        """
        difference, squares = sums
        if abs(difference) > TOLERANCE * squares:
            names = [fqn for fqn, parameter in self._named().items() if self._holds_copy(parameter)]
            raise StepError(
                "The ranks of the tensor axis have different gradients of parameters that each of them holds whole "
                f"({some_of(names, 4)}): one of these is used on a part of the heads or of the sequence, and its "
                "partial gradients are not added. Give its module a style in the plan of parallelize_module, such as "
                "SequenceParallel, and pass the same samples to all ranks of the axis."
            )


def is_split(parameter: torch.Tensor, axes: MeshAxes) -> bool:
    """Return whether a parameter is distributed over the tensor axis."""
    if not isinstance(parameter, DTensor) or axes.tensor is None:
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    own = (axes.tensor.mesh_dim_names or ("",))[0]
    return any(
        name == own and split_dim(kind) is not None for name, kind in zip(names, parameter.placements, strict=True)
    )


def refuse_on_two_axes(optimizer: torch.optim.Optimizer, *, on_shards: bool) -> None:
    """Raise StepError for an optimizer that is not updated on shards, with tensor or expert parallelism."""
    if kind_of(optimizer, on_shards=on_shards) != "shards":
        raise StepError(
            f"TrainStep was given {full_name(optimizer)}, which is not updated on plain shards. With tensor or expert "
            "parallelism that is not supported, because parameters are DTensors on meshes of one axis and of two. "
            "Use torch.optim.AdamW or another of docs/optimizers.md that is updated on shards, or pass on_shards=True "
            "if the optimizer is element-wise."
        )
