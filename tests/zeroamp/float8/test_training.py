"""`zeroamp.param_gather_dtype`: weights of Linears that are all-gathered in float8, by torchao's tensors."""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import zeroamp
from tests.measuring.traffic import planned_and_counted
from tests.models.small import batch, build, loss_of
from tests.oracles import one_process
from tests.oracles.float8_weights import round_linears
from tests.processes.ranks import RankError
from tests.processes.training import SmallTraining, check_runs, config, full_parameters, same_bits, train, wrapped
from tests.selection import slow_but
from zeroamp.float8 import extension
from zeroamp.float8.conflicts import KEY
from zeroamp.float8.extension import check_float8_model
from zeroamp.policies.extensions import extensions_of

pytest.importorskip("torchao", reason="float8 all-gathers are torchao's")

NAME = "llama_untied"
BF16 = {"dtype": None, "bf16": {"enabled": True}}


def float8(stage=3, *, zeroamp=None, **options):
    return config(stage, zeroamp={"param_gather_dtype": "float8_e4m3fn", **(zeroamp or {})}, **options)


@torch.no_grad()
def uneven(model):
    """Make the first rows of all weights so large that shards by themselves would have other scales."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight[0] *= 5


def uneven_and_rounded(model):
    uneven(model)
    round_linears(model)


@pytest.mark.parametrize(("stage", "mode"), [(3, "autocast"), (1, "bf16")])
def test_the_bits_are_those_of_one_process_that_rounds_its_weights(ranks2, stage, mode):
    cfg = float8(stage, accumulation=2, clip=0.5, **(BF16 if mode == "bf16" else {}))
    low_model = torch.bfloat16 if mode == "bf16" else None
    options = {"accumulation": 2, "clip": 0.5, "reduce_each": stage > 1, "low_model": low_model}
    expected = one_process.train(NAME, world_size=2, num_steps=3, prepare=uneven_and_rounded, **options)
    check_runs(ranks2.run(train, NAME, cfg, 3, prepare_before=uneven), expected)
    plain, _, _ = one_process.train(NAME, world_size=2, num_steps=1, prepare=uneven, **options)
    assert plain[0] != expected[0][0]  # the weights were rounded


ON_FOUR = {
    "padded shards": ("odd_rows", {}, {}, {}),
    "a tied head": ("llama_tied", {}, {}, {"left_out": ("head",)}),
    "HSDP": (NAME, {}, {"mesh_shape": (2, 2)}, {}),
    "nodes": (NAME, {"ranks_per_node": 2}, {}, {}),
    "reproducible": (NAME, {"reproducible": True}, {}, {}),
}


@pytest.mark.parametrize("what", slow_but(ON_FOUR, "padded shards", "a tied head", "HSDP", "nodes"))
def test_models_meshes_and_other_options_on_four_ranks(ranks4, what):
    name, keys, options, rounding = ON_FOUR[what]
    prepare, num_replicas = partial(round_linears, **rounding), 2 if what == "HSDP" else 1
    expected = one_process.train(name, world_size=4, num_steps=2, num_replicas=num_replicas, prepare=prepare)
    check_runs(ranks4.run(train, name, float8(3, zeroamp=keys), 2, **options), expected)


def _verified(cfg):
    model = wrapped(NAME, cfg)
    ledger = zeroamp.explain(model)
    assert ledger.verify(model, (batch(NAME, 0),)).is_traffic_as_planned
    planned, counted = planned_and_counted(model, batch(NAME, 0))
    assert planned == counted
    rows = {row["parameter"]: (row["param"], row["compute"], row["gradient"]) for row in ledger.to_dict()["parameters"]}
    assert rows["blocks.0.qkv.weight"] == ("float8_e4m3fn", "bf16", "bf16")
    assert rows["blocks.0.down.bias"] == ("bf16", "bf16", "bf16")
    return {key.dtype for key in zeroamp.traffic(model).calls if key.collective == "all_gather"}


@pytest.mark.parametrize("options", [{}, BF16], ids=["autocast", "bf16"])
def test_the_ledger_verifies_and_traffic_is_as_planned(ranks2, options):
    dtypes = ranks2.run(_verified, float8(accumulation=2, **options))[0]
    assert torch.bfloat16 not in dtypes  # bytes, of weights and biases in one buffer
    assert (torch.float8_e4m3fn in dtypes) is (not options)  # the head, alone in its group


def _steps(training, begin, end):
    reports = [training.step(index) for index in range(begin, end)]
    return [(report.loss, report.grad_norm) for report in reports]


def _resume(cfg, folder):
    first, second = (SmallTraining(cfg, partial(torch.optim.AdamW, lr=1e-2), name=NAME) for _ in range(2))
    _steps(first, 0, 2)
    path = zeroamp.save_checkpoint(folder, first.model, first.train)
    saved = first.parameters()
    through = _steps(first, 2, 4)
    _scale_weights(second.model, 8)  # so that it has other scales
    _steps(second, 0, 1)
    zeroamp.load_checkpoint(path, second.model, second.train)
    zeroamp.export_hf(second.model, f"{folder}/exported")
    assert _steps(second, 2, 4) == through
    kinds = {(parameter.dtype, type(parameter.to_local())) for parameter in second.model.parameters()}
    assert kinds == {(torch.float32, torch.Tensor)}
    assert same_bits(first.parameters(), second.parameters()) == []
    return saved


def test_a_resumed_run_is_exact_and_checkpoints_are_plain(ranks2, tmp_path):
    for saved in ranks2.run(_resume, float8(3), str(tmp_path)):
        assert all(torch.count_nonzero(value.view(torch.int32) & 0xFFFF) for value in saved.values())  # not rounded
        assert same_bits(load_file(tmp_path / "exported" / "model.safetensors"), saved) == []


LARGE_LR = 0.2
"""So large that a step changes scales, which are powers of two."""


def _plain_loop(cfg, compiles):
    warnings.filterwarnings("ignore", "<class 'torch.autograd.function.Function'>", DeprecationWarning)  # dynamo's
    model = build(NAME)
    for block in model.blocks if compiles else ():
        block.compile(backend="aot_eager", fullgraph=True)
    model = zeroamp.wrap_model(model, cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LARGE_LR, weight_decay=0.1)
    losses = []
    for index in range(3):
        with torch.inference_mode():
            model(batch(NAME, 99))
        loss = loss_of(model, batch(NAME, 2 * index + dist.get_rank()))
        losses.append([float(loss.detach())])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, full_parameters(model)


@pytest.mark.parametrize(("stage", "compiles"), [(3, False), pytest.param(3, True, marks=pytest.mark.slow)])
def test_a_plain_loop_with_evaluations_uses_no_old_scale(ranks2, stage, compiles):
    losses, _, expected = one_process.train(NAME, world_size=2, num_steps=3, prepare=round_linears, lr=LARGE_LR)
    for rank, (own, parameters) in enumerate(ranks2.run(_plain_loop, float8(stage), compiles)):
        assert own == [step[rank] for step in losses]
        assert same_bits(parameters, expected) == []


def _called_by_itself(cfg):
    with torch.device("meta"):
        model = build(NAME)
    model = zeroamp.wrap_model(model, cfg)
    block, x, largest = model.blocks[1], torch.randn(2, 4, 32).bfloat16(), []
    with torch.no_grad():
        for factor in (1.0, 3.0):
            block.down.weight.mul_(factor)
            block(x)
            block.unshard()
            weight = block.down.weight
            largest.append(float((weight._data.float() / weight._scale).abs().max()))
            block.reshard()
    assert largest[1] == pytest.approx(3 * largest[0], rel=2**-4)


def test_a_module_that_is_called_by_itself_has_its_scale(ranks2):
    """A module that is called by itself has the scale of its weight now."""
    ranks2.run(_called_by_itself, float8(3, **BF16))


def _two_linears():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))


def _scale_weights(model, factor):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


def _other_weights_before_the_backward(cfg, factor):
    """Evaluate the weights times `factor` between a forward and its backward; return that output, and parameters."""
    model = zeroamp.wrap_model(_two_linears(), cfg, auto_wrap_policy={"Linear"})
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0))
    x = torch.ones(2, 16)
    output = model(x)
    _scale_weights(model, factor)
    with torch.no_grad():
        evaluated = model(x)
    _scale_weights(model, 1 / factor)
    step.backward(output.float().square().sum())
    step.step()
    return evaluated, full_parameters(model)


def test_weights_that_change_inside_of_a_step_have_scales(ranks2):
    """Weights that change inside of a step have scales of their own there and in the backward."""
    cfg = float8(3, **BF16)
    _, undisturbed = ranks2.run(_other_weights_before_the_backward, cfg, 1.0)[0]
    for factor in (8.0, 0.125):
        plain = _two_linears()
        _scale_weights(plain, factor)
        round_linears(plain)
        low = copy.deepcopy(plain).bfloat16()  # its Linears round the fp32 weights of `plain`
        for evaluated, parameters in ranks2.run(_other_weights_before_the_backward, cfg, factor):
            assert torch.equal(evaluated, low(torch.ones(2, 16, dtype=torch.bfloat16)))
            assert same_bits(parameters, undisturbed) == []


def _twice(cfg):
    model = zeroamp.wrap_model(_two_linears(), cfg, auto_wrap_policy={"Linear"})
    x = torch.ones(2, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).float().square().sum(), x, create_graph=True)
    gradient.square().sum().backward()


def test_a_second_derivative_is_an_error(ranks2):
    with pytest.raises(RankError, match=r"create_graph=True"):
        ranks2.run(_twice, float8(2, **BF16))


def _saved_shapes(cfg):
    model, seen = wrapped(NAME, cfg), []

    def pack(tensor):
        is_float8 = hasattr(tensor, "_data")
        seen.append((tuple(tensor.shape), tensor.dtype, is_float8))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model, batch(NAME, 0)).backward()
    return seen


def test_no_bf16_copy_of_a_weight_is_kept_for_the_backward(ranks2):
    seen = ranks2.run(_saved_shapes, float8(3))[0]
    shape = (128, 32)  # of gate_up
    assert {(dtype, is_float8) for each, dtype, is_float8 in seen if each in (shape, shape[::-1])} == {
        (torch.bfloat16, True)
    }


class OfPeft(nn.Module):
    __module__ = "peft.tuners.made_up"


def test_adapters_are_refused():
    model = build(NAME)
    model.blocks[0].adapter = OfPeft()
    with pytest.raises(zeroamp.WrapError, match=rf"^{KEY} is not supported with adapters of peft \(blocks.0.adapter\)"):
        check_float8_model(model)


@pytest.mark.parametrize("version", [None, "0.17.1"])
def test_torchao_is_needed(monkeypatch, version):
    def found(name):
        if version is None:
            raise extension.metadata.PackageNotFoundError(name)
        return version

    model = build(NAME)
    monkeypatch.setattr(extension.metadata, "version", found)
    what = "0.17.1 is installed" if version else "which is not installed"
    with pytest.raises(zeroamp.ConfigError, match=rf"needs torchao 0\.18 or newer, .*{what}.*zeroamp\[float8\]"):
        check_float8_model(model)
    assert extensions_of(zeroamp.policy_from_config(config(3)), model) == ()
