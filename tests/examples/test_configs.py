"""Every ready-to-use config trains a small model, and every ready-to-use model trains with narrow layers."""

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.small import VOCAB, batch, build, loss_of
from tests.oracles import two_ranks
from tests.processes.launch import ROOT
from tests.processes.training import config, plain_loop, same_bits
from tests.selection import slow_but

CONFIGS = sorted((ROOT / "examples" / "configs").glob("*.json"))
NAME = "llama_tied"


def test_the_promised_files_are_there():
    modes = ("autocast_bf16", "autocast_fp16", "bf16", "fp16")
    names = {f"zero{stage}_{mode}" for stage in range(4) for mode in modes}
    names |= {"hsdp_autocast_bf16", "offload_autocast_bf16", "accumulation_autocast_bf16", "reproducible_autocast_bf16"}
    assert {path.stem for path in CONFIGS} == names


def _losses(path):
    policy = zeroamp.policy_from_config(path)
    model = zeroamp.wrap_model(build(NAME), policy)
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    while len(losses) < 4:
        step.backward(loss_of(model, batch(NAME, dist.get_rank())))  # one batch per rank, over and over
        if (report := step.step()) is not None:
            losses += [] if report.skipped else [report.loss]
            assert step.num_skipped <= (4 if policy.low_dtype == torch.float16 else 0)  # the scale starts at 2**16
    return losses, policy.gradient_accumulation_steps


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_key_of_it_has_an_effect(path):
    assert "Without effect" not in zeroamp.policy_from_config(path, world_size=2).report()


NAMES = [path.stem for path in CONFIGS]


@pytest.mark.parametrize("name", slow_but(NAMES, "zero1_bf16", "zero3_autocast_bf16", "accumulation_autocast_bf16"))
def test_a_small_model_learns_with_it(ranks2, name):
    path = ROOT / "examples" / "configs" / f"{name}.json"
    losses, num_micro_batches = ranks2.run(_losses, path)[0]
    assert losses[-1] < losses[0] - 0.1, losses
    assert (num_micro_batches > 1) == name.startswith(("accumulation", "reproducible"))


MODELS = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
}
"""Folder of examples/models -> the number of parameters of the published model."""


def _of_folder(name, **narrower):
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.from_pretrained(ROOT / "examples" / "models" / name)
    settings.update(narrower)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(settings, dtype=torch.float32).train()


def _narrow(name):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return _of_folder(name, **sizes, num_hidden_layers=2, head_dim=8, vocab_size=VOCAB)


def _loss(model, index):
    return loss_of(model, batch(NAME, index))


def _trained(name):
    losses, parameters = plain_loop(zeroamp.wrap_model(_narrow(name), config(3)), _loss, 2)
    expected_losses, expected = two_ranks.train(_narrow(name), _loss, 2)
    return losses == expected_losses[dist.get_rank()], same_bits(parameters, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_published_size_and_trains_with_narrow_layers(ranks2, name):
    pytest.importorskip("transformers", reason="transformers is not installed: it builds the model of a config.json")
    assert {path.name for path in (ROOT / "examples" / "models").iterdir()} == MODELS.keys()
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in _of_folder(name).parameters()) == MODELS[name]
    assert ranks2.run(_trained, name) == [(True, [])] * 2
