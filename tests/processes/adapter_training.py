"""What every rank runs in the tests of adapters: zeroamp on a model of `tests.models.adapters`."""

import torch
import torch.distributed as dist

import zeroamp
from tests.models.adapters import loss_of, trained
from tests.processes.training import config


class AdapterTraining:
    """A wrapped model with adapters, its optimizer and its `TrainStep`."""

    def __init__(self, adapted, stage=3, *, ignored=lambda name, parameter: False, lr=1e-2, **keys):
        model = adapted.build()
        self.ignored = {name for name, parameter in model.named_parameters() if ignored(name, parameter)}
        ignored_params = {model.get_parameter(name) for name in self.ignored}
        policy = zeroamp.policy_from_config(config(stage, **keys))
        self.model = zeroamp.wrap_model(model, policy, ignored_params=ignored_params)
        optimizer = torch.optim.AdamW(trained(self.model).values(), lr=lr, weight_decay=0.1)
        self.train = zeroamp.TrainStep(self.model, optimizer)
        self.losses, self.norms = [], []

    def run(self, num_steps, first=0):
        """Train; `first` is the number of the first micro-batch over all ranks. Returns this object."""
        num_ranks = dist.get_world_size()
        for step in range(num_steps):
            loss = loss_of(self.model, first + step * num_ranks + dist.get_rank())
            self.losses.append(float(loss.detach()))
            self.train.backward(loss)
            for name, parameter in self.model.named_parameters():
                if name in self.ignored and parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= num_ranks
            self.norms.append(self.train.step().grad_norm)
        return self

    def parameters(self):
        """Whole trained parameters by name."""
        return {name: zeroamp.full_parameter(parameter) for name, parameter in trained(self.model).items()}

    def differences(self, oracle, first_step=0):
        """What differs from `train_in_one_process`, by name; [] if nothing does."""
        losses, norms, parameters, _ = oracle
        ours = self.parameters()
        found = [] if self.losses == [of_ranks[dist.get_rank()] for of_ranks in losses[first_step:]] else ["losses"]
        found += [] if self.norms == norms[first_step:] else ["norms"]
        assert ours.keys() == parameters.keys()
        return found + [name for name in ours if not torch.equal(ours[name], parameters[name])]
