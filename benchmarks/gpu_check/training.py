"""The training that several parts run: a decoder of `benchmarks.peers.model` with zeroamp, or with FSDP2 alone."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import zeroamp
from benchmarks.gpu_check.verdict import Place
from benchmarks.peers.model import SHAPES, build

LEARNING_RATE = 1e-3


@dataclass(kw_only=True, slots=True)
class Training:
    """A model in training. A step has three phases, which a part may watch one by one: forward, backward, update."""

    model: nn.Module
    tokens: torch.Tensor
    """int64 [batch, length], the same in each step."""
    backward: Callable[[torch.Tensor], None]
    update: Callable[[], Any]
    num_micro_batches: int = 1

    def forward(self) -> torch.Tensor:
        """Return the 0-D fp32 loss."""
        # The math backend: the backward of the other ones may add in an order that changes from run to run.
        with sdpa_kernel(SDPBackend.MATH):
            return self.model(self.tokens)

    def step(self) -> None:
        """Take one optimizer step."""
        for _ in range(self.num_micro_batches):
            self.backward(self.forward())
            self.update()

    def digest(self) -> str:
        """Return the sha256 of the bytes of this rank's parameters."""
        return digest([_local(parameter) for parameter in self.model.parameters()])


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """Return the sha256 of the bytes of tensors."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def zeroamp_training(place: Place, stage: int, *, shape: str = "tiny", length: int = 16, **config: Any) -> Training:
    """Return a training with zeroamp: bf16 autocast unless `config` has another mode, one group per unit and dtype."""
    whole = {
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.5,
        **config,
    }
    policy = zeroamp.policy_from_config(whole)
    model = zeroamp.wrap_model(_model(place, shape, length), policy)
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True))
    return Training(
        model=model,
        tokens=_tokens(place, shape, length),
        backward=train.backward,
        update=train.step,
        num_micro_batches=policy.gradient_accumulation_steps,
    )


def fsdp2_training(place: Place, *, shape: str = "tiny", length: int = 16) -> Training:
    """Return a training with FSDP2 alone: parameters unsharded and gradients reduced in bf16, without clipping."""
    model = _model(place, shape, length)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Training(model=model, tokens=_tokens(place, shape, length), backward=torch.Tensor.backward, update=update)


def _model(place: Place, shape: str, length: int) -> Any:
    return build(SHAPES[shape], length, place.device, checkpointing=False, compiled=False)


def _tokens(place: Place, shape: str, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, SHAPES[shape].vocab, (2, length), generator=generator).to(place.device)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)
