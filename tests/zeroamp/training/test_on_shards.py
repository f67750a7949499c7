"""`TrainStep(on_shards=True)`: optimizers that the caller calls element-wise; and optimizers that are refused."""

import re
from functools import partial

import pytest
import torch
from torch.distributed.tensor import DTensor

import zeroamp
from tests.processes.optimizers import CASES, NAME, Training
from tests.processes.training import SmallTraining, check_errors, config, errors_of, same_bits

EIGHT_BITS = "`bitsandbytes.optim.AdamW8bit`"


class Plain(torch.optim.Optimizer):
    """As kernels of other libraries need it: plain tensors with elements. Assigns data, and replaces its state."""

    def __init__(self, parameters, lr=1e-2):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        self.state["all"]["count"] = self.state["all"].get("count", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                assert type(parameter) is torch.nn.Parameter
                assert parameter.numel() > 0
                state = self.state[parameter]
                momentum = state.get("momentum", torch.zeros_like(parameter))
                state["momentum"] = momentum * 0.5 + parameter.grad
                state["is_used"] = torch.ones_like(parameter, dtype=torch.bool)
                state["step"] = state.get("step", 0) + 1
                parameter.data = parameter - group["lr"] * state["momentum"]


def _plain(stage):
    training = SmallTraining(config(stage), Plain, name=NAME, on_shards=True)
    for index in range(2):
        training.step(index)
    optimizer = training.optimizer
    assert optimizer.state.pop("all") == {"count": 2}
    parameters = dict(training.model.named_parameters())
    assert optimizer.state.keys() == set(parameters.values())
    for parameter, state in optimizer.state.items():
        for key in ("momentum", "is_used"):
            assert isinstance(state[key], DTensor)
            assert state[key].placements == parameter.placements
            assert state[key].shape == parameter.shape
        assert state["step"] == 2
    momentum = {fqn: optimizer.state[parameter]["momentum"].full_tensor() for fqn, parameter in parameters.items()}
    return training.parameters(), momentum


def test_shards_always_have_elements(ranks4):
    """Shards have elements also with fewer rows than ranks and state is sharded like the parameters."""
    (ours, momentum), (theirs, whole) = ranks4.run(_plain, 3)[0], ranks4.run(_plain, 0)[0]
    assert same_bits(ours, theirs) == []
    assert same_bits(momentum, whole) == []


def _two(parameters):
    return [torch.optim.AdamW(parameters[:1]), torch.optim.AdamW(parameters[1:])]


def _muon(parameters):
    return torch.optim.Muon([parameter for parameter in parameters if parameter.dim() == 2])


class OwnAdafactor(torch.optim.Adafactor):
    pass


REFUSED = {
    "not a bool": (_two, {"on_shards": 1}, r"on_shards=\) must be True, False.* each of the 2"),
    "too few": (_two, {"on_shards": [True]}, r"on_shards=\) must be True, False.* each of the 2"),
    "Muon": (_muon, {"on_shards": True}, r"Muon with on_shards=True.*Leave on_shards out"),
    "SparseAdam": (torch.optim.SparseAdam, {}, "SparseAdam, which takes sparse gradients.*AdamW"),
    "Adafactor": (torch.optim.Adafactor, {"on_shards": True}, "Adafactor, which needs.*one of 2.*AdamW8bit.*stage"),
    "a subclass": (OwnAdafactor, {}, "OwnAdafactor, which needs statistics of whole parameters"),
}


def _refusals():
    return errors_of(
        {
            name: partial(SmallTraining, config(3), make, name=NAME, **options)
            for name, (make, options, _) in REFUSED.items()
        }
    )


def test_what_would_be_wrong_is_refused_by_name(ranks2):
    check_errors(ranks2.run(_refusals), {name: text for name, (*_, text) in REFUSED.items()})


def _bitsandbytes():
    def eight_bits(parameters):
        return CASES[EIGHT_BITS].make({str(index): parameter for index, parameter in enumerate(parameters)})

    return errors_of({"": lambda: SmallTraining(config(3), eight_bits, name=NAME)})


def test_bitsandbytes_without_the_statement_is_refused_by_name(ranks2):
    pytest.importorskip("bitsandbytes", reason="the optimizer is bitsandbytes'")
    check_errors(ranks2.run(_bitsandbytes), {"": "bitsandbytes's AdamW8bit.*on_shards=True"})


def _with_overrides():
    """Which states are 8-bit."""
    from bitsandbytes.optim import GlobalOptimManager

    training = Training(CASES[EIGHT_BITS], 3)
    manager = GlobalOptimManager.get_instance()
    manager.register_module_override(training.model.embed, "weight", {"optim_bits": 32})
    manager.override_config(training.model.head.weight, "optim_bits", 32)
    try:
        training.run(0, 1)
    finally:
        manager.initialize()
    return {fqn for (fqn, key), (kind, _, _) in training.state().items() if key == "state1" and kind == "uint8"}


def test_settings_of_bitsandbytes_for_single_parameters_are_honoured(ranks2):
    pytest.importorskip("bitsandbytes", reason="the optimizer is bitsandbytes'")
    low = ranks2.run(_with_overrides)[0]
    assert low == {f"blocks.{index}.{part}.weight" for index in range(2) for part in (0, 2)}


def _equal_on_all_ranks(folder):
    """State that is bound to shards, and has the same bytes on all ranks."""
    training = Training(CASES[EIGHT_BITS], 3).run(0, 1)
    for entries in training.optimizers[0].state.values():
        for value in entries.values():
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                value.zero_()
    zeroamp.save_checkpoint(folder, training.model, training.train)
    other = Training(CASES[EIGHT_BITS], 0)
    with pytest.raises(zeroamp.CheckpointError) as error:
        zeroamp.load_checkpoint(folder, other.model, other.train)
    return str(error.value)


def test_state_of_shards_is_refused_by_another_number(ranks2, tmp_path):
    """State of shards is refused by another number of shards even if it is equal on all ranks."""
    pytest.importorskip("bitsandbytes", reason="the optimizer is bitsandbytes'")
    error = ranks2.run(_equal_on_all_ranks, tmp_path)[0]
    assert re.search("of embed.weight that cannot be resharded.*was sharded .* 2 ranks, but is not sharded here", error)
