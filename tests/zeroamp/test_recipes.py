"""The lines of docs/recipes.md do what it says."""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from tests.models.small import batch, build, loss_of
from tests.processes.training import SmallTraining, adamw, config, full_parameters, same_bits, wrapped

NAME = "llama_untied"


def _average():
    training = SmallTraining(config(3), adamw, name=NAME)
    model, parameters = training.model, list(training.model.parameters())
    average = [parameter.detach().clone() for parameter in parameters]
    expected = full_parameters(model)
    for index in range(2):
        training.step(index)
        torch._foreach_lerp_(average, [parameter.detach() for parameter in parameters], 0.25)
        full = full_parameters(model)
        expected = {fqn: value.lerp(full[fqn], 0.25) for fqn, value in expected.items()}
    trained = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter, mean in zip(parameters, average, strict=True):
            parameter.copy_(mean)
        averaged, loss = full_parameters(model), float(loss_of(model, batch(NAME, 9)))
        for parameter, value in zip(parameters, trained, strict=True):
            parameter.copy_(value)
    assert same_bits(full_parameters(model), full) == []
    plain = build(NAME)
    plain.load_state_dict(averaged)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert loss == float(loss_of(plain, batch(NAME, 9)))
    return same_bits(averaged, expected)


def test_an_average_of_shards_is_the_shard_of_the_average(ranks2):
    assert ranks2.run(_average) == [[], []]


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
