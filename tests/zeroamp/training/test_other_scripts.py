"""Loops as in well-known scripts for `DistributedDataParallel` (DDP), and the lines that convert them: DDP's losses."""

import json
import warnings

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import zeroamp
import zeroamp.deepspeed
from tests.models.small import build
from tests.processes.training import config

VOCAB, WIDTH = 50, 16


def _parallel(model, stage, **more):
    """The model under DDP where the stage is None, else wrapped, with `more` in the config."""
    return DistributedDataParallel(model) if stage is None else zeroamp.wrap_model(model, config(stage, **more))


def _autocast():
    return torch.autocast("cpu", torch.bfloat16)


def _seeded():
    """Equal weights on all ranks, and this rank's own data."""
    torch.manual_seed(0)
    return torch.Generator().manual_seed(1 + dist.get_rank())


def _batch():
    """A batch of this rank's own data, which nanoGPT draws from the global generator."""
    return torch.randint(0, VOCAB, (2, 12))


class _NanoGPT:
    """nanoGPT's loop: it draws the next batch ahead, sends gradients once per step, and evaluates before some steps."""

    def __init__(self, stage, folder, *, name="two_blocks", clip=0.0, is_compiled=False, has_train_step=False):
        self.stage, self.folder, self.clip = stage, folder, clip
        model = build(name, seed=1337 + dist.get_rank())  # DDP sends the first rank's weights
        if is_compiled:
            model = torch.compile(model, backend="eager")
        self.model = _parallel(model, stage, zeroamp={"sync_module_states": True})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        has_train_step = has_train_step and stage is not None
        self.train = zeroamp.TrainStep(self.model, self.optimizer) if has_train_step else None
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.losses = []
        """Of training and of evaluations, and the gradient norms if the loop clips."""

    def evaluate(self):
        """Evaluate on batches of the global generator: DDP on the first rank alone, zeroamp on all ranks."""
        if self.stage is None and dist.get_rank() > 0:
            return
        rng = torch.get_rng_state()
        self.model.eval()
        with torch.no_grad(), _autocast():
            losses = [(self.model.module if self.stage is None else self.model)(_batch()).item() for _ in range(2)]
        self.model.train()
        if dist.get_rank() > 0:
            torch.set_rng_state(rng)
        else:
            self.losses += losses

    def step(self, tokens):
        """Train one optimizer step of 2 micro-batches. Return the batch that was drawn ahead."""
        for micro in range(2):
            if self.stage is None:
                self.model.require_backward_grad_sync = micro == 1
            elif self.train is None:
                self.model.set_requires_gradient_sync(micro == 1)
            with _autocast():
                loss = self.model(tokens) / 2
            tokens = _batch()
            if self.train is None:
                self.scaler.scale(loss).backward()
            else:
                self.train.backward(loss, is_last=micro == 1, divide=False)
        self.update()
        self.losses.append(loss.item())
        return tokens

    def update(self):
        """Clip and step, by `TrainStep` if there is one."""
        if self.train is not None:
            self.train.step()
            return
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.losses.append(norm.item())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def export(self):
        """Write the weights: DDP as a state dict, zeroamp as safetensors and as a whole state dict."""
        if self.stage is not None:
            zeroamp.export_hf(self.model, self.folder)
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_model_state_dict(self.model, options=options)
            if dist.get_rank() == 0:
                torch.save(state, self.folder / "model.pt")
        elif dist.get_rank() == 0:
            torch.save(self.model.module.state_dict(), self.folder / "model.pt")

    def run(self, steps, tokens=None, *, is_evaluated=False):
        """Train, with an evaluation before every second step; not before the first one if `is_evaluated`.

        Return the batch that was drawn ahead.
        """
        tokens = _batch() if tokens is None else tokens
        for step in steps:
            if step % 2 == 0 and not (is_evaluated and step == steps[0]):
                self.evaluate()
            tokens = self.step(tokens)
        return tokens


def _language_model(stage, folder, **more):
    """As in nanoGPT. The weights are exported before the last step, unless the loop clips."""
    training = _NanoGPT(stage, folder, **more)
    tokens = training.run(range(2))
    if not training.clip:
        training.export()
    training.run([2], tokens)
    return training.losses


def _images(stage):
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


def _recurrent(stage):
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


def _gan(stage):
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


SCRIPTS = {"ImageNet": _images, "word language model": _recurrent, "GAN": _gan}


