"""`export_hf` and `iter_weights` of `PipelineStep.model` have what the whole model, wrapped without a pipeline, has."""

import errno
import json
import os
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import zeroamp
from tests.models import pipelines as models
from tests.models.small import hf_llama
from tests.processes import pipelines
from tests.processes.parallel_training import mesh_of
from tests.processes.training import full_parameters
from tests.zeroamp.pipelines.comparison import DATA, needs
from zeroamp.weights import files, layouts

INDEX = "model.safetensors.index.json"
SEVERAL = 8_000
"""Bytes of a file, so that an export has several."""


def _with_state(model):
    """Add a buffer, and a frozen parameter, to each block."""
    for name, block in model.blocks.items():
        block.register_buffer("seen", torch.full((), int(name)))
        block.up.bias.requires_grad_(False)
    return model


def _trained(schedule, stage, *, tied=False):
    """The parts of this rank after a step, by their numbers, and their `PipelineStep`."""
    made = []

    def loss_fn(parts):
        made.append(zeroamp.PipelineStep(list(parts.values()), _optimizer(list(parts.values()))))
        return made[0].wrap_loss(models.loss_of)

    def edit(parts, _mesh):
        for part in parts.values():
            _with_state(part)

    cfg = {"zero_optimization": {"stage": stage}}
    mesh, parts, run = pipelines.start(schedule, cfg, DATA, tied=tied, edit=edit, loss_fn=loss_fn)
    pipelines.run_step(run, schedule, parts, mesh, 0)
    last = pipelines.num_parts(schedule) - 1
    if tied and {0, last} <= parts.keys():
        zeroamp.sum_tied_gradients(parts[0].embed.weight, parts[last].head.weight)
    elif tied and (weight := pipelines.tied_weight(parts, last)) is not None:
        zeroamp.sum_tied_gradients(weight, 1 if 0 in parts else 0, mesh["pp"].get_group())
    made[0].step()
    return parts, made[0]


def _optimizer(modules):
    parameters = [each for module in modules for each in module.parameters() if each.requires_grad]
    return torch.optim.AdamW(parameters, lr=1e-2)


def _exported(schedule, stage, folder):
    """Export the parts and the whole model, which loads their checkpoint. Return what both yield."""
    _, train = _trained(schedule, stage)
    checkpoint = zeroamp.save_checkpoint(f"{folder}/checkpoint", train.model, train)
    whole = zeroamp.wrap_model(_with_state(models.decoder()), {"zero_optimization": {"stage": stage}})
    zeroamp.load_checkpoint(checkpoint, whole)
    found = []
    for name, model in (("parts", train.model), ("whole", whole)):
        zeroamp.export_hf(model, f"{folder}/{name}", "bf16")
        zeroamp.export_hf(model, f"{folder}/{name}-fp32", max_shard_bytes=SEVERAL)
        options = {"bucket_bytes": 5_000, "names": "model"}
        found.append([list(zeroamp.iter_weights(model, None, to=to, **options)) for to in ("all", "first")])
    return found


