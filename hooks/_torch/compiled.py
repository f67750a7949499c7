"""Which modules `torch.compile` was asked to run from CUDA graphs.

Checked on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from torch import nn


def records_cuda_graphs(module: nn.Module) -> bool:
    """Return whether a module was compiled with inductor's CUDA graphs: its call, its forward or the module as a whole.

    As `mode="reduce-overhead"` and `mode="max-autotune"` do, `options={"triton.cudagraphs": True}`, and inductor's own
    setting at that time. Modules inside are not looked at. Another backend than inductor does not tell its settings.
    """
    # What `module.compile` sets, the class's or the instance's `forward`, and what `torch.compile(module)` returns.
    for compiled in (getattr(module, "_compiled_call_impl", None), module.forward, module):
        read = getattr(compiled, "get_compiler_config", None)
        config = read() if callable(read) else None
        if isinstance(config, dict) and config.get("triton.cudagraphs", False):
            return True
    return False
