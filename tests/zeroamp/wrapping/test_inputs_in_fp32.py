"""In bf16 mode, arguments that `zeroamp.keep_inputs_in_fp32` names are not cast; a rounded one is a warning."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroamp
from tests.models.side_channels import SIZE, noise
from tests.oracles import two_ranks
from tests.processes.training import full_parameters, same_bits

TIMES = torch.tensor([998.3897, 3.0, 0.3183, 255.9])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x, t, *, scale):
        self.seen = t.detach().clone()
        return x + torch.tanh(self.linear(x + torch.sin(t[:, None]).to(x.dtype))) * scale["all"].to(x.dtype)


class Diffusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(SIZE, SIZE)

    def forward(self, x, t):
        for block in self.blocks:
            x = block(x, t, scale={"all": torch.cos(t).mean()})
        return self.head(x).float().pow(2).mean()


def _built():
    torch.manual_seed(0)
    return Diffusion()


def _loss_of(model, index):
    return model(noise(index).to(next(model.parameters()).dtype), TIMES)


def _config(keeps, stage=3, mode="bf16"):
    return {mode: {"enabled": True}, "zero_optimization": {"stage": stage}, "zeroamp": {"keep_inputs_in_fp32": keeps}}


def _train():
    found = {}
    for stage in (0, 2, 3):
        model = zeroamp.wrap_model(_built(), _config(["t", "scale"], stage))
        optimizer = torch.optim.SGD(model.parameters(), lr=two_ranks.LEARNING_RATE)
        losses = []
        for step in range(2):
            loss = _loss_of(model, step * two_ranks.NUM_RANKS + dist.get_rank())
            losses.append(float(loss.detach()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found[stage] = losses, full_parameters(model), model.blocks[1].seen
    return found


def test_named_inputs_reach_the_units_in_fp32(ranks2):
    losses, parameters = two_ranks.train(_built(), _loss_of, 2, mode="bf16")
    for rank, by_stage in enumerate(ranks2.run(_train)):
        for own_losses, own_parameters, seen in by_stage.values():
            assert torch.equal(seen, TIMES)
            assert own_losses == losses[rank]
            assert same_bits(own_parameters, parameters) == []


class _Texts(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def _warnings():
    """The warnings of three forwards, by what the config keeps and whether bf16 has the times exactly."""
    found, logger = {}, logging.getLogger("zeroamp")
    for keeps in ((), ("t",)):
        for is_exact in (False, True):
            model = zeroamp.wrap_model(_built(), _config(list(keeps)))
            logger.addHandler(handler := _Texts())
            for _ in range(2):
                model(noise(0), t=torch.full((4,), 512.0) if is_exact else TIMES)
            logger.removeHandler(handler)
            found[keeps, is_exact] = [text for text in handler.texts if "keep_inputs_in_fp32" in text]
    return found


def test_a_rounded_input_is_one_warning(ranks1):
    (found,) = ranks1.run(_warnings)
    (text,) = found.pop(((), False))
    assert text == (
        "The argument t of a Diffusion, a tensor of shape (4,) in fp32, is cast to bf16: 998.39 becomes 1000. To keep "
        'it as it is, write "zeroamp": {"keep_inputs_in_fp32": ["t"]} in the config.'
    )
    assert not any(found.values())


def _unknown():
    with pytest.raises(zeroamp.WrapError) as error:
        zeroamp.wrap_model(_built(), _config(["timestep"]))
    return str(error.value)


def test_a_name_that_no_forward_takes_is_refused(ranks1):
    (text,) = ranks1.run(_unknown)
    assert 'names "timestep", but the forwards' in text
    assert "Their arguments are scale, t, x." in text


def test_other_modes_refuse_the_key():
    with pytest.raises(zeroamp.ConfigError, match="keep_inputs_in_fp32 must be empty unless bf16 or fp16"):
        zeroamp.policy_from_config({"zeroamp": {"keep_inputs_in_fp32": ["t"]}})
