"""The oracle of overrides: one process, plain autocast, the dtypes of some modules written out. No zeroamp.

A module that computes in fp32 runs inside `torch.autocast(enabled=False)` and takes its floating inputs as fp32. A
parameter that is all-gathered in bf16 is a bf16 parameter while the model runs.
"""

import torch

from tests.oracles import one_process


def train(name, *, in_fp32=(), gathered_low=(), **options):
    """Return (losses[step][rank][micro], {fqn: parameter}).

    in_fp32: FQNs of modules. gathered_low: of parameters. options: of `one_process.train`.
    """

    def prepare(model):
        for fqn in in_fp32:
            _run_in_fp32(model.get_submodule(fqn))

    def loss_fn(model, inputs):
        low = {fqn: model.get_parameter(fqn).to(torch.bfloat16) for fqn in gathered_low}
        return torch.func.functional_call(model, low, (inputs,))

    losses, _, parameters = one_process.train(name, prepare=prepare, loss_fn=loss_fn, **options)
    return losses, parameters


def _run_in_fp32(module):
    forward = module.forward

    def in_fp32(x):
        with torch.autocast("cpu", enabled=False):
            return forward(x.float())

    module.forward = in_fp32
