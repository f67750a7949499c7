"""0-D parameters: replicated on every rank, reduced in the step's all-reduce, saved and exported in their own shape."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.oracles import one_process
from tests.processes.ranks import RankError
from tests.processes.training import SmallTraining, adamw, check_runs, config, policy, same_bits, train, wrapped
from tests.selection import slow_but

NUM_STEPS = 2
CLIP = 0.05  # low enough that every step clips


def scalar(model):
    """One 0-D parameter at the root, one that two units own, a frozen one, one in bf16, and one that is never used."""
    model.scale = nn.Parameter(torch.tensor(0.5))
    model.temperature = nn.Parameter(torch.tensor(1.25), requires_grad=False)
    model.unused = nn.Parameter(torch.tensor(3.0))
    for stage in model.stages:
        stage.register_forward_hook(_scaled)
        stage.gain = model.stages[0].gain if stage is not model.stages[0] else nn.Parameter(torch.tensor(1.5))


def _scaled(stage, _args, output):
    return output * stage.gain


class _Foreach(torch.optim.AdamW):
    """Of another class than AdamW, so that it always steps on DTensors, and by foreach kernels."""


def _foreach(named):
    return _Foreach(named.values(), lr=1e-2, foreach=True)


def _runs(stages, options, mesh_shape, make_optimizer):
    more = {"prepare_before": scalar, "mesh_shape": mesh_shape, "make_optimizer": make_optimizer}
    return [train("conv", config(stage, clip=CLIP, **options), NUM_STEPS, **more) for stage in stages]


FP16 = {"dtype": "float16", "fp16": {"loss_scale": 4}}
CASES = {
    "all stages": ((0, 1, 2, 3), {}, {}),
    "fp32": ((3,), {"dtype": None}, {"autocast": None}),
    "micro-batches are summed before ranks": ((1,), {"accumulation": 3}, {"accumulation": 3}),
    "a loss scale is taken out": ((3,), FP16, {"autocast": torch.float16, "loss_scale": 4.0}),
    "a foreach optimizer steps both kinds": ((3,), {}, {"make_optimizers": lambda named: [_foreach(named)]}),
    "replicas and shards count once in the norm": ((3,), {}, {"world_size": 4, "num_replicas": 2}),
}


@pytest.mark.parametrize("name", slow_but(CASES, *(CASES.keys() - {"fp32"})))
def test_they_train_as_in_one_process(request, name):
    stages, options, more = CASES[name]
    oracle = {"world_size": 2, "num_steps": NUM_STEPS, "clip": CLIP, "prepare": scalar, **more}
    losses, norms, parameters = one_process.train("conv", **oracle)
    assert parameters["scale"] != 0.5
    assert parameters["stages.0.gain"] != 1.5
    # The oracle gives zeros to an unused parameter, which weight decay then moves; here it has no gradient.
    parameters.pop("unused")
    mesh_shape = (2, 2) if oracle["world_size"] == 4 else None
    make_optimizer = _foreach if "make_optimizers" in more else None
    ranks = request.getfixturevalue(f"ranks{oracle['world_size']}")
    by_rank = ranks.run(_runs, stages, options, mesh_shape, make_optimizer)
    for run in itertools.chain(*by_rank):
        assert run.parameters.pop("unused") == 3.0
        if mesh_shape is not None:
            # The fp64 sum over four ranks is in another order.
            assert run.norms == pytest.approx(norms, rel=1e-5)
            for fqn in ("scale", "stages.0.gain"):
                torch.testing.assert_close(run.parameters[fqn], parameters[fqn])
    if mesh_shape is None:
        check_runs(by_rank, (losses, norms, parameters))


def _training(stage, make_optimizer=adamw, **more):
    return SmallTraining(config(stage), make_optimizer, name="conv", prepare_before=scalar, **more)


def _used_by_one_rank():
    training = _training(3, partial(torch.optim.SGD, lr=1.0))
    model, step = training.model, training.train
    loss = loss_of(model, batch("conv", 0))
    step.backward(loss + model.unused * 3.0 if dist.get_rank() == 1 else loss)
    step.clip_grad_norm()
    gradient = model.unused.grad
    step.update()
    return gradient, model.unused.detach().clone(), model.temperature.grad


def test_a_rank_that_did_not_use_it_gets_the_mean(ranks2):
    for gradient, after, of_frozen in ranks2.run(_used_by_one_rank):
        assert gradient == 1.5
        assert after == 1.5
        assert of_frozen is None


def _plain_backward():
    model = wrapped("conv", config(3), prepare_before=scalar)
    loss_of(model, batch("conv", 0)).backward()


def test_a_backward_without_a_train_step_is_refused(ranks2):
    with pytest.raises(RankError, match="StepError: .*the model has the 0-D parameter scale.*TrainStep"):
        ranks2.run(_plain_backward)


def _saved_or_loaded(folder, stage, loads=None):
    """Train a step, and save or load; return the parameters then, and after one more step."""
    training = _training(stage)
    model, step = training.model, training.train

    def advance(index):
        training.step(index)
        return training.parameters()

    advance(0 if loads is None else 9)
    if loads is None:
        zeroamp.save_checkpoint(folder / "checkpoint", model, step)
        zeroamp.export_hf(model, folder / "files")
    else:
        zeroamp.load_checkpoint(folder / loads, model, step)
    return training.parameters(), advance(1)


def _loaded_on_replicas(folder):
    """Return the parameters after a checkpoint, and after files of weights, on replicas of shards."""
    training, found = _training(2, mesh_shape=(2, 2)), []
    for load in (
        lambda: zeroamp.load_checkpoint(folder / "checkpoint", training.model, training.train),
        lambda: zeroamp.load_hf(training.model, folder / "files"),
    ):
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.mul_(2.0)
        load()
        found.append(training.parameters())
    return found


def test_a_run_goes_on_from_a_checkpoint_with_more_ranks(ranks2, ranks4, tmp_path):
    """A run goes on from a checkpoint also with more ranks and files have its own shape."""
    saved, expected = ranks2.run(_saved_or_loaded, tmp_path, 3)[0]
    assert saved["scale"].shape == ()
    for now, after in ranks2.run(_saved_or_loaded, tmp_path, 0, "checkpoint"):
        assert same_bits(now, saved) == []
        assert same_bits(after, expected) == []
    for of_rank in ranks4.run(_loaded_on_replicas, tmp_path):
        assert [same_bits(now, saved) for now in of_rank] == [[], []]


class WithGain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.empty((), dtype=torch.bfloat16))

    def reset_parameters(self):
        nn.init.normal_(self.gain)


def _meta():
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model = nn.Sequential(WithGain(), WithGain())
    model = zeroamp.wrap_model(model, policy(config(3)))
    return [(p.shape, p.dtype, p.device.type, p.detach().clone()) for p in (model[0].gain, model[1].gain)]


def test_meta_models_get_the_same_values_on_all_ranks(ranks2):
    first, second = ranks2.run(_meta)
    assert first == second
    assert all(part[:3] == ((), torch.float32, "cpu") for part in first)
    assert first[0] != first[1]


def _ledger():
    """The ledger, its verification, and the bytes that a step sent outside of the groups."""
    training = _training(2)
    ledger = zeroamp.explain(training.model)
    verification = ledger.verify(training.model, batch("conv", 0))
    training.backward()
    traffic = zeroamp.traffic(training.model)
    traffic.reset()
    training.train.step()
    return ledger.to_dict(), str(verification), [n for key, n in traffic.num_bytes.items() if key.group == "step"]


def test_the_ledger_lists_and_verifies_it(ranks2):
    ledger, verification, num_bytes = ranks2.run(_ledger)[0]
    rows = {row["parameter"]: row for row in ledger["parameters"] if row["group"] == "replicated"}
    assert list(rows) == ["scale", "temperature", "unused", "stages.0.gain"]
    dtypes = [rows["scale"][name] for name in ("compute", "gradient", "communication", "optimizer")]
    assert dtypes == ["per op", "fp32", "fp64", "fp32"]
    assert rows["temperature"]["gradient"] is None
    assert rows["stages.0.gain"]["aliases"] == ["stages.1.gain"]
    assert "replicated" in verification
    planned = [row["bytes"] for row in ledger["traffic"] if row["group"] == "step"]
    # Loss, norm, a hash, one number for each sharded parameter, and two for each 0-D one.
    num_sharded = len(list(build("conv").parameters())) - 1  # without `scale`, which is 0-D here
    assert planned == num_bytes == [(3 + num_sharded + 2 * 4) * 8]