def _is_same(ours, theirs):
    return [name for name, _ in ours] == [name for name, _ in theirs] and all(
        torch.equal(a, b) and a.dtype == b.dtype for (_, a), (_, b) in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize(("schedule", "stage"), [("Interleaved1F1B", 0), ("ZBVZeroBubble", 3)])
def test_all_parts_are_exported_as_the_whole_model(ranks4, tmp_path, schedule, stage):
    needs(schedule)
    for rank, (ours, whole) in enumerate(ranks4.run(_exported, schedule, stage, str(tmp_path))):
        assert len(whole[0]) == len(models.decoder().state_dict()) + models.NUM_BLOCKS
        assert _is_same(ours[0], whole[0])
        assert _is_same(ours[1], whole[0] if rank == 0 else [])
    single = [tmp_path / name / "model.safetensors" for name in ("parts", "whole")]
    assert single[0].read_bytes() == single[1].read_bytes()
    ours, whole = (tmp_path / f"{name}-fp32" for name in ("parts", "whole"))
    assert sorted(os.listdir(ours)) == sorted(os.listdir(whole))
    indexes = [json.loads((each / INDEX).read_text()) for each in (ours, whole)]
    assert indexes[0]["weight_map"] == indexes[1]["weight_map"]
    assert len(set(indexes[0]["weight_map"].values())) > 3
    for file in set(indexes[0]["weight_map"].values()):
        assert _is_same(sorted(load_file(ours / file).items()), sorted(load_file(whole / file).items()))


def _tied(schedule, folder):
    parts, train = _trained(schedule, 2, tied=True)
    zeroamp.export_hf(train.model, folder)
    names = [name for name, _ in zeroamp.iter_weights(train.model)]
    return {name: value for part in parts.values() for name, value in full_parameters(part).items()}, names


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_weight_of_two_stages_is_written_once(ranks4, tmp_path, schedule):
    """The file has the bytes of safetensors' own, of the state of one process. On a V one rank has both copies."""
    needs(schedule)
    of_ranks = ranks4.run(_tied, schedule, str(tmp_path / "out"))
    parameters = {name: value for of_rank, _ in of_ranks for name, value in of_rank.items()}
    assert torch.equal(parameters["head.weight"], parameters["embed.weight"])
    state = _with_state(models.decoder(tied=True)).state_dict()
    wanted = {name: parameters.get(name, value) for name, value in state.items() if name != "head.weight"}
    save_file(wanted, tmp_path / "wanted.safetensors", metadata={"format": "pt"})
    found = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert found == (tmp_path / "wanted.safetensors").read_bytes()
    assert [names for _, names in of_ranks] == [list(wanted)] * 4


def _llama_part(index, tied):
    model = hf_llama(tied)
    model.model.layers = nn.ModuleDict({str(index): model.model.layers[index]})
    if index == 0:
        model.model.norm = model.lm_head = None
    else:
        model.model.embed_tokens = None
    return model


def _llama(tied, axes, folder):
    mesh = mesh_of(**axes)
    own = [0, 1] if axes["pp"] == 1 else [mesh["pp"].get_local_rank()]
    parts = [zeroamp.wrap_model(_llama_part(index, tied), {}, mesh["dp"]) for index in own]
    train = zeroamp.PipelineStep(parts, _optimizer(parts))
    if tied and len(own) == 2:
        zeroamp.sum_tied_gradients(parts[1].lm_head.weight, parts[0].model.embed_tokens.weight)
    zeroamp.export_hf(train.model, f"{folder}/parts", "bf16")
    zeroamp.export_hf(zeroamp.wrap_model(hf_llama(tied), {}), f"{folder}/whole", "bf16")
    return [name for name, _ in zeroamp.iter_weights(train.model)]


@pytest.mark.parametrize(("tied", "axes"), [(True, DATA), (False, DATA), (True, {"pp": 1, "dp": 4})])
def test_parts_of_a_transformers_model_are_written_as_the_whole_one(ranks4, tmp_path, tied, axes):
    """The last case has both copies of the tied weight on each rank, and counts that of the head."""
    pytest.importorskip("transformers", reason="the model is transformers'")
    for names in ranks4.run(_llama, tied, axes, str(tmp_path)):
        assert ("lm_head.weight" in names) != tied
    ours, whole = tmp_path / "parts", tmp_path / "whole"
    assert sorted(os.listdir(ours)) == sorted(os.listdir(whole))
    for name in os.listdir(whole):
        assert (ours / name).read_bytes() == (whole / name).read_bytes(), name


def _copies_trained_apart():
    mesh = mesh_of(**DATA)
    part = zeroamp.wrap_model(_llama_part(mesh["pp"].get_local_rank(), True), {}, mesh["dp"])
    if mesh["pp"].get_local_rank() == 1:
        with torch.no_grad():
            part.lm_head.weight.add_(1.0)
    train = zeroamp.PipelineStep([part], _optimizer([part]))
    with pytest.raises(zeroamp.CheckpointError, match="copies of the tied weight model.embed_tokens.weight with diff"):
        next(zeroamp.iter_weights(train.model))


def test_copies_that_were_trained_apart_are_an_error_on_all_ranks(ranks4):
    pytest.importorskip("transformers", reason="the model is transformers'")
    ranks4.run(_copies_trained_apart)


def _not_exported(how, folder):
    """The text of the error of an export that fails, on this rank."""
    mesh = mesh_of(**DATA)
    index, rank = mesh["pp"].get_local_rank(), torch.distributed.get_rank()
    part = models.part(index, 2)
    if how == "a name twice" and index == 1:
        part.blocks = nn.ModuleDict({str(int(name) - 1): block for name, block in part.blocks.items()})
    part = zeroamp.wrap_model(part, {}, mesh["dp"])
    train = zeroamp.PipelineStep([part], _optimizer([part]))
    is_full = how == "the disk is full" and rank == 0
    fails = how == "a rank of the second stage fails" and rank == 3
    with torch.no_grad():
        if how == "a value is too large" and rank == 2:
            next(part.parameters()).to_local().fill_(1e6)
    with (
        mock.patch.object(files, "sync_to_disk", side_effect=_no_space if is_full else files.sync_to_disk),
        mock.patch("zeroamp.weights.stages.publish", side_effect=_no_memory if fails else layouts.publish),
        pytest.raises(zeroamp.CheckpointError) as caught,
    ):
        zeroamp.export_hf(train.model, folder, "fp16")
    return str(caught.value)


def _no_space(_path):
    raise OSError(errno.ENOSPC, "No space left on device")


def _no_memory(*_args):
    raise RuntimeError("no memory left")


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("a value is too large", "has a value of magnitude 1e+06"),
        ("a name twice", "Two stages have a parameter blocks.1.norm.weight"),
        ("a rank of the second stage fails", "no memory left"),
        ("the disk is full", "No space left on device"),
    ],
)
def test_one_ranks_error_is_raised_on_all_and_old_weights_stay(ranks4, tmp_path, how, text):
    save_file({"old": torch.ones(1)}, tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    for found in ranks4.run(_not_exported, how, str(tmp_path)):
        assert text in found
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


def _read_halfway():
    """Call what would change weights between two items of `iter_weights`. Return how many weights are read then."""
    mesh = mesh_of(**DATA)
    index = mesh["pp"].get_local_rank()
    part = zeroamp.wrap_model(models.part(index, 2), {}, mesh["dp"])
    train = zeroamp.PipelineStep([part], optimizer := _optimizer([part]))
    iterator = zeroamp.iter_weights(train.model, bucket_bytes=1000)
    next(iterator)
    calls = (
        lambda: next(zeroamp.iter_weights(part)),
        lambda: next(zeroamp.iter_weights(train.model)),
        lambda: zeroamp.save_checkpoint("nowhere", train.model, train),
        lambda: part.load_state_dict(part.state_dict()),
        optimizer.step,
    )
    for call in calls:
        with pytest.raises((zeroamp.StepError, zeroamp.WrapError), match="is being read by iter_weights"):
            call()
    iterator.close()
    num = len(list(zeroamp.iter_weights(train.model)))
    return num, len(list(zeroamp.iter_weights(part))) < num


def test_weights_that_are_read_stay_as_they_are(ranks4):
    assert ranks4.run(_read_halfway) == [(len(models.decoder().state_dict()), True)] * 4
