"""What every rank runs in the tests of adapters: zeroamp on a model of `tests.models.adapters`."""

import torch
import torch.distributed as dist

import zeroamp
from tests.models.adapters import loss_of, trained
from tests.processes.training import config, same_bits


class AdapterTraining:
    """A wrapped model with adapters, its optimizer and its `TrainStep`."""

    def __init__(self, adapted, stage=3, **keys):
        policy = zeroamp.policy_from_config(config(stage, **keys))
        self.model = zeroamp.wrap_model(adapted.build(), policy)
        optimizer = torch.optim.AdamW(trained(self.model).values(), lr=1e-2, weight_decay=0.1)
        self.train = zeroamp.TrainStep(self.model, optimizer)
        self.losses, self.norms = [], []

    def run(self, num_steps, first=0):
        """Train; `first` is the number of the first micro-batch over all ranks. Returns this object."""
        num_ranks = dist.get_world_size()
        for step in range(num_steps):
            loss = loss_of(self.model, first + step * num_ranks + dist.get_rank())
            self.losses.append(float(loss.detach()))
            self.train.backward(loss)
            self.norms.append(self.train.step().grad_norm)
        return self

    def parameters(self):
        """Whole trained parameters by name."""
        return {name: zeroamp.full_parameter(parameter) for name, parameter in trained(self.model).items()}

    def differences(self, oracle):
        """What differs from `train_in_one_process`, by name; [] if nothing does."""
        losses, norms, parameters, _ = oracle
        found = [] if self.losses == [of_ranks[dist.get_rank()] for of_ranks in losses] else ["losses"]
        found += [] if self.norms == norms else ["norms"]
        return found + same_bits(self.parameters(), parameters)
