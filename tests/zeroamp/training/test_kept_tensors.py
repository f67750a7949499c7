"""A loss of a tensor that a unit has kept trains as in one process, or raises an error that names the unit."""

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.side_channels import Keeping, build, noise
from tests.oracles import two_ranks
from tests.processes.ranks import RankError
from tests.processes.training import on_fsdp2_alone, plain_loop, same_bits

NUM_STEPS = 2


def _loss_of_kept(model, index):
    model(noise(index))
    return sum(block.kept.float().pow(2).mean() for block in model.blocks)


def _loss_of_both(model, index):
    output = model(noise(index))
    return output.float().pow(2).mean() + model.blocks[1].kept.float().pow(2).mean()


LOSSES = {"kept": _loss_of_kept, "both": _loss_of_both}


def _wrapped(stage):
    config = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": stage}}
    return zeroamp.wrap_model(build(Keeping), config)


def _sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=two_ranks.LEARNING_RATE)


def _plain_loop(model, loss_of):
    return plain_loop(model, loss_of, NUM_STEPS)


def _train_step(model, loss_of):
    train = zeroamp.TrainStep(model, _sgd(model))
    for step in range(NUM_STEPS):
        train.backward(loss_of(model, step * two_ranks.NUM_RANKS + dist.get_rank()))
        train.step()


def _errors():
    texts = {}
    for stage in range(4):
        loop = (_plain_loop, _train_step)[stage % 2]
        try:
            loop(_wrapped(stage), _loss_of_kept)
        except zeroamp.StepError as error:
            texts[loop.__name__, stage] = str(error)
    return texts


def test_a_loss_of_kept_tensors_alone_raises(ranks2):
    for texts in ranks2.run(_errors):
        assert len(texts) == 4
        for (loop, _), text in texts.items():
            assert text.startswith("SGD.step was" if loop == "_plain_loop" else "TrainStep.backward was")
            assert "the gradient of blocks.0.linear.weight was not reduced" in text


def _of_both():
    return {stage: _plain_loop(_wrapped(stage), _loss_of_both) for stage in (0, 3)}


def test_a_loss_of_a_kept_tensor_and_the_output_trains(ranks2):
    losses, parameters = two_ranks.train(build(Keeping), _loss_of_both, NUM_STEPS)
    for rank, by_stage in enumerate(ranks2.run(_of_both)):
        for stage, (own_losses, own_parameters) in by_stage.items():
            assert own_losses == losses[rank], stage
            assert same_bits(own_parameters, parameters) == [], stage


def _on_one_rank():
    _plain_loop(_wrapped(2), LOSSES["kept" if dist.get_rank() == 0 else "both"])


def test_a_rank_that_uses_kept_tensors_alone_raises(ranks2):
    with pytest.raises(RankError, match="the gradient of blocks.0.linear.weight was not reduced"):
        ranks2.run(_on_one_rank)


def _of_fsdp2():
    return _plain_loop(on_fsdp2_alone(build(Keeping)), _loss_of_kept)[1]


def test_fsdp2_alone_trains_nothing_of_kept_tensors(ranks2):
    before = {fqn: parameter.detach() for fqn, parameter in build(Keeping).named_parameters()}
    _, trained = two_ranks.train(build(Keeping), _loss_of_kept, NUM_STEPS, mode="fp32")
    assert len(same_bits(trained, before)) == 6, "weight and bias of each linear"
    for own in ranks2.run(_of_fsdp2):
        assert same_bits(own, before) == []
