"""A tour in two minutes on one process: python examples/tour.py, or cell by cell in an editor that knows percent cells.

From a plain model to a verified ledger, a plan, ten steps, a checkpoint in runs/tour, and a plain model again.
"""

# %% A plain model, and a config
from pathlib import Path

import torch
from torch import nn

import zeroamp

OUT = Path("runs/tour")
CONFIG = {
    "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    "zero_optimization": {"stage": 3},
    "gradient_clipping": 1.0,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
}
VOCAB, WIDTH, LENGTH = 256, 128, 64


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] to the same."""
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """Returns the mean cross entropy of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids, [batch, length], to the loss."""
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def batch(size: int, length: int) -> torch.Tensor:
    """Return numbers that count up, as token ids: something that a model can learn."""
    start = torch.randint(0, VOCAB, (size, 1))
    return (start + torch.arange(length)) % VOCAB


# %% How every key of the config is used
print("zeroamp", zeroamp.__version__)
policy = zeroamp.policy_from_config(CONFIG)
print(policy.report())
try:
    zeroamp.policy_from_config(CONFIG | {"zero_optimization": {"stag": 3}})
except zeroamp.ZeroAmpError as error:  # here a ConfigError
    print(error)

# %% Before the run: memory, traffic and largest batch on 64 GPUs, at every stage. No weights, no GPUs
with torch.device("meta"):
    shapes = LanguageModel()
plan: zeroamp.RunPlan = zeroamp.plan_run(shapes, policy, world_size=64, batch=8, seq=LENGTH, inputs=batch)
print(plan)
safe: zeroamp.SafeParameters = zeroamp.discover_safe_parameters(shapes, (batch(2, LENGTH),))
print(f"{len(safe.safe)} weights that autocast always casts; {safe.reasons['embed.weight']}")

# %% Wrap: one process is a run of one rank
torch.manual_seed(0)
model = zeroamp.wrap_model(LanguageModel(), policy)
train = zeroamp.TrainStep(model, zeroamp.optimizer_from_config(policy, model.parameters()))
ledger: zeroamp.Ledger = zeroamp.explain(model)
print(ledger)
print("in another engine, the head computes in", zeroamp.inference_dtypes(ledger)["modules"]["head"])

# %% Compare the ledger with every dtype that occurs in one observed step
seen: zeroamp.Verification = ledger.verify(model, batch(8, LENGTH))
print(seen)


# %% Ten optimizer steps of two micro-batches, recorded
def one_step() -> zeroamp.StepReport:
    """Take one optimizer step."""
    while True:
        train.backward(model(batch(8, LENGTH)))
        if report := train.step():  # None before the last micro-batch
            return report


OUT.mkdir(parents=True, exist_ok=True)
(OUT / "run.jsonl").unlink(missing_ok=True)
with zeroamp.RunReport(train, OUT / "run.jsonl"):
    for _ in range(10):
        print(one_step())
print(zeroamp.traffic(model).by_dtype())
run: zeroamp.SavedRun = zeroamp.read_run(OUT / "run.jsonl")
last: zeroamp.StepRecord = run.records[-1]
print(f"step {last.step} took {last.step_s:.3f} s")

# %% A trace of one step, for ui.perfetto.dev
with zeroamp.Profile(train, OUT / "traces", active=1) as profile:
    for _ in range(3):
        one_step()
print(profile)

# %% Save a checkpoint, and take the next step twice: the bits are the same
zeroamp.save_checkpoint(OUT / "checkpoints", model, train)
print(zeroamp.latest_checkpoint(OUT / "checkpoints"))
random_state = torch.get_rng_state()
first = one_step()
zeroamp.load_checkpoint(OUT / "checkpoints", model, train)
torch.set_rng_state(random_state)
second = one_step()
print(f"norms after the checkpoint: {first.grad_norm!r} and {second.grad_norm!r}")
if (first.loss, first.grad_norm) != (second.loss, second.grad_norm):
    raise AssertionError("expected the same bits after the checkpoint was loaded")

# %% Memory: activations in host memory during a forward, weights and optimizer state there between two steps
with zeroamp.save_on_cpu():
    loss = model(batch(8, LENGTH))
train.backward(loss, is_last=True, divide=False)
gradient = zeroamp.full_gradient(model.get_parameter("head.weight"))  # of the whole weight, on every rank
if gradient is not None:
    print(gradient.norm())
train.step()
zeroamp.sleep(model, train.optimizers)
zeroamp.wake(model)

# %% A whole weight, and a plain model
head = model.get_parameter("head.weight")
zeroamp.set_full_parameter(head, zeroamp.full_parameter(head) * 0.99)
plain = zeroamp.unwrap_model(model)
print(type(plain.head.weight).__name__)  # Parameter

# %% A page of the run
print(f"zeroamp report {OUT / 'run.jsonl'} --html {OUT / 'run.html'} writes a page of the run")
