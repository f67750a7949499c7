"""What a whole model sends, and that FSDP2 stages nothing beside it."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import zeroamp
from tests.models.small import batch, loss_of
from tests.processes.training import config, wrapped

NAME = "llama_untied"

# DeepSpeed 0.19.8, stage 2 with torch_autocast, the same model, MB per step: an fp32 all-gather, then all-reduces of
# bf16 and fp32 gradients. An all-reduce moves twice what a reduce-scatter of its size moves.
DEEPSPEED_STAGE_2_MB = 14.75 + 2 * (6.85 + 1.06)


def _baseline_model():
    """3,688,704 parameters: Linear 3,424,256, Embedding 262,144, RMSNorm 2,304."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1024, hidden_size=256, intermediate_size=688, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=False,
        )
    )  # fmt: skip


def _bytes_per_step(stage):
    model = _baseline_model()
    num_parameters = sum(p.numel() for p in model.parameters())
    model = zeroamp.wrap_model(model, zeroamp.policy_from_config(config(stage)))
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step.backward(loss_of(model, torch.randint(0, 1024, (1, 16))))
    step.step()
    totals = zeroamp.traffic(model).by_dtype()
    weight = {"all_reduce": 2}
    return num_parameters, sum(n * weight.get(kind, 1) for (kind, _), (_, n) in totals.items())


def test_stage_2_sends_about_half_of_what_deepspeeds_does(ranks2):
    num_parameters, num_bytes = ranks2.run(_bytes_per_step, 2)[0]
    assert num_parameters == 3_688_704
    assert num_bytes / 1e6 <= 0.55 * DEEPSPEED_STAGE_2_MB


class _Allocations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.fp32_numels = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.fp32_numels.add(tensor.numel())
        return out


def _fp32_copies_of_buckets():
    model = wrapped(NAME, config(3))
    buckets = {group.numel for group in model._zeroamp_state.plan.groups if group.name.startswith("blocks")}
    loss = loss_of(model, batch(NAME, 0))
    with _Allocations() as allocations:
        loss.backward()
    return buckets, buckets & allocations.fp32_numels, len(allocations.fp32_numels)


def test_no_bf16_bucket_is_ever_copied_in_fp32(ranks2):
    buckets, copied, seen = ranks2.run(_fp32_copies_of_buckets)[0]
    assert len(buckets) == 1  # three equal blocks
    assert copied == set()
    assert seen > 3  # the norms, the shards: it did look
