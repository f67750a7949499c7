"""TRL's fused head: SFTTrainer's default loss patches the forward, which then reads `lm_head.weight` itself."""

import pytest
import torch

import zeroamp
from tests.models.small import VOCAB, hf_llama
from tests.processes.training import config, full_parameters, same_bits

pytest.importorskip("trl", reason="the loss is TRL's")

pytestmark = pytest.mark.slow  # importing TRL takes most of the time

NUM_STEPS = 3
LARGE = 1000  # elements: the embedding and the head have 2,560


def _patched():
    from trl.trainer import add_fused_lm_head

    model = hf_llama(tied=False).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))  # as SFTTrainer does for its default loss
    return model


def _inputs(index):
    tokens = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(index))
    return {"input_ids": tokens, "labels": tokens, "fused_lm_head": True}


def _optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _train_on_ranks():
    model = _patched()
    cfg = config(3, threshold=LARGE, zeroamp={"own_units": False})
    policy = zeroamp.policy_from_config(cfg).replace(lower_precision_safe_modules="auto")
    zeroamp.wrap_model(model, policy, example_inputs=_inputs(0))
    train = zeroamp.TrainStep(model, _optimizer(model))
    rank = torch.distributed.get_rank()
    losses = []
    for step in range(NUM_STEPS):
        loss = model(**_inputs(2 * step + rank)).loss
        losses.append(float(loss.detach()))
        train.backward(loss)
        train.step()
    return losses, full_parameters(model)


def _train_in_one_process():
    model = _patched()
    optimizer = _optimizer(model)
    losses = []
    for step in range(NUM_STEPS):
        gradients = []
        for rank in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**_inputs(2 * step + rank)).loss
            losses.append(float(loss.detach()))
            gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        for parameter, *both in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = (both[0] + both[1]) / 2
        optimizer.step()
    return losses, {fqn: parameter.detach() for fqn, parameter in model.named_parameters()}


def test_without_own_units_the_fused_head_has_the_bits_of_one_process(ranks2):
    losses, parameters = _train_in_one_process()
    for rank, (ours, trained) in enumerate(ranks2.run(_train_on_ranks)):
        assert ours == losses[rank::2]
        assert same_bits(trained, parameters) == []
