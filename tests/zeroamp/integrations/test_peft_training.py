"""Adapters of peft train as in one process of plain peft under torch.autocast: base in fp32, bf16 and NF4."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroamp
from tests.models.adapters import Adapted, batch, quietly, train_in_one_process, trained
from tests.models.architectures import mixtral
from tests.processes.adapter_training import AdapterTraining
from tests.processes.training import config, full_parameters, same_bits
from tests.selection import needs_bitsandbytes

pytest.importorskip("peft", reason="peft is not installed: it makes the adapters")

NF4 = ["nf4 uint8", "nf4 bfloat16", "nf4 float32"]
STAGES = (0, 2, 3)


@quietly
def _compared(adapted, stages=STAGES, **keys):
    oracle = train_in_one_process(adapted, [2, 2])
    return {stage: AdapterTraining(adapted, stage, **keys).run(2).differences(oracle) for stage in stages}


def _check(ranks2, *args, **kwargs):
    for found in ranks2.run(_compared, *args, **kwargs):
        assert not any(found.values()), found


TRAININGS = {
    "LoRA on bf16": Adapted(base="bf16"),
    "DoRA on NF4": Adapted(base=NF4[0], dora=True),
    "DoRA on fp32": Adapted(dora=True),
    "LoRA on NF4 in bf16": Adapted(base=NF4[1]),
    "DoRA on NF4 in fp32": Adapted(base=NF4[2], dora=True),
    "the dropout before an adapter": Adapted(lora={"lora_dropout": 0.1}),
    "a trained copy of a tied embedding": Adapted(tied=True, lora={"modules_to_save": ["embed_tokens"]}),
    # DoRA on every Linear, the head tied to the embedding: no weight is safe.
    "no safe weight": Adapted(base="bf16", dora=True, tied=True, lora={"target_modules": "all-linear"}),
}


FAST = {"LoRA on bf16": STAGES, "DoRA on NF4": (3,), "a trained copy of a tied embedding": (3,)}
"""Name -> its stages in the fast tests. All run at all stages in both tiers together."""


SLOW = {name: tuple(stage for stage in STAGES if stage not in FAST.get(name, ())) for name in TRAININGS}


@pytest.mark.parametrize(
    ("name", "stages"),
    [*FAST.items(), *(pytest.param(name, rest, marks=pytest.mark.slow) for name, rest in SLOW.items() if rest)],
)
def test_adapters_train_as_in_one_process(ranks2, name, stages):
    if (base := TRAININGS[name].base) in NF4:
        needs_bitsandbytes(base.partition(" ")[2])
    _check(ranks2, TRAININGS[name], stages)


class _Experts(Adapted):
    def base_model(self):
        torch.manual_seed(1)
        return mixtral("eager")[0]


def test_adapters_of_parameters(ranks2):
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    _check(ranks2, _Experts(lora={"target_modules": ["q_proj"], "target_parameters": targets}), (3,))


@quietly
def _other_quantization(is_synchronised):
    """Each rank quantizes another multiple of the base: the packed words are equal, what dequantizes them is not."""
    model = Adapted(base="nf4 uint8").build()
    states = [m.weight.quant_state for m in model.modules() if hasattr(getattr(m, "weight", None), "quant_state")]
    for state in states:
        state.offset.add_(dist.get_rank())
    try:
        zeroamp.wrap_model(
            model, zeroamp.policy_from_config(config(3, zeroamp={"sync_module_states": is_synchronised}))
        )
    except zeroamp.WrapError as error:
        return str(error)
    return {float(state.offset) for state in states}


def test_ranks_with_other_quantization_states_are_refused_or_synchronised(ranks2):
    needs_bitsandbytes()
    for text in ranks2.run(_other_quantization, False):
        assert "quant_state.offset has values that differ between ranks" in text
    first, second = ranks2.run(_other_quantization, True)
    assert first == second
    assert isinstance(first, set)  # offsets, not the text of an error


def test_weights_that_cannot_be_sharded_are_refused_by_name():
    """Before anything is communicated: one process without ranks is enough."""
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: it quantizes the base")
    eight, packed = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    eight[0].weight = bnb.nn.Int8Params(eight[0].weight.data, requires_grad=False, has_fp16_weights=False)
    packed[0].weight.quant_state = SimpleNamespace(packing_format_for_cpu=True)
    for model, says in ((eight, "0.weight is quantized to 8 bits"), (packed, "0.weight was packed by bitsandbytes")):
        with pytest.raises(zeroamp.WrapError, match=says):
            zeroamp.build_plan(model, zeroamp.policy_from_config(config(3)))


@quietly
def _of_another_torch():
    says = r"(?s)q_proj.base_layer.weight is stored in uint8, but FSDP2 of torch.*bnb_4bit_quant_storage=torch.bfloat16"
    old_torch = mock.patch("zeroamp.wrapping.model_checks.can_shard_integers", return_value=False)
    with old_torch, pytest.raises(zeroamp.WrapError, match=says):
        zeroamp.wrap_model(Adapted(base="nf4 uint8").build(), zeroamp.policy_from_config(config(3)))


def test_a_torch_that_shards_no_integers_is_told_what_to_do(ranks2):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: it quantizes the base")
    ranks2.run(_of_another_torch)


@quietly
def _evaluated():
    adapted = Adapted(base="nf4 uint8")
    *_, model = train_in_one_process(adapted, [2])
    training = AdapterTraining(adapted).run(1)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = model(input_ids=batch(7)).logits  # in training mode, where bitsandbytes leaves its weights alone
        found = training.model.eval()(input_ids=batch(7)).logits
    training.model.train()
    training.run(1, first=2)  # and training goes on
    again = train_in_one_process(adapted, [2, 2])
    assert torch.equal(found, expected)
    assert training.differences(again) == []


def test_an_evaluation_between_two_steps(ranks2):
    """bitsandbytes packs weights in another layout for inference on some CPUs: the shards must not see it."""
    needs_bitsandbytes()
    ranks2.run(_evaluated)


def _taught_by_the_base(stage, with_train_step):
    """Losses and adapters of a distillation from the model without its adapters. Stage None: one process."""
    model = Adapted(base="bf16").build()
    if stage is not None:
        model = zeroamp.wrap_model(model, zeroamp.policy_from_config(config(stage)))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    train = zeroamp.TrainStep(model, optimizer) if with_train_step else None
    losses = []
    for index in range(2):
        tokens = batch(index)
        with torch.autocast("cpu", torch.bfloat16, enabled=stage is None):
            with torch.no_grad(), model.disable_adapter():
                target = model(input_ids=tokens).logits.float().softmax(-1)
            logits = model(input_ids=tokens).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(0, 1))
        losses.append(loss.item())
        if train is not None:
            train.backward(loss)
            train.step()
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = full_parameters(model)
    return losses, {name: whole[name] for name in trained(model)}


@quietly
def _compared_with_the_base_as_teacher():
    losses, adapters = _taught_by_the_base(None, False)
    assert len(set(losses)) == 2
    differences = {}
    for stage, with_train_step in ((0, False), (3, True)):
        found, ours = _taught_by_the_base(stage, with_train_step)
        differences[stage, with_train_step] = found == losses, same_bits(ours, adapters)
    return differences


def test_the_base_of_adapters_teaches_as_in_one_process(ranks2):
    """docs/losses.md: `disable_adapter` switches the adapters off for the forward of the teacher."""
    for found in ranks2.run(_compared_with_the_base_as_teacher):
        assert found == dict.fromkeys(found, (True, []))
