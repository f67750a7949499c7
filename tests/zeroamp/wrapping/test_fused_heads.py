"""TRL's fused head: SFTTrainer's default loss patches the forward, which then reads `lm_head.weight` itself."""

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.families import NUM_RANKS, Family, loss_of
from tests.models.small import VOCAB, hf_llama
from tests.oracles import families as oracle
from tests.processes.training import config, full_parameters, same_bits

pytest.importorskip("trl", reason="the loss is TRL's")

pytestmark = pytest.mark.slow  # importing TRL takes most of the time

NUM_STEPS = 3
LR = 1e-2


def _patched():
    from trl.trainer import add_fused_lm_head

    model = hf_llama(tied=False).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))  # as SFTTrainer does for its default loss
    return model


def _inputs(index):
    tokens = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(index))
    return {"input_ids": tokens, "labels": tokens, "fused_lm_head": True}


def _train():
    cfg = config(3, threshold=1000, zeroamp={"own_units": False})  # the embedding and the head have 2,560 elements
    policy = zeroamp.policy_from_config(cfg).replace(lower_precision_safe_modules="auto")
    model = zeroamp.wrap_model(_patched(), policy, example_inputs=_inputs(0))
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1))
    losses = []
    for index in range(NUM_STEPS):
        loss = loss_of(model, _inputs(NUM_RANKS * index + dist.get_rank()))
        losses.append(float(loss.detach()))
        step.backward(loss)
        step.step()
    return losses, full_parameters(model)


def test_without_own_units_the_fused_head_has_the_bits_of_one_process(ranks2):
    expected = oracle.train(Family(build=_patched, batch=_inputs), num_steps=NUM_STEPS, lr=LR)
    for rank, (losses, parameters) in enumerate(ranks2.run(_train)):
        assert losses == expected.losses[rank]
        assert same_bits(parameters, expected.parameters) == []
