"""Refuses meshes on which libraries that deal batches to all ranks would train on wrong samples."""

from torch import nn

from zeroamp.policies.errors import WrapError
from zeroamp.wrapping.state import wrap_state


def refuse_shared_samples(model: nn.Module, library: str) -> None:
    """Raise WrapError for a wrapped model with a tensor or context axis, if a library deals the batches.

    The ranks of these axes need the same samples. A library that gives each rank a batch of its own is right on data
    and expert axes only.

    Args:
        model: that `wrap_model` returned.
        library: who deals the batches, as the subject of a sentence.
    """
    axes = wrap_state(model).axes
    if axes.num_data == axes.whole.size():
        return
    raise WrapError(
        f"{library} gives each of {axes.whole.size()} ranks samples of its own, but on the mesh of this model "
        f"({axes.describe()}) only {axes.num_data} ranks get different samples: those of a tensor or context axis need "
        "the same ones. Train it by zeroamp.TrainStep in a loop of your own, with "
        f"DistributedSampler(data, {axes.num_data}, the rank's number in the data axis)."
    )
