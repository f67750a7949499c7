"""Refuses meshes on which libraries that deal batches to all ranks would train on wrong samples."""

from torch import nn

from zeroamp.policies.errors import WrapError
from zeroamp.wrapping.state import wrap_state


def refuse_shared_samples(model: nn.Module, library: str, num_ranks: int) -> None:
    """Raise WrapError for a wrapped model if a library deals the batches to other ranks than those that need them.

    The ranks of a tensor or context axis need the same samples. A library that gives each rank a batch of its own is
    right on data and expert axes only. accelerate counts one rank if it finds no accelerator and was not told to use
    the CPU.

    Args:
        model: that `wrap_model` returned.
        library: who deals the batches, as the subject of a sentence.
        num_ranks: the ranks to which it deals them.
    """
    axes = wrap_state(model).axes
    if axes.num_data < axes.whole.size():
        raise WrapError(
            f"{library} gives each of {axes.whole.size()} ranks samples of its own, but on the mesh of this model "
            f"({axes.describe()}) only {axes.num_data} ranks get different samples: those of a tensor or context axis "
            "need the same ones. Train it by zeroamp.TrainStep in a loop of your own, with "
            f"DistributedSampler(data, {axes.num_data}, the rank's number in the data axis)."
        )
    if num_ranks < axes.num_data:
        raise WrapError(
            f"{library} deals samples to {num_ranks} of the {axes.num_data} ranks of this model, so each of them would "
            "train on all data. Start the script with torchrun. Without a GPU, pass cpu=True to ZeroampAccelerator, or "
            "use_cpu=True to TrainingArguments."
        )
