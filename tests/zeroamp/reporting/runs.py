"""What every rank runs in the tests of reports."""

import torch
import torch.distributed as dist

import zeroamp
from tests.models.small import batch, loss_of
from tests.processes.training import wrapped
from zeroamp.training.step import step_of

NAME = "llama_tied"


def train_step(cfg, lr=1e-2):
    model = wrapped(NAME, cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    return zeroamp.TrainStep(model, optimizer, scheduler)


def take_steps(train, num_steps, first=0):
    """Return the reports of the steps."""
    reports = []
    while len(reports) < num_steps:
        for micro in range(step_of(train).state.plan.policy.gradient_accumulation_steps):
            index = 100 * (first + len(reports)) + 10 * micro + dist.get_rank()
            train.backward(loss_of(train.model, batch(NAME, index)))
            report = train.step()
        reports.append(report)
    return reports
