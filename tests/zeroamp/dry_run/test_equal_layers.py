"""A few of many equal layers, repeated, are the same events as all of them."""

import pytest
import torch
from torch import nn

import zeroamp
from tests.models.small import Block, Llama, hf_llama_config
from tests.processes.training import config
from tests.selection import slow_but
from zeroamp.dry_run.equal_layers import find_repeats, trace_few_layers
from zeroamp.dry_run.inputs import arguments_for
from zeroamp.dry_run.traced_micro_batch import trace_micro_batch

NUM_LAYERS = 7


class ByNumber(Llama):
    """Asks for its layers by their numbers."""

    def logits(self, tokens):
        x = self.embed(tokens)
        for index in range(NUM_LAYERS):
            x = self.blocks[index](x)
        return self.head(self.norm(x))


class Alternating(Llama):
    """Uses every other layer in another way, which the layers themselves do not show."""

    def logits(self, tokens):
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x.tanh() if index % 2 else x)
        return self.head(self.norm(x))


class Hf:
    def __new__(cls, tied, num_blocks):
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**{**hf_llama_config().to_dict(), "num_hidden_layers": num_blocks}))


def _build(cls):
    with torch.device("meta"):
        model = cls(tied=False, num_blocks=NUM_LAYERS)
    plan = zeroamp.build_plan(model, zeroamp.policy_from_config(config(3, threshold=0)))
    inputs = None if cls is Hf else lambda batch, seq: torch.zeros(batch, seq, dtype=torch.long)
    return model, plan, arguments_for(model, 2, 12, inputs)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("cls", slow_but([Llama, ByNumber, Alternating, Hf], Llama, Alternating))
def test_the_events_are_those_of_all_layers(cls, checkpointing):
    model, plan, arguments = _build(cls)
    assert [len(repeat.names) for repeat in find_repeats(model, plan)] == [NUM_LAYERS]
    modules = list(model.modules())
    few = trace_few_layers(model, plan, arguments, device_type="cpu", checkpointing=checkpointing)
    everything = trace_micro_batch(model, plan, arguments, device_type="cpu", checkpointing=checkpointing)
    assert list(few.events) == list(everything.events)
    assert few.constant_bytes == everything.constant_bytes
    assert list(model.modules()) == modules


def _unlike(model, how):
    block: Block = model.blocks[5]
    if how == "class":
        model.blocks[5] = type("Other", (Block,), {})()
    elif how == "shape":
        block.qkv = nn.Linear(block.qkv.in_features, 3 * block.qkv.in_features)
    elif how == "frozen":
        block.norm1.requires_grad_(False)
    elif how == "attribute":
        block.heads = 2
    elif how == "training":
        block.norm2.eval()


@pytest.mark.parametrize("how", ["class", "shape", "frozen", "attribute", "training"])
def test_a_list_with_one_layer_that_differs_is_not_repeated(how):
    with torch.device("meta"):
        model = Llama(tied=False, num_blocks=NUM_LAYERS)
        _unlike(model, how)
    plan = zeroamp.build_plan(model, zeroamp.policy_from_config(config(3)), {"Block"} | ({"Other"} & {how.title()}))
    assert list(find_repeats(model, plan)) == []


def test_the_number_of_a_layer_is_no_difference():
    with torch.device("meta"):
        model = Llama(tied=False, num_blocks=NUM_LAYERS)
    for index, block in enumerate(model.blocks):
        block.layer_idx = index
    plan = zeroamp.build_plan(model, zeroamp.policy_from_config(config(3)))
    assert len(list(find_repeats(model, plan))) == 1
    model.blocks[2].layer_idx = 3
    assert list(find_repeats(model, plan)) == []