def _losses(script):
    """{stage: losses}; those of DDP for the stage None."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # an LSTM returns views
        return {stage: SCRIPTS[script](stage) for stage in (None, 0, 3)}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_converted_script_has_the_losses_of_ddp(ranks2, script):
    for losses in ranks2.run(_losses, script):
        expected = losses.pop(None)
        assert losses == dict.fromkeys(losses, expected)


EXACT = {
    **{f"stage {stage}": (stage, {}) for stage in (0, 3)},
    **{f"TrainStep, stage {stage}": (stage, {"has_train_step": True}) for stage in (0, 1)},
    "compiled": (3, {"is_compiled": True}),
}
OTHER_ORDER = ("TrainStep, stage 2", "TrainStep, stage 3")
NANO_GPTS = {
    "DDP": (None, {}),
    **EXACT,
    **{name: (int(name[-1]), {"has_train_step": True}) for name in OTHER_ORDER},
    **{f"clipped, {stage}": (stage, {"clip": 0.5}) for stage in (None, 0, 3)},
}


def _nano_gpts(folder):
    found = {}
    for name, (stage, more) in NANO_GPTS.items():
        (folder / name).mkdir(exist_ok=True)
        found[name] = _language_model(stage, folder / name, **more)
    return found


def test_converted_nanogpt_has_the_losses_and_weights_of_ddp(ranks2, tmp_path):
    """With torch's clipping at stage 0 only, with `TrainStep` at stages 0 and 1, and compiled before `wrap_model`."""
    for losses in ranks2.run(_nano_gpts, tmp_path):
        assert {name: losses[name] for name in EXACT} == dict.fromkeys(EXACT, losses["DDP"])
        assert all(losses[name] == pytest.approx(losses["DDP"], rel=1e-3) for name in OTHER_ORDER)
        assert losses["clipped, 0"] == losses["clipped, None"] != losses["DDP"]
        assert losses["clipped, 3"] == pytest.approx(losses["clipped, None"], rel=1e-3)
    saved = torch.load(tmp_path / "DDP" / "model.pt", weights_only=True)
    for name in (*EXACT, *OTHER_ORDER):
        whole = torch.load(tmp_path / name / "model.pt", weights_only=True)
        build("two_blocks").load_state_dict(whole)
        exported = load_file(tmp_path / name / "model.safetensors")
        assert saved.keys() - exported.keys() == {"head.weight"}, "the tied weight has one name"
        assert all(torch.equal(value, whole[fqn]) for fqn, value in exported.items())
        # A loss in bf16 may not show another order of additions.
        assert all(torch.equal(value, saved[fqn]) for fqn, value in whole.items()) == (name in EXACT), name


NUM_STEPS, SAVED_AT = 4, 2


def _resumed(folder):
    """Return {how: losses after the checkpoint}, and the names of two checkpoints without `step` and of one with it."""
    first = _NanoGPT(3, folder)
    tokens = first.run(range(SAVED_AT))
    first.evaluate()
    if dist.get_rank() == 0:
        (folder / "model_args.json").write_text(json.dumps({"name": "two_blocks"}))
    train = zeroamp.TrainStep(first.model, first.optimizer)
    extra = {"step": SAVED_AT, "tokens": tokens}
    paths = [zeroamp.save_checkpoint(folder / "unnamed", first.model, train) for _ in range(2)]
    paths.append(zeroamp.save_checkpoint(folder, first.model, train, step=SAVED_AT, extra=extra))
    first.losses.clear()
    first.run(range(SAVED_AT, NUM_STEPS), tokens, is_evaluated=True)
    found = {"not stopped": first.losses}
    for how in ("resumed", "evaluated again", "another batch"):
        again = _NanoGPT(3, folder, **json.loads((folder / "model_args.json").read_text()))
        extra = zeroamp.load_checkpoint(folder, again.model, zeroamp.TrainStep(again.model, again.optimizer))
        tokens = _batch() if how == "another batch" else extra["tokens"]
        if how == "evaluated again":
            again.evaluate()
            again.losses.clear()
        again.run(range(extra["step"], NUM_STEPS), tokens, is_evaluated=True)
        found[how] = again.losses
    return found, [path.name for path in paths]


def test_a_resume_needs_the_batch_drawn_ahead_and_no_second_evaluation(ranks2, tmp_path):
    by_rank = ranks2.run(_resumed, tmp_path)
    for losses, names in by_rank:
        assert losses["resumed"] == losses["not stopped"]
        assert losses["another batch"] != losses["not stopped"]
        assert names == ["step_00000000", "step_00000000_2", f"step_{SAVED_AT:08d}"]
    losses, _ = by_rank[0]
    assert losses["evaluated again"] != losses["not stopped"], "the first rank draws other batches"


def _hidden_of_a_parameter():
    model = _parallel(_seeded() and _Recurrent(), 3)
    with pytest.raises(zeroamp.WrapError) as error:
        model(torch.zeros(3, 2, dtype=torch.long), model.init_hidden(2))
    return str(error.value)


def test_a_state_made_from_a_sharded_parameter_is_named(ranks2):
    for text in ranks2.run(_hidden_of_a_parameter):
        assert text.startswith("rnn (a LSTM) got a DTensor in hx")
        assert "torch.zeros(size, device=inputs.device)" in text
