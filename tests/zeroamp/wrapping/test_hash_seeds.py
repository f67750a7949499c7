"""Nothing that ranks compare, send, write or print depends on the order of a set, which differs between processes."""

import filecmp
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import zeroamp
import zeroamp.deepspeed as deepspeed
from tests.models.adapters import quietly
from tests.models.families import loss_of
from tests.models.kept_in_fp32 import KEPT_IN_FP32
from tests.models.small import ConvNet, Llama, build
from tests.processes import cli, launch
from tests.processes.ranks import Ranks
from tests.processes.training import full_parameters
from zeroamp.hooks.observers.observed_dtypes import Observations, OpObserver
from zeroamp.integrations.config_values import fill_config
from zeroamp.ledger.explain import explain
from zeroamp.policies.auto_wrap import find_units
from zeroamp.policies.errors import StepError, ZeroAmpError
from zeroamp.wrapping.state import wrap_state, wrapped_models

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")


def _order():
    return list(set(WORDS)), "PYTHONHASHSEED" in launch.environment()


def test_each_rank_has_a_hash_seed_of_its_own(ranks4):
    orders, are_inherited = zip(*ranks4.run(_order), strict=True)
    assert len(set(map(tuple, orders))) == 4
    assert not any(are_inherited)  # so that ranks of torchrun in a test differ too


def _kinds():
    return [type(word, (nn.Linear,), {}) for word in WORDS]


