"""The lines of docs/recipes.md do what it says."""

import copy

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.processes.ranks import Ranks
from tests.processes.training import SmallTraining, adamw, config, full_parameters, same_bits, wrapped

NAME = "llama_untied"


def _average(folder):
    """Average uneven shards, evaluate and export the average, save it and resume it."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model = zeroamp.wrap_model(copy.deepcopy(plain), config(3, threshold=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parameters = dict(model.named_parameters())
    average = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    expected, inputs = full_parameters(model), torch.arange(20.0).view(4, 5)
    for _ in range(2):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        current = [parameter.detach() for parameter in parameters.values()]
        torch._foreach_lerp_(list(average.values()), current, 0.25)
        full = full_parameters(model)
        expected = {fqn: value.lerp(full[fqn], 0.25) for fqn, value in expected.items()}

    trained = [parameter.detach().clone() for parameter in parameters.values()]
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(average[name])
        averaged, output = full_parameters(model), model(inputs)
        zeroamp.export_hf(model, folder / "average_weights")
        for parameter, value in zip(parameters.values(), trained, strict=True):
            parameter.copy_(value)
    assert same_bits(full_parameters(model), full) == []
    plain.load_state_dict(averaged)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(output, plain(inputs).float())

    dcp.save(average, checkpoint_id=folder / "average")
    resumed = {name: torch.zeros_like(value) for name, value in average.items()}
    dcp.load(resumed, checkpoint_id=folder / "average")
    exported = load_file(folder / "average_weights" / "model.safetensors")
    found = averaged, exported, {name: value.full_tensor() for name, value in resumed.items()}
    return [same_bits(each, expected) for each in found]


def test_an_average_of_shards_is_the_shard_of_the_average(ranks2, tmp_path):
    """On 3 ranks, whose shards of 7 and of 3 rows are uneven, and on 2."""
    three = Ranks(3)
    try:
        for ranks in (ranks2, three):
            folder = tmp_path / str(ranks.world_size)
            assert ranks.run(_average, folder) == [[[]] * 3] * ranks.world_size
    finally:
        three.stop()


def _closure():
    model = wrapped(NAME, config(3))
    optimizer = torch.optim.LBFGS(model.parameters())
    inputs = batch(NAME, 0)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, inputs)
        loss.backward()
        return loss.detach()

    return float(optimizer.step(closure)), float(closure())


def test_lbfgs_trains_without_a_train_step(ranks2):
    for before, after in ranks2.run(_closure):
        assert before > 4
        assert after < 0.01


def _whole_state_dict(from_rank_0):
    training = SmallTraining(config(3), adamw, name=NAME)
    training.step()
    model = training.model
    values = build(NAME, seed=3).state_dict()
    given = values if dist.get_rank() == 0 or not from_rank_0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
    set_model_state_dict(model, dict(given), options=options)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return same_bits(full_parameters(model), values), dist.get_rank() == 0 and same_bits(whole, values)


def test_a_whole_state_dict_is_set_and_read(ranks2):
    for from_rank_0 in (False, True):
        assert ranks2.run(_whole_state_dict, from_rank_0) == [([], []), ([], False)]
