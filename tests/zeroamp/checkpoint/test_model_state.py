"""Names in a checkpoint are the plain model's, whatever is compiled or checkpointed; modules' extra states go on."""

import functools
import logging
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.filesystem import FileSystemReader

import zeroamp
from tests.measuring.logs import log_lines
from tests.processes.checkpoint_training import Case, Small, Training, differences, error_of
from tests.processes.training import config, full_parameters

BLOCK = ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight")
NAMES = {
    "embed.weight",
    "frozen",
    "scale",
    *(
        f"blocks.{i}.{name}"
        for i in (0, 1)
        for name in ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight")
    ),
    "mean",
    "num_seen",
    "constant",
}


class Checkpointed(Small):
    def __init__(self):
        super().__init__()
        for index, block in enumerate(self.blocks):
            self.blocks[index] = checkpoint_wrapper(block)


class CompiledBlocks(Small):
    """As modules of torch's own around them, which is what `torch.compile(block)` makes."""

    def __init__(self):
        super().__init__()
        for index, block in enumerate(self.blocks):
            self.blocks[index] = torch.compile(block, backend="eager")


class CompiledInPlace(Small):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.compile(backend="eager")


class Both(Small):
    def __init__(self):
        super().__init__()
        for index, block in enumerate(self.blocks):
            self.blocks[index] = checkpoint_wrapper(torch.compile(block, backend="eager"))


WAYS = {"checkpointed": Checkpointed, "compiled": CompiledBlocks, "in place": CompiledInPlace, "both": Both}


def _other_forms(folder):
    found = {}
    plain = Training(Case()).run(0, 1)
    plain.save(f"{folder}/plain")
    for name, build in WAYS.items():
        other = Training(Case(build=build), seed=7)
        other.load(f"{folder}/plain")
        other.run(1, 2)
        path = other.save(f"{folder}/{name}")
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
        back = Training(Case(), seed=8)
        back.load(path)
        same = [torch.equal(p, q) for p, q in zip(_values(back.model), _values(other.model), strict=True)]
        names = {key.removeprefix("model.") for key in stored if key.startswith("model.")}
        states = {key.removeprefix("optimizer.").rpartition(".")[0] for key in stored if key.startswith("optimizer.")}
        found[name] = (names == NAMES, states <= NAMES and len(states) == 12, all(same))
    return found


def _values(model):
    return full_parameters(model).values()


def test_compiled_and_checkpointed_modules_have_plain_names(ranks2, tmp_path):
    for found in ranks2.run(_other_forms, str(tmp_path)):
        assert found == dict.fromkeys(WAYS, (True, True, True))


def _compiled_whole(folder):
    """The whole model compiled, after wrapping and before."""
    plain = Training(Case()).run(0, 1)
    plain.save(folder)
    state = plain.state()[0]
    results = []
    for wrap_first in (True, False):
        torch.manual_seed(7)
        policy = zeroamp.policy_from_config(config(3))
        if wrap_first:
            model = torch.compile(zeroamp.wrap_model(Small(), policy, None, {"Block"}), backend="eager")
        else:
            model = zeroamp.wrap_model(torch.compile(Small(), backend="eager"), policy, None, {"Block"})
        train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        zeroamp.load_checkpoint(folder, model, train)
        parameters = {name.removeprefix("_orig_mod."): value for name, value in full_parameters(model).items()}
        results.append([name for name, value in parameters.items() if not torch.equal(value, state[name])])
        path = zeroamp.save_checkpoint(f"{folder}/{wrap_first}", model, train)
        back = Training(Case(), seed=8)
        back.load(path)
        results.append([text for text in differences(back.state(), plain.state()) if not text.startswith("random")])
    return results


@pytest.mark.slow
def test_a_model_that_is_compiled_whole(ranks2, tmp_path):
    assert ranks2.run(_compiled_whole, str(tmp_path)) == [[[]] * 4] * 2


class Counter(nn.Module):
    """A module with a state that is no buffer: plain values, or one tensor of any length."""

    def __init__(self, as_tensor):
        super().__init__()
        self.as_tensor, self.calls = as_tensor, []

    def forward(self, x):
        self.calls.append(len(self.calls) + dist.get_rank())
        return x

    def get_extra_state(self):
        return torch.tensor(self.calls) if self.as_tensor else {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state.tolist() if self.as_tensor else list(state["calls"])


class Counting(Small):
    def __init__(self, as_tensor=False, compiled=False):
        super().__init__()
        counter = Counter(as_tensor)
        self.counter = torch.compile(counter, backend="eager") if compiled else counter
        self.counted = counter

    def forward(self, tokens):
        self.counted(torch.zeros(1))
        return super().forward(tokens)


class Unsaveable(Counting):
    def __init__(self):
        super().__init__()
        self.counted.get_extra_state = object


class TwoCounters(Counting):
    def __init__(self):
        super().__init__()
        self.another = Counter(False)


def _extra_states(folder):
    found = []
    for index, as_tensor in enumerate((False, True)):
        saved = Training(Case(build=functools.partial(Counting, as_tensor))).run(0, 3)
        saved.save(f"{folder}/{index}")
        loaded = Training(Case(build=functools.partial(Counting, as_tensor, compiled=True)), seed=7)
        loaded.load(f"{folder}/{index}")
        found.append((saved.model.counted.calls, loaded.model.counted.calls))
    alone = Training(Case(build=Counting, group_size=1), seed=7)
    with log_lines(logging.INFO):
        alone.load(f"{folder}/0")
    found.append(alone.model.counted.calls)
    for build in (Small, TwoCounters):
        found.append(error_of(Training(Case(build=build)).load, f"{folder}/0"))
    found.append(error_of(Training(Case(build=Unsaveable)).save, f"{folder}/none"))
    return found


def test_extra_states_of_modules_go_on_each_rank_with_its_own(ranks2, tmp_path):
    for rank, (plain, tensor, alone, missing, more, unsaveable) in enumerate(ranks2.run(_extra_states, str(tmp_path))):
        calls = [rank, rank + 1, rank + 2]
        assert plain == tensor == (calls, calls)
        assert alone == [0, 1, 2]  # of another number of ranks: the first rank's
        assert "counted._extra_state (checkpoint: an extra state, model: none), counter._extra_state (" in missing
        assert "another._extra_state (checkpoint: none, model: an extra state). " in more
        assert re.search(r"get_extra_state\(\).*cannot be saved", unsaveable)
