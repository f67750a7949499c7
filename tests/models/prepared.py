"""The blocks of a small model compiled or checkpointed, before or after wrapping."""

from torch import nn
from torch.utils.checkpoint import checkpoint


def compile_blocks(model):
    """Compile each block without a graph break. aot_eager runs the captured graph with eager kernels: the bits stay."""
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")


def checkpoint_inside(model):
    """Recompute each block's own forward, inside of the unit's hooks."""
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)


class Checkpointed(nn.Module):
    """A block whose recompute runs its hooks too."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def checkpoint_outside(model):
    """Recompute each block around the unit's hooks, as transformers' checkpointing layers do."""
    for index, block in enumerate(model.blocks):
        model.blocks._modules[str(index)] = Checkpointed(block)
