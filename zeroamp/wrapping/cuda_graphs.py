"""Raises errors for CUDA graphs that contain sharded parameters.

[Note: Why no CUDA graphs]
A CUDA graph reads and writes the addresses with which it was recorded. FSDP2 allocates the memory of unsharded
parameters at each all-gather and frees it at each reshard, so the addresses change. Inductor (`mode="reduce-overhead"`)
detects new addresses in each call, and records the graph again or copies the parameters. A graph that the caller
captures (`torch.cuda.graph`) would read memory that other tensors use by then. A module without parameters, such as a
loss, may be compiled with CUDA graphs.
"""

from collections.abc import Collection

import torch
from torch import nn

from zeroamp.hooks._torch.compiled import records_cuda_graphs
from zeroamp.hooks.root_forward import Around, ForwardCall
from zeroamp.policies.errors import WrapError


def refuse_cuda_graphs(model: nn.Module, device_type: str, ignored: Collection[str] = ()) -> None:
    """Raise WrapError if a module with parameters was compiled with CUDA graphs. See [Note: Why no CUDA graphs].

    Args:
        model: any module, compiled or not.
        device_type: of the mesh. Inductor uses CUDA graphs on CUDA only: on other devices nothing is checked.
        ignored: FQNs of parameters that are not sharded.
    """
    if device_type != "cuda":
        return
    for fqn, module in model.named_modules():
        if not records_cuda_graphs(module):
            continue
        names = (f"{fqn}.{name}" if fqn else name for name, _ in module.named_parameters())
        if any(name not in ignored for name in names):
            raise WrapError(
                f"{fqn or 'The model'} was compiled with CUDA graphs (torch.compile with mode reduce-overhead or "
                "max-autotune, or the option triton.cudagraphs), but FSDP2 moves its parameters to other addresses in "
                'each step. Compile it without a mode, or with mode="max-autotune-no-cudagraphs".'
            )


def refuse_capture(model: nn.Module, ignored: Collection[str]) -> Around:
    """Return an `Around` that raises WrapError if a CUDA graph captures an outermost forward. For CUDA only.

    The first forward also searches for modules that were compiled with CUDA graphs after `wrap_model`. Later forwards
    only query the driver whether the current stream is being captured.
    """
    has_run = False

    def look(call: ForwardCall) -> None:
        nonlocal has_run
        if not call.is_outermost:
            return
        if torch.cuda.is_current_stream_capturing():
            raise WrapError(
                "The model's forward was captured by a CUDA graph, but FSDP2 moves parameters to other addresses in "
                "each step. Run it outside of torch.cuda.graph, and without torch.cuda.make_graphed_callables."
            )
        if not has_run:
            refuse_cuda_graphs(model, "cuda", ignored)
            has_run = True

    return look
