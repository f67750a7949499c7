"""Trainable parameters stored in bf16 or fp16: fp32 shards (master weights), made unit by unit."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import zeroamp
from tests.measuring.storage_peak import StoragePeak
from tests.models.small import HfLlama, batch, build, hf_llama
from tests.processes.ranks import RankError
from tests.processes.training import SmallTraining, config, full_parameters, policy, same_bits
from zeroamp.planning.plan import build_plan


def _keeps_frozen_parameters():
    model = build("two_blocks").bfloat16()
    model.blocks[0].requires_grad_(False)
    model.register_buffer("table", torch.ones(3, dtype=torch.bfloat16))
    zeroamp.wrap_model(model, policy(config(3)))
    for fqn, parameter in model.named_parameters():
        assert parameter.dtype == (torch.bfloat16 if fqn.startswith("blocks.0.") else torch.float32), fqn
    assert model.table.dtype == torch.bfloat16


def test_frozen_parameters_and_buffers_stay_as_stored(ranks2):
    ranks2.run(_keeps_frozen_parameters)


def _holds_the_shards_and_one_group():
    model = build("two_blocks_untied").bfloat16()
    plan = build_plan(model, policy(config(3)))
    shards = sum(4 * -(-p.shape[0] // 2) * p[:1].numel() for p in model.parameters())
    largest = max(4 * group.numel for group in plan.groups)
    whole = sum(4 * p.numel() for p in model.parameters())
    stored = [StorageWeakRef(p.untyped_storage()) for p in model.parameters()]
    with StoragePeak(shards + largest) as peak:
        zeroamp.wrap_model(model, policy(config(3)))
    assert shards < peak.num_bytes <= shards + largest < whole
    assert all(ref.expired() for ref in stored), "the model's own memory is held on"


def test_wrapping_holds_the_shards_and_one_group_in_fp32(ranks2):
    ranks2.run(_holds_the_shards_and_one_group)


def test_the_plan_of_a_traced_run_is_that_of_the_fp32_model():
    autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": "auto"}
    cfg = policy(config(3, torch_autocast=autocast))
    inputs = (batch("two_blocks", 0),)
    plans = [build_plan(build("two_blocks").to(dtype), cfg, None, inputs) for dtype in (torch.float32, torch.bfloat16)]
    assert plans[0] == plans[1]
    assert {param.dtypes.stored for param in plans[1].params} == {torch.float32}


def _from_meta(folder):
    """Return the parameters that are drawn for a bf16 model on the meta device, and those loaded from the folder."""
    with torch.device("meta"):
        model = HfLlama().bfloat16()
    torch.manual_seed(3)
    zeroamp.wrap_model(model, policy(config(3)))
    drawn = full_parameters(model)
    zeroamp.load_hf(model, folder)
    return drawn, full_parameters(model)


def test_a_meta_model_in_bf16_gets_fp32_shards(ranks2, tmp_path):
    """A meta model in bf16 gets fp32 shards and files in bf16 load exactly."""
    pytest.importorskip("transformers", reason="the model is transformers'")
    saved = hf_llama(True).bfloat16()
    saved.save_pretrained(tmp_path)
    drawn, loaded = ranks2.run(_from_meta, tmp_path)[0]
    assert {tensor.dtype for tensor in drawn.values()} == {torch.float32}
    weight = drawn["model.layers.0.mlp.up_proj.weight"]
    assert not torch.equal(weight, weight.bfloat16().float()), "drawn in bf16"
    assert same_bits(loaded, {fqn: p.detach().float() for fqn, p in saved.named_parameters()}) == []


def _late(change):
    """Change a wrapped model after its first optimizer step."""
    training = SmallTraining(config(3), prepare_before=lambda model: model.blocks[1].requires_grad_(False).bfloat16())
    training.step()
    change(training.model)
    training.backward()


def _unfreeze(model):
    model.blocks[1].requires_grad_(True)


def _cast_back(model):
    model.float()


def _cast_a_module(model):
    model.blocks[0].out.to(torch.float16)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_unfreeze, r"StepError: blocks\.1\.norm1\.weight .* in bf16 .* Unfreeze it before wrap_model"),
        (_cast_back, r"WrapError: .* is stored in bf16 and cannot be cast to fp32 after wrap_model"),
        (_cast_a_module, r"StepError: blocks\.0\.out\.weight .* in fp16 .* do not cast a wrapped model"),
    ],
)
def test_a_trainable_parameter_without_fp32_shards_is_named(ranks2, change, text):
    with pytest.raises(RankError, match=f"--- rank 0[\\s\\S]*{text}[\\s\\S]*--- rank 1[\\s\\S]*{text}"):
        ranks2.run(_late, change)
