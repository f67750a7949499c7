"""A small Llama with adapters of peft, its base in fp32, bf16 or NF4 of bitsandbytes. Imports nothing of zeroamp."""

import copy
import functools
import logging
import warnings
from dataclasses import dataclass, field

import torch

VOCABULARY, LENGTH = 64, 16
LINEARS = ("q_proj", "v_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """How a model is built. Every process builds the same one."""

    base: str = "fp32"
    """ "fp32", "bf16", or "nf4 <quant storage>"."""
    dora: bool = False
    lora: dict = field(default_factory=dict)
    """Further arguments of `LoraConfig`."""
    tied: bool = False
    seed: int = 0
    """Of the adapters. The base has a seed of its own."""

    def base_model(self):
        """The model without adapters; with NF4 its Linears, but the head, are quantized."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=self.tied,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        if self.base == "bf16":
            model.to(torch.bfloat16)
        if self.base.startswith("nf4"):
            quantize(model, getattr(torch, self.base.split()[1]))
        return model

    def build(self):
        """The model with adapters, in training mode."""
        import peft

        model = self.base_model()
        torch.manual_seed(2 + self.seed)
        arguments = {"r": 4, "lora_alpha": 8, "target_modules": list(LINEARS), **self.lora}
        config = peft.LoraConfig(task_type="CAUSAL_LM", use_dora=self.dora, **arguments)
        model = peft.get_peft_model(model, config)
        fill_b(model)
        return model.train()


def fill_b(model):
    """Give every B values, which peft sets to zero: else A has no gradient in the first step."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.02)


def quantize(model, storage):
    """Replace the Linears of the decoder layers by NF4 ones of bitsandbytes, as from_pretrained does."""
    import bitsandbytes as bnb

    for layer in model.model.layers:
        for name, linear in list(layer.named_modules()):
            if not isinstance(linear, torch.nn.Linear):
                continue
            new = bnb.nn.Linear4bit(
                linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4",
                quant_storage=storage,
            )  # fmt: skip
            new.weight = bnb.nn.Params4bit(
                linear.weight.data, requires_grad=False, quant_type="nf4", quant_storage=storage, module=new
            )
            parent, _, child = name.rpartition(".")
            setattr(layer.get_submodule(parent), child, new.to("cpu"))
    model.is_loaded_in_4bit = True
    model.is_quantized = True


def batch(index):
    """Token ids, (2, LENGTH), of the micro-batch of this number."""
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)


def loss_of(model, index):
    """The loss of the micro-batch of this number. Its number is the seed of the dropout too."""
    torch.manual_seed(index)
    tokens = batch(index)
    return model(input_ids=tokens, labels=tokens).loss


def trained(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def quietly(body):
    """Run a body without the warnings of peft, transformers and bitsandbytes, which are errors in ranks."""

    @functools.wraps(body)
    def run(*args, **kwargs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.getLogger("transformers").setLevel(logging.ERROR)
            return body(*args, **kwargs)

    return run


def train_in_one_process(adapted, num_ranks):
    """The oracle: peft and torch.autocast, ranks one after the other, their gradients averaged.

    num_ranks: of each optimizer step. Returns (losses[step][rank], norms[step], {name: trained parameter}, model).
    """
    model = adapted.build()
    parameters = trained(model)
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, weight_decay=0.1)
    losses, norms, done = [], [], 0
    for num in num_ranks:
        losses.append([])
        of_ranks = []
        for index in range(done, done + num):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, index)
            losses[-1].append(float(loss.detach()))
            of_ranks.append(torch.autograd.grad(loss.float(), list(parameters.values())))
        done += num
        for parameter, gradients in zip(parameters.values(), zip(*of_ranks, strict=True), strict=True):
            parameter.grad = sum(gradients[1:], gradients[0]) / num
        squares = [torch.linalg.vector_norm(p.grad, dtype=torch.float64).square() for p in parameters.values()]
        norms.append(float(torch.stack(squares).sum().sqrt().float()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: copy.deepcopy(p.detach()) for name, p in parameters.items()}, model


def merged(whole, scaling):
    """The weights of the base in bf16, by its names: {FQN: whole fp32 tensor} of a model, with its LoRA merged."""
    for name in [name for name in whole if ".lora_B." in name]:
        a, b = whole.pop(name.replace("lora_B", "lora_A")), whole.pop(name)
        whole[name.replace("lora_B.default", "base_layer")] += (b @ a) * scaling
    names = {name.removeprefix("base_model.model.").replace(".base_layer", ""): name for name in whole}
    return {name: whole[own].bfloat16() for name, own in names.items()}
