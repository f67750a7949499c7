"""Imported once by the server that the ranks are forked from, so that no rank imports it by itself."""

import contextlib
import gc
import os

import zeroamp

PUBLIC = [getattr(zeroamp, name) for name in ("wrap_model", "TrainStep", "policy_from_config")]  # imported on first use
if "PYTEST_XDIST_WORKER" in os.environ:  # a run of one file seldom needs it
    with contextlib.suppress(ImportError):
        pass

gc.collect()
gc.freeze()  # the ranks share these pages: no collection of theirs is to write to them
