"""Plans of a small model, for the tests of `plan_run` and of its page."""

import torch

import zeroamp
from tests.models.small import Llama
from tests.processes.training import config

TOKENS = 12
FULL = 1e-6
"""10^9 bytes of memory. Nothing fits into it, so that no batches are tried but one."""


def tokens(batch, seq):
    return torch.zeros(batch, seq, dtype=torch.long)


def plan(options=None, model=None, **more):
    with torch.device("meta"):
        model = model or Llama(tied=False)
    policy = zeroamp.policy_from_config(config(**{"stage": 3, "threshold": 0, **(options or {})}))
    return zeroamp.plan_run(
        model, policy, **{"world_size": 8, "batch": 2, "seq": TOKENS, "inputs": tokens, "gpu": FULL, **more}
    )
