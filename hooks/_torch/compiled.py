"""Which modules were compiled with CUDA graphs (`torch.compile`).

Checked on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from torch import nn


def records_cuda_graphs(module: nn.Module) -> bool:
    """Return whether `torch.compile` with CUDA graphs was applied to the module, its `forward` or its call.

    These modes and options of `torch.compile` use CUDA graphs: `mode="reduce-overhead"`, `mode="max-autotune"`,
    `options={"triton.cudagraphs": True}`, and inductor's own setting at the time of the compilation. Modules inside
    are not checked. Only inductor exposes its settings: with another backend the result is False.
    """
    # What `module.compile` sets, the class's or the instance's `forward`, and what `torch.compile(module)` returns.
    for compiled in (getattr(module, "_compiled_call_impl", None), module.forward, module):
        read = getattr(compiled, "get_compiler_config", None)
        config = read() if callable(read) else None
        if isinstance(config, dict) and config.get("triton.cudagraphs", False):
            return True
    return False
