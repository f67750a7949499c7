"""Training goes on bit for bit: losses, norms, scales, parameters, buffers, optimizer and random states."""

import threading
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.small import batch, loss_of
from tests.oracles import one_process
from tests.processes.checkpoint_training import Case, Training, differences
from tests.processes.training import config, full_parameters, same_bits, wrapped
from tests.selection import slow_but
from zeroamp.checkpoint import save

DYNAMIC = {"dtype": "float16", "fp16": {"initial_scale_power": 12, "loss_scale_window": 3, "hysteresis": 2}}


def _resume(folder, case, uninterrupted=False):
    """Return what differs between a run that saves and goes on, and one that another start loads and goes on with."""
    first, second = case.steps
    saved = Training(case).run(0, first)
    saved.save(folder, extra={"at": first}, async_=case.async_)
    saved.run(first, first + second)
    zeroamp.wait_for_save(saved.model)
    after = saved.state()
    resumed = Training(case, seed=7).run(0, 1)  # other weights, states and random numbers: all must be replaced
    resumed.log.clear()
    extra = resumed.load(folder)
    resumed.run(first, first + second)
    found = differences(resumed.state(), after)
    if extra != {"at": first} or repr(resumed.log) != repr(saved.log[-len(resumed.log) :]):
        found.append("the log")
    if uninterrupted:
        never_saved = Training(case).run(0, first + second)
        if repr(never_saved.log) != repr(saved.log):  # repr, for a norm may be nan
            found.append("the log of the uninterrupted run")
        found += differences(never_saved.state(), after)
    return found, saved.log


def _resume_each(folder, cases):
    return {name: _resume(f"{folder}/{index}", case)[0] for index, (name, case) in enumerate(cases.items())}


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 3))
def test_ten_steps_and_ten_resumed_ones_are_twenty(ranks2, tmp_path, stage):
    options = {"accumulation": 2, "clip": 0.5, **DYNAMIC}
    case = Case(stage=stage, scheduler="cosine", options=options, overflow_at=(3, 7, 8, 12, 14), steps=(10, 10))
    for found, log in ranks2.run(_resume, str(tmp_path), case, True):
        assert found == []
        scales = [entry[2] for entry in log]
        skipped = [index for index, entry in enumerate(log) if entry[3]]
        assert skipped == [3, 7, 8, 12, 14]
        assert len(set(scales[:10])) > 1  # it moved before the save, and after it
        assert len(set(scales[10:])) > 1
        assert all(entry[1] > 0.5 for index, entry in enumerate(log[:3]))  # so that clipping acts


OPTIMIZER_CASES = {
    name: Case(optimizer=name, async_=index % 2 == 0)
    for index, name in enumerate(
        [
            "adam amsgrad",
            "momentum",
            "sgd",
            "two groups",
            "tensor lr",
            "fused",
            "averaged",
            "trainable only",
            "some only",
        ]
    )
}


@pytest.mark.slow
def test_every_kind_of_optimizer_state_goes_on(ranks2, tmp_path):
    for found in ranks2.run(_resume_each, str(tmp_path), OPTIMIZER_CASES):
        assert found == {name: [] for name in OPTIMIZER_CASES}


def zero(stage=3, **options):
    return {"zero_optimization": {"stage": stage, **options}}


CPU = {"device": "cpu"}
WAYS = {
    "lambda": Case(scheduler="lambda"),
    "one cycle": Case(scheduler="one cycle", async_=True),
    "sequential": Case(scheduler="sequential"),
    "tensor lr with a scheduler": Case(optimizer="tensor lr", scheduler="cosine"),
    "offload": Case(options=zero(offload_param=CPU, offload_optimizer=CPU), async_=True),
    "live": Case(options=zero(stage3_max_live_parameters=10**6), async_=True),
    "evaluation 1": Case(stage=1, evaluate_in=torch.no_grad),
    "evaluation 2": Case(stage=2, evaluate_in=torch.no_grad, async_=True),
    "evaluation with gradients 1": Case(stage=1, evaluate_in=nullcontext, async_=True),
    "evaluation with gradients 2": Case(stage=2, evaluate_in=nullcontext),  # parameters stay gathered after it
    "async 0": Case(stage=0, async_=True),
    "no autocast": Case(options={"dtype": None}),
    "fp16 mode": Case(options={"dtype": None, "fp16": {"enabled": True, "loss_scale": 64}}),
}


@pytest.mark.slow
def test_every_way_to_train_goes_on(ranks2, tmp_path):
    for found in ranks2.run(_resume_each, str(tmp_path), WAYS):
        assert found == {name: [] for name in WAYS}


@pytest.mark.parametrize("stage", slow_but([2, 3], 3))
def test_shards_and_replicas_go_on(ranks4, tmp_path, stage):
    for found, _ in ranks4.run(_resume, str(tmp_path), Case(stage=stage, mesh_shape=(2, 2), async_=stage == 3)):
        assert found == []


def _two_parts(folder, stage):
    """Four steps of a LLaMA, by two models that know of each other through the checkpoint alone."""
    losses = []
    for part in range(2):
        model = wrapped("llama_tied", config(stage, clip=0.5))
        train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))
        assert zeroamp.load_checkpoint(folder, model, train, missing_ok=True) == (part or None)
        for index in (2 * part, 2 * part + 1):
            loss = loss_of(model, batch("llama_tied", 2 * index + dist.get_rank()))
            losses.append([float(loss.detach())])
            train.backward(loss)
            train.step()
        zeroamp.save_checkpoint(folder, model, train, extra=part + 1)
    return losses, full_parameters(model), train.num_steps


@pytest.mark.parametrize("stage", slow_but([1, 3], 3))
def test_two_parts_are_what_one_process_does_in_one_go(ranks2, tmp_path, stage):
    losses, _, parameters = one_process.train("llama_tied", world_size=2, num_steps=4, clip=0.5)
    for rank, (our_losses, our_parameters, num_steps) in enumerate(ranks2.run(_two_parts, str(tmp_path), stage)):
        assert our_losses == [ranks[rank] for ranks in losses]
        assert same_bits(our_parameters, parameters) == []
        assert num_steps == 4


def _background(folder):
    """Train on while a save waits in the background; then load the model alone."""
    gate = threading.Event()
    write = save._Save._write
    save._Save._write = lambda self: gate.wait(60) and write(self)
    try:
        saved = Training(Case(scheduler="cosine")).run(0, 2)
        path = saved.save(folder, async_=True)
        state = saved.state()
        saved.run(2, 4)
        assert not path.exists()
        release = threading.Timer(0.2, gate.set)
        release.start()
        zeroamp.load_checkpoint(folder, saved.model)  # waits, and finds it
        release.join()
    finally:
        save._Save._write = write
    loaded = Training(Case(scheduler="cosine"), seed=7)
    loaded.load(folder)
    return differences(loaded.state(), state)


def test_a_save_in_the_background_holds_what_was_there_when_it_began(ranks2, tmp_path):
    assert ranks2.run(_background, str(tmp_path)) == [[], []]
