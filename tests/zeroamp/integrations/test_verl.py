"""verl's engine interface on zeroamp: bits of plain torch in one process, state off and on, checkpoints, weights."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.adapters import Adapted, quietly
from tests.oracles.one_process import clip_norm, combine

pytest.importorskip("verl", reason="verl is not installed: it pins other libraries, so it is no extra")
STEPS, CLIP = 4, 0.5
CONFIG = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 3}}
OFFLOADED, LORA = {"param_offload": True, "optimizer_offload": True}, {"lora_rank": 4, "lora": {"merge": True}}


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("verl") / "model")
    quietly(Adapted().base_model().save_pretrained)(path)
    return path


@quietly
def _trained(folder, own):
    engine = started(folder, own)
    return train(engine, range(STEPS)), weights(engine)


@pytest.mark.parametrize("own", [{}, OFFLOADED], ids=["on the device", "offloaded"])
def test_steps_have_the_bits_of_one_process(ranks2, folder, own):
    expected, parameters = quietly(in_one_process)(folder)
    for rank, (seen, found) in enumerate(ranks2.run(_trained, folder, own)):
        assert seen == [(losses[rank], norm, lr) for losses, norm, lr in expected]
        assert differing(found, parameters) == []


@quietly
def _moved(folder, path):
    """Return what differs after state was off, and what differs in two runs that go on: as it was, and loaded."""
    engine, resumed = started(folder), started(folder, OFFLOADED)
    train(engine, range(2))
    before = weights(engine)
    engine.to("cpu")
    assert all(each.to_local().untyped_storage().nbytes() == 0 for each in engine.module.parameters())
    engine.to("device")
    differ = differing(weights(engine), before)
    engine.save_checkpoint(path, global_step=2)
    resumed.load_checkpoint(path)
    runs = [(train(each, range(2, STEPS)), weights(each)) for each in (engine, resumed)]
    return differ, runs


def test_state_that_was_off_or_in_a_checkpoint_has_the_same_bits(ranks2, folder, tmp_path):
    expected, parameters = quietly(in_one_process)(folder)
    for rank, (differ, runs) in enumerate(ranks2.run(_moved, folder, str(tmp_path))):
        assert differ == []
        for seen, found in runs:
            assert seen == [(losses[rank], norm, lr) for losses, norm, lr in expected[2:]]
            assert differing(found, parameters) == []


@quietly
def _streamed(folder, model):
    engine = started(folder, OFFLOADED, model=model)
    train(engine, range(2))
    iterator, adapter = engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
    found = dict(iterator)
    engine.to("cpu", optimizer=False, grad=False)  # as verl does when it has sent them
    whole = weights(engine)
    for name in [name for name in whole if ".lora_B." in name]:
        a, b = whole.pop(name.replace("lora_B", "lora_A")), whole.pop(name)
        whole[name.replace("lora_B.default", "base_layer")] += (b @ a) * 4  # lora_alpha / lora_rank
    names = {name.removeprefix("base_model.model.").replace(".base_layer", ""): name for name in whole}
    return adapter, differing(found, {name: whole[own].bfloat16() for name, own in names.items()})


@pytest.mark.parametrize("model", [{}, LORA], ids=["full", "LoRA"])
def test_weights_per_tensor_are_the_parameters_in_bf16(ranks2, folder, model):
    assert ranks2.run(_streamed, folder, model) == [(None, [])] * 2


REFUSED = {
    "engine.seed": {"own": {"seed": 7}},
    "engine.ulysses_sequence_parallel_size": {"own": {"ulysses_sequence_parallel_size": 2}},
    "engine.dtype": {"own": {"dtype": "float16"}},
    "engine.zeroamp.gradient_clipping": {"config": {"gradient_clipping": 1.0}},
    "engine.zeroamp.bf16": {"config": {"torch_autocast": {"enabled": False}, "bf16": {"enabled": True}}},
    "model.use_liger": {"model": {"use_liger": True}},
    "model.lora.merge": {"model": {"lora_rank": 4}},
    "checkpoint.save_contents": {"checkpoint": {"save_contents": ["model"]}},
    "optim.clip_grad": {"optim": {"clip_grad": 0.0}},
}


@quietly
def _refused(folder):
    texts = {}
    for key, arguments in REFUSED.items():
        with pytest.raises(zeroamp.ConfigError) as error:
            engine_of(folder, **arguments)
        texts[key] = str(error.value)
    return [key for key, text in texts.items() if f"{key}: " not in text]


def test_a_key_without_an_effect_is_an_error_that_names_it(ranks2, folder):
    assert ranks2.run(_refused, folder) == [[], []]
