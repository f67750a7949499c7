"""Counts how many of the library's files and functions an optimizer step passes: python -m tests.measuring.walks

The model has three blocks, on two ranks at stage 2. Steps that warm up are not counted. The forward is counted apart;
"plain loop" and "TrainStep" are backward and update.
"""

import sys
from collections import Counter
from functools import partial

import torch
from torch import nn

import zeroamp
from tests.measuring.counted import OURS
from tests.processes.ranks import Ranks
from tests.processes.training import config

NUM_WARM_UP = 3
WIDTH = 32


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs):
        return inputs + self.down(nn.functional.relu(self.up(inputs)))


def _calls(run):
    """Return what `run` returns, and (file, function) -> how often it calls this function of the library."""
    found = Counter()

    def count(frame, event, _argument):
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            found[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    try:
        return run(), found
    finally:
        sys.setprofile(None)


def _walks(stage):
    """Return the calls of this rank in one step: name of the part -> (file, function) -> number."""
    found = {}
    for name in ("plain loop", "TrainStep"):
        torch.manual_seed(0)
        model = nn.Sequential(*(_Block() for _ in range(3)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))
        model = zeroamp.wrap_model(model, zeroamp.policy_from_config(config(stage)), auto_wrap_policy={"_Block"})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train = zeroamp.TrainStep(model, optimizer) if name == "TrainStep" else None
        inputs = torch.ones(4, WIDTH)

        def update(loss, optimizer=optimizer, train=train):
            if train is None:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                train.backward(loss)
                train.step()

        for _ in range(NUM_WARM_UP):
            update(model(inputs).square().mean())
        output, found["forward"] = _calls(partial(model, inputs))
        _, found[name] = _calls(partial(update, output.square().mean()))
    return found


def walks(stage=2):
    """Return "forward", "plain loop" and "TrainStep" -> file -> calls of its functions by the first rank in a step."""
    ranks = Ranks(2)
    try:
        found = ranks.run(_walks, stage)[0]
    finally:
        ranks.stop()
    by_file = {name: Counter() for name in found}
    for name, calls in found.items():
        for (file, _), number in calls.items():
            by_file[name][next(file.removeprefix(f"{each}/") for each in OURS if file.startswith(each))] += number
    return by_file


if __name__ == "__main__":
    for name, calls in walks().items():
        print(f"{name}: {len(calls)} files, {calls.total()} calls")
        for file, number in calls.most_common():
            print(f"{number:6} {file}")
