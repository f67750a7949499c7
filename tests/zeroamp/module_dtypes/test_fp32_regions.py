"""Modules that stay in fp32 whatever the mode, and buffers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zeroamp
from tests.models.small import VOCAB, WIDTH, batch
from zeroamp.module_dtypes.kept_in_fp32 import find_fp32_regions
from zeroamp.module_dtypes.overrides import Overrides

MODES = {
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 64}},
}


def config(mode, stage=3, keep="auto", **data_types):
    types = {"keep_in_fp32_modules": keep, **data_types}
    return {**MODES[mode], "zero_optimization": {"stage": stage}, "data_types": types}


class Router(nn.Module):
    """Says in which dtypes it ran."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH, bias=False)
        self.seen = []

    def forward(self, x):
        y = self.gate(x)
        self.seen.append((x.dtype, self.gate.weight.dtype, y.dtype, torch.is_autocast_enabled("cpu")))
        return y.softmax(-1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router, self.out = nn.LayerNorm(WIDTH), Router(), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("offset", torch.full((WIDTH,), 1 / 3))

    def forward(self, x):
        return x + self.out(self.router(self.norm(x))) * self.offset.to(x.dtype)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def names_of(model, keep, mode="bf16"):
    policy = zeroamp.policy_from_config(config(mode, keep=keep))
    regions = find_fp32_regions(model, policy, Overrides())
    return set(regions.modules), set(regions.tensors)


def test_a_pattern_names_modules_parameters_or_buffers():
    model = Model()
    both = {"blocks.0.router", "blocks.1.router"}
    assert names_of(model, ["router.gate", "router"]) == (both, set())  # the outermost
    assert names_of(model, ["gate.weight"])[1] == {f"{fqn}.gate.weight" for fqn in both}
    assert names_of(model, ["offset"]) == (set(), {"blocks.0.offset", "blocks.1.offset"})


def test_what_transformers_models_say_of_themselves_is_the_default():
    model = Model()
    model._keep_in_fp32_modules_strict = {"router", "of_another_variant"}
    model._keep_in_fp32_modules = ["norm"]
    routers, norms = ({f"blocks.{index}.{name}" for index in (0, 1)} for name in ("router", "norm"))
    assert names_of(model, "auto", "bf16") == names_of(model, "auto", "autocast") == (routers, set())
    assert names_of(model, "auto", "fp16") == (routers | norms, set())
    assert names_of(model, []) == (set(), set())


@pytest.mark.parametrize("pattern", ["rooter", "Module", "block", ""])
def test_a_pattern_that_matches_nothing_is_refused(pattern):
    with pytest.raises(zeroamp.ConfigError, match=f"data_types.keep_in_fp32_modules: '{pattern}'"):
        names_of(Model(), [pattern])


def test_the_plan_says_so():
    plan = zeroamp.build_plan(Model(), zeroamp.policy_from_config(config("autocast", keep=["router", "head.weight"])))
    cells = {p.fqn: (p.dtypes.param, p.dtypes.compute, p.dtypes.communication, p.reason) for p in plan.params}
    said = "kept in fp32: data_types.keep_in_fp32_modules {!r}".format
    assert cells["blocks.0.router.gate.weight"] == (torch.float32, "fp32", torch.float32, said("router"))
    assert cells["head.weight"] == (torch.float32, "per op", torch.float32, said("head.weight"))
    assert cells["blocks.0.out.weight"][:3] == (torch.bfloat16, "bf16", torch.bfloat16)


def _dtypes_in_a_step(mode, stage):
    """Return what the first router says of its runs, and the dtypes that reach the module after it."""
    model, after = Model(), []
    zeroamp.wrap_model(model, zeroamp.policy_from_config(config(mode, stage, ["router", "LayerNorm"])))
    model.blocks[0].out.register_forward_pre_hook(lambda _module, args: after.append(args[0].dtype))
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for index in range(2):
        step.backward(model(batch("llama", index)))
        step.step()
    return set(model.blocks[0].router.seen), set(after)


@pytest.mark.parametrize(
    ("mode", "stage", "outside"),
    [
        ("autocast", 0, torch.float32),
        ("autocast", 3, torch.float32),
        ("bf16", 0, torch.bfloat16),
        ("bf16", 3, torch.bfloat16),
        ("fp16", 3, torch.float16),
    ],
)
def test_a_region_computes_in_fp32(ranks2, mode, stage, outside):
    """A region computes in fp32 and modules around it get the mode's dtype."""
    fp32 = torch.float32
    assert ranks2.run(_dtypes_in_a_step, mode, stage)[0] == ({(fp32, fp32, fp32, False)}, {outside})


def _buffers(mode):
    """Return the dtype of a buffer that two modules share: by default, of a buffer_dtype, and kept in fp32."""
    found = []
    for keep, types in (("auto", {}), ("auto", {"buffer_dtype": "bf16"}), (["offset"], {"buffer_dtype": "bf16"})):
        model = Model()
        model.blocks[1].offset = model.blocks[0].offset
        zeroamp.wrap_model(model, zeroamp.policy_from_config(config(mode, keep=keep, **types)))
        model(batch("llama", 0)).backward()
        assert model.blocks[0].offset is model.blocks[1].offset
        found.append(model.blocks[0].offset.dtype)
    return found


@pytest.mark.parametrize("mode", ["autocast", "bf16"])
def test_no_mode_casts_buffers_unless_asked(ranks2, mode):
    assert ranks2.run(_buffers, mode)[0] == [torch.float32, torch.bfloat16, torch.float32]
