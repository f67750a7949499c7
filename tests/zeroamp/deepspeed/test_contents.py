"""What the files say is checked before it is used: a value of another type or size is an error, naming the file."""

import copy

import pytest
import torch

from tests.zeroamp.deepspeed.cases import DATA, expected
from zeroamp import CheckpointError
from zeroamp.deepspeed import contents
from zeroamp.deepspeed.files import Entries, find_files, read_file

JUNK = [None, -1, "x", [], [3], {}, {"a": 3}, torch.zeros(2), [torch.zeros(0)], [{"a": torch.Size([2])}], [{}]]


def _keys(value, before=()):
    """The paths to everything inside of dicts and lists."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield (*before, key)
        yield from _keys(part, (*before, key))


def _changed(values, path, junk):
    changed = part = copy.copy(values)
    for key in path[:-1]:
        part[key] = copy.copy(part[key])
        part = part[key]
    part[path[-1]] = junk
    return changed


@pytest.mark.parametrize("case", ["stage1_bf16", "stage2_bf16", "stage3_autocast"])
def test_a_value_of_another_kind_is_an_error_that_names_the_file_or_does_no_harm(monkeypatch, case):
    files = find_files(DATA / case, None)
    originals = {path: read_file(path) for path in (*files.model, *files.optimizer)}
    num_refused = 0
    for damaged in (files.model[-1], files.optimizer[-1]):
        for path in _keys({key: value for key, value in originals[damaged].values.items() if key != "ds_config"}):
            for junk in JUNK:
                entries = Entries(str(damaged), _changed(originals[damaged].values, path, junk))
                monkeypatch.setattr(contents, "read_file", (originals | {damaged: entries}).get)
                try:
                    contents.read_contents(files)
                except CheckpointError:  # and nothing else
                    num_refused += 1
    assert num_refused > 100


def _with_step(case, change):
    """The numbers of steps that are read where `change` has edited the state of every rank's optimizer."""
    files = find_files(DATA / case, None)
    originals = {path: read_file(path) for path in (*files.model, *files.optimizer)}
    for path in files.optimizer:
        change(originals[path].values["optimizer_state_dict"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contents, "read_file", originals.get)
        return set(contents.read_contents(files).moments.steps.values())


def test_the_number_of_steps_may_stand_in_the_param_group():
    def as_fused_adam(optimizer):
        for group, state in zip(
            optimizer["base_optimizer_state"]["param_groups"],
            optimizer["base_optimizer_state"]["state"].values(),
            strict=True,
        ):
            group["step"] = 10 * int(state.pop("step"))

    def without(optimizer):
        for state in optimizer["base_optimizer_state"]["state"].values():
            del state["step"]

    def beside_the_states(optimizer):
        for state in optimizer["base_optimizer_state"]:
            del state["step"]
        optimizer["base_optimizer_state_step"] = 40

    assert _with_step("stage1_autocast", lambda _: None) == {3.0}
    assert _with_step("stage1_autocast", as_fused_adam) == {30.0}
    assert _with_step("stage2_bf16", beside_the_states) == {40.0}
    with pytest.raises(CheckpointError, match="step must be a number.*None"):
        _with_step("stage1_autocast", without)


def _compiled(value):
    """The value with every name as it would be if DeepSpeed had been given torch.compile(model)."""
    if isinstance(value, dict):
        return {f"_orig_mod.{key}": _compiled(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_compiled(part) for part in value]
    return f"_orig_mod.{value}" if isinstance(value, str) else value


@pytest.mark.parametrize("case", ["stage1_fp16", "stage3_fp16"])
def test_a_checkpoint_of_a_compiled_model_has_the_names_of_the_model(monkeypatch, case):
    files = find_files(DATA / case, None)
    plain = contents.read_contents(files)
    originals = {path: read_file(path) for path in (*files.model, *files.optimizer)}
    named = ("module", "buffer_names", "param_shapes", "shared_params", "frozen_param_shapes", "frozen_param_fragments")
    for path in files.model:
        originals[path].values.update({key: _compiled(originals[path].values[key]) for key in named})
    monkeypatch.setattr(contents, "read_file", originals.get)
    found = contents.read_contents(files)
    assert found.parameters.keys() == plain.parameters.keys()
    assert found.moments.tensors.keys() == plain.moments.tensors.keys()
    assert (found.aliases, set(found.buffers)) == (plain.aliases, set(plain.buffers))


def test_what_has_no_counterpart_is_listed(monkeypatch):
    files = find_files(DATA / "stage3_fp16", None)
    originals = {path: read_file(path) for path in (*files.model, *files.optimizer)}
    values = originals[files.model[0]].values
    values["module"]["norm._extra_state"] = {"scale": 1.0}
    values["data_sampler"] = {"step": 3}
    monkeypatch.setattr(contents, "read_file", originals.get)
    assert contents.read_contents(files).other_state == ["module state norm._extra_state", "data_sampler"]


def test_only_the_engines_own_keys_are_not_the_clients():
    for case in ("stage0_autocast", "stage3_fp16"):
        found = contents.read_contents(find_files(DATA / case, None))
        assert found.client_state == {"epoch": 1, "note": "of the client"}


def test_sub_groups_belong_to_the_param_group_that_they_were_split_from():
    found = contents.read_contents(find_files(DATA / "stage3_autocast", None))
    numbers = {name: found.moments.group_of[name] for name in expected("stage3_autocast", "fp32")}
    assert {name for name, number in numbers.items() if number == 0} == {
        name for name, tensor in expected("stage3_autocast", "fp32").items() if tensor.ndim > 1
    }
