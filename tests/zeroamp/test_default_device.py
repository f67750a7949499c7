"""Where a program calls `torch.set_default_device`, the library makes none of its own tensors there."""

import torch
import torch.distributed as dist

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.processes.training import config, policy


def _trained_and_saved(folder, stage):
    model, batches = build("llama_untied"), [batch("llama_untied", step * 2 + dist.get_rank()) for step in range(2)]
    torch.set_default_device("meta")  # a tensor on it cannot be read, and gloo cannot send it
    try:
        model = zeroamp.wrap_model(model, policy(config(stage, clip=0.5)))
        train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for inputs in batches:
            train.backward(loss_of(model, inputs))
            report = train.step()
        saved = {fqn: parameter.detach().clone() for fqn, parameter in model.named_parameters()}
        zeroamp.save_checkpoint(folder, model, train, async_=True)
        zeroamp.wait_for_save(model)
    finally:
        torch.set_default_device(None)
    zeroamp.load_checkpoint(folder, model, train)  # torch itself computes offsets of shards on the default device
    same = all(torch.equal(parameter, saved[fqn]) for fqn, parameter in model.named_parameters())
    return same, float(report.loss), float(report.grad_norm)


def test_a_run_does_not_use_the_default_device(ranks2, tmp_path):
    for stage in (0, 3):
        (same, loss, norm), other = ranks2.run(_trained_and_saved, tmp_path / str(stage), stage)
        assert (same, loss, norm) == other
        assert same
