"""Imported once by the server that the ranks are forked from, so that no rank imports it by itself."""

import contextlib
import gc
import importlib
import os

import zeroamp

PUBLIC = [getattr(zeroamp, name) for name in ("wrap_model", "TrainStep", "policy_from_config")]  # imported on first use
USED = ("torch._dynamo", "transformers.models.llama.modeling_llama")
"""Ranks import these by themselves otherwise, seconds each. None of them starts a thread, which a fork would lose."""
if "PYTEST_XDIST_WORKER" in os.environ:  # a run of one file seldom needs them
    for name in USED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)

gc.collect()
gc.freeze()  # the ranks share these pages: no collection of theirs is to write to them
