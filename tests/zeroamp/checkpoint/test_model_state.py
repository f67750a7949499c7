"""Names in a checkpoint are the plain model's, whatever is compiled or checkpointed; modules' extra states go on."""

import functools
import logging
import re

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.filesystem import FileSystemReader

import zeroamp
from tests.measuring.logs import log_lines
from tests.processes.checkpoint_training import Case, Small, Training, error_of, full
from tests.processes.training import full_parameters, same_bits

NAMES = Small().state_dict().keys() - {"head.weight"}  # which is embed.weight


class Wrapped(Small):
    """With modules of torch's own around the blocks; `torch.compile(block)` makes one too."""

    def __init__(self):
        super().__init__()
        for index, block in enumerate(self.blocks):
            self.blocks[index] = checkpoint_wrapper(torch.compile(block, backend="eager"))


def _other_form(folder):
    """Load a plain model's checkpoint, save, and load that in a plain model."""
    plain = Training(Case()).run(0, 1)
    plain.save(f"{folder}/plain")
    other = Training(Case(build=Wrapped), seed=7)
    whole = torch.compile(other.model, backend="eager")
    zeroamp.load_checkpoint(f"{folder}/plain", whole, other.train)
    other.run(1, 2)
    path = zeroamp.save_checkpoint(f"{folder}/other", whole, other.train)
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    names = {key.removeprefix("model.") for key in stored if key.startswith("model.")}
    states = {key.removeprefix("optimizer.").rpartition(".")[0] for key in stored if key.startswith("optimizer.")}
    assert names == NAMES
    assert states <= NAMES
    assert len(states) == 12
    back = Training(Case(), seed=8)
    back.load(path)
    for one, another in zip(back.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(full(one), full(another))


def test_compiled_and_checkpointed_modules_have_plain_names(ranks2, tmp_path):
    ranks2.run(_other_form, str(tmp_path))


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


class Talkative(Counting):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "seen"] = torch.tensor(7)


class TwoCounters(Counting):
    def __init__(self):
        super().__init__()
        self.another = Counter(False)


def _extra_states(folder):
    calls = [dist.get_rank() + index for index in range(3)]
    for as_tensor in (True, False):
        saved = Training(Case(build=functools.partial(Counting, as_tensor))).run(0, 3)
        saved.save(folder)
        loaded = Training(Case(build=functools.partial(Counting, as_tensor, compiled=True)), seed=7)
        loaded.load(folder)
        assert saved.model.counted.calls == loaded.model.counted.calls == calls
    alone = Training(Case(build=Counting, group_size=1), seed=7)
    with log_lines(logging.INFO):
        alone.load(folder)
    assert alone.model.counted.calls == [0, 1, 2]  # of another number of ranks: the first rank's
    for build, words in (
        (Small, r"counted._extra_state \(checkpoint: an extra state, model: none\), counter._extra_state \("),
        (TwoCounters, r"another._extra_state \(checkpoint: none, model: an extra state\)\. "),
    ):
        assert re.search(words, error_of(Training(Case(build=build)).load, folder))
    for build, words in (
        (Unsaveable, r"get_extra_state\(\).*cannot be saved"),
        (Talkative, "seen .*state_dict.*get_extra_state"),
    ):
        assert re.search(words, error_of(Training(Case(build=build)).save, f"{folder}/none"))


def test_extra_states_of_modules_go_on_each_rank_with_its_own(ranks2, tmp_path):
    ranks2.run(_extra_states, str(tmp_path))


class _Named(nn.Module):
    """A parameter and a buffer with the name that torch gives to extra states."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Module()
        self.one.register_parameter("_extra_state", nn.Parameter(torch.randn(4)))
        self.other.register_buffer("_extra_state", torch.randn(3))

    def forward(self, x):
        return (self.one(x) * self.one._extra_state).square().mean() + 0 * self.other._extra_state.sum()


class _Merged(nn.Module):
    """Two weights whose names are one name without the parts that torch.compile inserts."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.one._orig_mod = nn.Linear(4, 4)

    def forward(self, x):
        return self.one._orig_mod(self.one(x)).square().mean()


def _named(folder):
    trains = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = zeroamp.wrap_model(_Named(), zeroamp.policy_from_config({"zero_optimization": {"stage": 3}}))
        trains.append(zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters())))
        trains[-1].backward(model(torch.ones(2, 4)))
        trains[-1].step()
    zeroamp.save_checkpoint(folder, trains[0].model, trains[0])
    zeroamp.load_checkpoint(folder, trains[1].model, trains[1])
    ours, theirs = (_tensors_of(train.model) for train in trains)
    merged = zeroamp.wrap_model(_Merged(), zeroamp.policy_from_config({"zero_optimization": {"stage": 3}}))
    train = zeroamp.TrainStep(merged, torch.optim.AdamW(merged.parameters()))
    return same_bits(ours, theirs), error_of(zeroamp.save_checkpoint, folder, merged, train)


def _tensors_of(model):
    return full_parameters(model) | {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_a_parameter_named_extra_state_is_loaded_and_merged_names_are_refused(ranks2, tmp_path):
    for differing, error in ranks2.run(_named, str(tmp_path)):
        assert differing == []
        assert "one._orig_mod cannot be saved or loaded: wrappers of torch insert" in error
