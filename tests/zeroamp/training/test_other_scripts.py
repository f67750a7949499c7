"""Loops as in well-known scripts for `DistributedDataParallel` (DDP), and the lines that convert them: DDP's losses."""

import warnings

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import zeroamp
import zeroamp.deepspeed
from tests.models.small import build
from tests.processes.training import config, policy

VOCAB, WIDTH = 50, 16


def _parallel(model, stage):
    """The model under DDP where the stage is None, else wrapped."""
    return DistributedDataParallel(model) if stage is None else zeroamp.wrap_model(model, policy(config(stage)))


def _autocast():
    return torch.autocast("cpu", torch.bfloat16)


def _seeded():
    """Equal weights on all ranks, and this rank's own data."""
    torch.manual_seed(0)
    return torch.Generator().manual_seed(1 + dist.get_rank())


def _language_model(stage, folder):
    """As in nanoGPT: gradients are sent once per step, and the model is evaluated and saved when it is best."""
    data = _seeded()
    model = _parallel(build("llama_tied"), stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        model.eval()
        with torch.no_grad(), _autocast():  # nanoGPT: on the first rank only
            losses.append((model.module if stage is None else model)(torch.arange(12)[None]).item())
        model.train()
        if step == 3 and stage is not None:
            zeroamp.export_hf(model, folder / str(stage))
        elif step == 3 and dist.get_rank() == 0:
            torch.save(model.module.state_dict(), folder / "ddp.pt")
        for micro in range(2):
            if stage is None:
                model.require_backward_grad_sync = micro == 1
            else:
                model.set_requires_gradient_sync(micro == 1)
            with _autocast():
                loss = model(torch.randint(0, VOCAB, (2, 12), generator=data)) / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def _images(stage, _folder):
    """As in torch's example of ImageNet: batch norm, and an accuracy that is added over the ranks."""
    data = _seeded()
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    model = _parallel(nn.Sequential(*layers), stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    losses = []
    for _ in range(3):
        images, labels = torch.randn(4, 3, 6, 6, generator=data), torch.randint(0, 5, (4,), generator=data)
        with _autocast():
            output = model(images)
        loss = functional.cross_entropy(output.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if stage is not None:  # DDP sends the first rank's buffers before each forward
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)
        model.eval()
        with torch.no_grad(), _autocast():
            total = functional.cross_entropy(model(images).float(), labels)
        dist.all_reduce(total)
        losses.append(total.item())
        model.train()
    return losses


class _Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2)

    def init_hidden(self, size):
        weight = next(self.parameters())
        return weight.new_zeros(2, size, WIDTH), weight.new_zeros(2, size, WIDTH)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return self.decoder(output), hidden


def _recurrent(stage, _folder):
    """As in torch's word language model: the hidden state outlives a step, and the loop itself updates."""
    data = _seeded()
    model = _parallel(_Recurrent(), stage)
    hidden = model.module.init_hidden(2) if stage is None else (torch.zeros(2, 2, WIDTH), torch.zeros(2, 2, WIDTH))
    losses = []
    for _ in range(4):
        tokens = torch.randint(0, VOCAB, (7, 2), generator=data)
        model.zero_grad()
        hidden = tuple(each.detach() for each in hidden)
        with _autocast():
            output, hidden = model(tokens[:-1], hidden)
        loss = functional.cross_entropy(output.float().flatten(0, 1), tokens[1:].flatten())
        loss.backward()
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-1.0)
        losses.append(loss.item())
    return losses


def _gan(stage, _folder):
    """As in DeepSpeed's example: two backwards before a step, and the generator's loss runs through the other model."""
    data = _seeded()
    generator = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))
    critic = nn.Sequential(nn.Linear(8, WIDTH), nn.LeakyReLU(), nn.Linear(WIDTH, 1))
    engines = []
    for model in (generator, critic):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        if stage is None:
            engines.append(DistributedDataParallel(model))
            engines[-1].backward, engines[-1].step = torch.Tensor.backward, optimizer.step
        else:
            engines.append(zeroamp.deepspeed.initialize(model=model, config=config(stage), optimizer=optimizer)[0])
    generator, critic = engines
    losses = []

    def loss_of(samples, target):
        with _autocast():
            output = critic(samples)
        return functional.binary_cross_entropy_with_logits(output.float(), torch.full_like(output.float(), target))

    for _ in range(3):
        critic.zero_grad()
        with _autocast():
            fake = generator(torch.randn(5, 4, generator=data))
        for samples, target in ((torch.randn(5, 8, generator=data), 1.0), (fake.detach(), 0.0)):
            critic.backward(loss := loss_of(samples, target))
            losses.append(loss.item())
        critic.step()
        generator.zero_grad()
        generator.backward(loss := loss_of(fake, 1.0))
        generator.step()
        losses.append(loss.item())
    return losses


SCRIPTS = {"nanoGPT": _language_model, "ImageNet": _images, "word language model": _recurrent, "GAN": _gan}


def _losses(script, folder):
    """{stage: losses}; those of DDP for the stage None."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # an LSTM returns views
        return {stage: SCRIPTS[script](stage, folder) for stage in (None, 0, 3)}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_converted_script_has_the_losses_of_ddp(ranks2, script, tmp_path):
    for losses in ranks2.run(_losses, script, tmp_path):
        expected = losses.pop(None)
        assert losses == dict.fromkeys(losses, expected)
    if script == "nanoGPT":
        saved = torch.load(tmp_path / "ddp.pt", weights_only=True)
        exported = load_file(tmp_path / "3" / "model.safetensors")
        assert all(torch.equal(value, saved[name]) for name, value in exported.items())


def _hidden_of_a_parameter():
    model = _parallel(_seeded() and _Recurrent(), 3)
    with pytest.raises(zeroamp.WrapError) as error:
        model(torch.zeros(3, 2, dtype=torch.long), model.init_hidden(2))
    return str(error.value)


def test_a_state_made_from_a_sharded_parameter_is_named(ranks2):
    for text in ranks2.run(_hidden_of_a_parameter):
        assert text.startswith("rnn (a LSTM) got a DTensor in hx")
        assert "torch.zeros(size, device=inputs.device)" in text