class _Mixed(nn.Module):
    """Modules whose class names differ in case only, so that a hint may name any of them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(type(name, (nn.Linear,), {})(2, 2) for name in ("BLOCKS", "blockS", "BLockS"))


def _text(action, *args, **kwargs):
    try:
        return str(action(*args, **kwargs))
    except ZeroAmpError as error:
        return str(error)


def _foreign():
    return {nn.Parameter(torch.ones(size)) for size in range(1, 20)}


def _texts():
    """Return what differs if the order of a set decides: errors, orders of keys and of names."""
    policy = zeroamp.policy_from_config({})
    observations = Observations()
    observer = OpObserver(observations)
    tensors = {word: torch.ones(2) for word in WORDS}
    for word, tensor in tensors.items():
        observer.follow(word, tensor)
    with observer:
        torch.stack(list(tensors.values())).sum()  # the stack has all names
    models = [build("conv") for _ in range(4)]
    for model in models:
        zeroamp.wrap_model(model, {})
    own = [place for model in wrapped_models() for place, mine in enumerate(models) if mine is model]
    known = {key: ("argument", value) for key, value in (("gradient_accumulation_steps", 2), ("gradient_clipping", 1))}
    found = {
        "names of a wrap policy": _text(zeroamp.wrap_model, Llama(tied=True), {}, auto_wrap_policy=set(WORDS)),
        "classes of a wrap policy": _text(find_units, Llama(tied=True), set(_kinds())),
        "objects in a wrap policy": _text(find_units, Llama(tied=True), {object(), print, _text, 3, b"x", len}),
        "a wrap policy of FSDP1": _text(find_units, Llama(tied=True), ModuleWrapPolicy(set(_kinds()))),
        "ignored parameters": _text(zeroamp.wrap_model, ConvNet(), {}, ignored_params=_foreign()),
        "a set as a config": _text(zeroamp.policy_from_config, set(WORDS)),
        "a function as a config": _text(zeroamp.policy_from_config, _text),
        "a function as a safe module": _text(
            zeroamp.wrap_model,
            ConvNet(),
            {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.functional.linear"]}},
        ),
        "a hint of an override": _text(
            zeroamp.wrap_model,
            _Mixed(),
            {"zeroamp": {"overrides": [{"modules": ["blockss"], "param": "fp32"}]}, "bf16": {"enabled": True}},
        ),
        "keys from arguments": list(fill_config(policy, known, precision=None, arguments="those")),
        "names of an op": list(observations.seen),
        "wrapped models": own,
    }
    assert own == list(range(4))
    return found


def test_texts_and_orders_are_those_of_every_rank(ranks2):
    first, *others = ranks2.run(_texts)
    assert all(each == first for each in others)
    assert "alpha matches no module" in first["names of a wrap policy"]
    assert "the set {'alpha', 'beta', 'delta'" in first["a set as a config"]
    assert not any("rank 1" in str(text) for text in first.values())


def _gathered():
    engine = deepspeed.initialize(model=build("conv"), config={"zero_optimization": {"stage": 3}})[0]
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    before = full_parameters(engine.module)
    with deepspeed.zero.GatheredParameters(set(names), modifier_rank=1), torch.no_grad():
        for parameter in names:
            parameter.add_(dist.get_rank())
    after = full_parameters(engine.module)
    assert all(torch.equal(after[name], before[name] + 1) for name in before)
    with pytest.raises(StepError, match="Pass a list"):
        deepspeed.zero.GatheredParameters(_foreign(), modifier_rank=0).__enter__()


def test_a_set_of_sharded_parameters_is_gathered_in_one_order(ranks2):
    ranks2.run(_gathered)


_MODES = {"bf16": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "fp16": {"fp16": {"enabled": True}}}


@quietly
def _trained(name, folder, with_commands):
    """Train two steps, save and export. Return this rank's texts, the whole parameters, and on the first rank what
    `explain` and `plan` print."""
    random.seed(0)  # a checkpoint has the state of these generators
    np.random.seed(0)
    family, mode = KEPT_IN_FP32[name]
    folder, rank = Path(folder), dist.get_rank()
    cfg = {**_MODES[mode], "zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}
    model = zeroamp.wrap_model(family.seeded(), cfg)
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for step in range(2):
        loss = loss_of(model, family.batch(2 * step + rank))
        train.backward(loss)
        losses.append(train.step().loss)
    zeroamp.save_checkpoint(folder / "checkpoints", model, train)
    zeroamp.export_hf(model, folder / "export")
    ledger, plan = explain(model), wrap_state(model).plan
    texts = [f"{ledger}", ledger.per_parameter(), json.dumps(ledger.to_dict()), f"{plan.fp32_regions}{plan.groups}"]
    texts += [str(list(model.state_dict())), str(losses)]
    return texts, _bits(model), _commands(family, cfg, folder) if with_commands and rank == 0 else []


def _bits(model):
    """Return the whole parameters as bytes."""
    return {fqn: tensor.numpy().tobytes() for fqn, tensor in full_parameters(model).items()}


def _commands(family, cfg, folder):
    """Return what `explain` and `plan` print of the family, as JSON."""
    path = folder / "config.json"
    path.write_text(json.dumps(cfg))
    module = sys.modules[__name__]
    module.of_command = family.build
    module.inputs = lambda batch, seq: {
        name: value[:1].repeat(batch, *[1] * (value.dim() - 1)) if isinstance(value, torch.Tensor) else value
        for name, value in family.batch(0).items()
    }
    model = ("--model", f"{__name__}:of_command", "--inputs", f"{__name__}:inputs", "--world-size", 2, "--json")
    one_trace = ("--seq", 9, "--batch", 1, "--gpu", 4.5)  # the search for the largest batch traces more
    found = [cli.run("explain", path, *model), cli.run("plan", path, *model, *one_trace)]
    assert [code for code, _, _ in found] == [0, 0], found
    return [f"{code} {out} {err}".replace(str(path), "") for code, out, err in found]


def _same_files(first, second):
    """Return the files of two folders that differ.

    torch writes a random number into `.metadata`; `zeroamp.json` has the digest of that. The metadata of exported
    weights has the id of the export, so their tensors are compared.
    """
    names = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file() and path.suffix)
    assert names == sorted(path.relative_to(second) for path in second.rglob("*") if path.is_file() and path.suffix)
    assert len(names) >= 5
    weights = [name for name in names if name.suffix == ".safetensors"]
    for name in weights:
        one, other = (safetensors.torch.load_file(folder / name) for folder in (first, second))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    return [
        str(name)
        for name in names
        if name not in weights and name.name != "zeroamp.json" and not filecmp.cmp(first / name, second / name, False)
    ]


def _agree(ranks, name, folder, *, with_commands):
    """Return the texts and the bits of a family, which all ranks must have, and what the commands print."""
    folder.mkdir()
    (texts, bits, printed), *others = ranks.run(_trained, name, str(folder), with_commands)
    for other_texts, other_bits, _ in others:
        assert other_texts == texts
        assert other_bits == bits
    return texts, bits, printed


@pytest.mark.parametrize("name", ["DeepSeek-V3", "gpt-oss"])
def test_a_family_is_alike_on_ranks_with_other_seeds(ranks2, name, tmp_path):
    pytest.importorskip("transformers", reason="the models are transformers'")
    _agree(ranks2, name, tmp_path / "first", with_commands=False)


@pytest.fixture(scope="module")
def other_ranks2():
    ranks = Ranks(2, first_server=2)
    yield ranks
    ranks.stop()


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT_IN_FP32)
def test_a_family_has_the_files_and_texts_of_other_seeds(ranks2, other_ranks2, name, tmp_path):
    pytest.importorskip("transformers", reason="the models are transformers'")
    folders = tmp_path / "first", tmp_path / "other"
    first, other = (
        _agree(ranks, name, folder, with_commands=True)
        for ranks, folder in zip((ranks2, other_ranks2), folders, strict=True)
    )
    assert other == first
    assert _same_files(*folders) == []
