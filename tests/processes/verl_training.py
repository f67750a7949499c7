"""Trains by verl's engine interface on zeroamp, and the same steps by plain torch in one process."""

from functools import partial

import torch
import torch.distributed as dist

import zeroamp
from tests.oracles.one_process import clip_norm, combine

STEPS, CLIP = 4, 0.5
CONFIG = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 3}}


def use_cpus():
    """Set a platform by verl's interface for plugins: it has none for CPUs."""
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    values = {"device_name": "cpu", "device_module": torch.cpu, "current_device": lambda self: "cpu"}
    set_platform(type("PlatformCPU", (PlatformCUDA,), values)())
    from verl.models.transformers import monkey_patch

    monkey_patch.is_trl_available = lambda: False  # verl imports a class that trl 1.16 does not have


def engine_of(folder, own=None, config=None, model=None, optim=None, checkpoint=None):
    """Build an engine by verl's registry. Its option `external_lib` imports zeroamp's."""
    use_cpus()
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    model = {"load_tokenizer": False, "override_config": {"attn_implementation": "sdpa"}} | (model or {})
    model = HFModelConfig(path=folder, external_lib="zeroamp.integrations.verl", **model)
    optim = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": CLIP, "lr_warmup_steps": 2} | (optim or {})
    from zeroamp.integrations.verl import ZeroampEngineConfig

    own = ZeroampEngineConfig(zeroamp=CONFIG | (config or {}), **(own or {}))
    rest = FSDPOptimizerConfig(**optim), CheckpointConfig(**(checkpoint or {}))
    return EngineRegistry.new("language_model", "zeroamp", model, own, *rest)


def started(*args, **kwargs):
    engine = engine_of(*args, **kwargs)
    engine.initialize()
    return engine


def columns(step, rank):
    """Return the columns of a batch of two micro-batches, each of two samples."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    rows = [torch.randint(0, 64, (length,), generator=generator) for length in (5, 9 + rank, 12, 7)]
    positions = [torch.arange(len(row)) for row in rows]
    return {"input_ids": rows, "position_ids": positions, "loss_mask": [(each > 1).long() for each in positions]}


def train(engine, steps):
    from verl.utils.tensordict_utils import get_tensordict
    from verl.workers.utils.losses import sft_loss

    seen = []
    for step in steps:
        rows = columns(step, dist.get_rank())
        nested = {key: torch.nested.as_nested_tensor(each, layout=torch.jagged) for key, each in rows.items()}
        batch = get_tensordict(nested, {"temperature": 1.0, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2})
        with engine.train_mode():
            output = engine.train_batch(batch, partial(sft_loss, None))
        seen.append((output["loss"], output["metrics"]["grad_norm"], engine.lr_scheduler_step()))
    return seen


def weights(engine):
    with engine.eval_mode():  # offloaded ones are on the device inside
        return {name: zeroamp.full_parameter(each) for name, each in engine.module.named_parameters()}


def differing(found, expected):
    return [key for key in found.keys() | expected.keys() if not torch.equal(found[key], expected[key])]


def in_one_process(folder):
    """Plain torch under autocast, the ranks one after the other. Of verl only its log-probabilities."""
    from transformers import LlamaForCausalLM

    use_cpus()
    from verl.utils.torch_functional import logprobs_from_logits

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 2))
    seen = []
    for step in range(STEPS):
        ranks = [columns(step, rank) for rank in range(2)]
        num_tokens = sum(int(mask.sum()) for rank in ranks for mask in rank["loss_mask"])
        losses, gradients = [], []
        for rank in ranks:
            micros = []
            for pair in (slice(0, 2), slice(2, 4)):
                tokens, positions, mask = (torch.cat(rows[pair]) for rows in rank.values())
                with torch.autocast("cpu", torch.bfloat16):
                    logits = model(tokens[None], position_ids=positions[None], use_cache=False).logits[0]
                    log_probs = logprobs_from_logits(logits, tokens.roll(-1))
                    micros.append(-(log_probs * mask.roll(-1)).sum() / num_tokens * 2)
            losses.append([float(loss) for loss in micros])
            gradients.append([torch.autograd.grad(loss, list(model.parameters())) for loss in micros])
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = combine([[micro[index] for micro in rank] for rank in gradients], reduce_each=True)
        norm = clip_norm(model, CLIP)
        optimizer.step()
        scheduler.step()
        seen.append((losses, norm, scheduler.get_last_lr()[0]))
    return seen, {name: each.detach() for name, each in model.named_parameters()}
