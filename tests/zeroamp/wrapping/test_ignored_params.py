"""`wrap_model(ignored_params=...)`: those parameters stay whole, are not cast, and only the caller reduces them."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.processes.training import Run, check_same_run, config, full_parameters, policy, same_bits, train
from tests.selection import slow_but
from zeroamp.training.step import step_of

NAME = "two_blocks_untied"
IGNORED = ("embed.weight", "blocks.0.out.weight", "norm.weight")


def _wrapped(cfg, names=IGNORED, prepare=lambda model: None):
    model = build(NAME)
    prepare(model)
    return zeroamp.wrap_model(model, policy(cfg), ignored_params={model.get_parameter(name) for name in names})


def _training(cfg):
    model = _wrapped(cfg)
    return model, zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))


def _steps(model, step, indices, cfg):
    """Train as `tests.processes.training.train` does; the caller averages the ignored gradients, once per step."""
    rank, world_size, accumulation = dist.get_rank(), dist.get_world_size(), cfg["gradient_accumulation_steps"]
    losses, norms = [], []
    for index in indices:
        losses.append([])
        for micro in range(accumulation):
            loss = loss_of(model, batch(NAME, (index * accumulation + micro) * world_size + rank))
            losses[-1].append(float(loss.detach()))
            step.backward(loss)
            if micro + 1 == accumulation:
                for name in IGNORED:
                    gradient = model.get_parameter(name).grad
                    dist.all_reduce(gradient)
                    gradient /= world_size
            report = step.step()
        norms.append(report.grad_norm)
    return Run(losses=losses, norms=norms, parameters=full_parameters(model))


def _trains_as_sharded(cfg):
    model, step = _training(cfg)
    held = [model.get_parameter(name) for name in IGNORED]
    assert {type(parameter) for parameter in held} == {nn.Parameter}
    check_same_run(_steps(model, step, range(2), cfg), train(NAME, cfg, 2))
    assert all(model.get_parameter(name) is parameter for name, parameter in zip(IGNORED, held, strict=True))


CONFIGS = {
    "stage 0": config(0, clip=0.5),
    "stage 1": config(1, accumulation=2),
    "stage 3": config(3, clip=0.5),
    "stage 3, fp16": config(3, dtype="float16", fp16={"initial_scale_power": 8}),
}


@pytest.mark.parametrize("name", slow_but(CONFIGS, "stage 3", "stage 3, fp16"))
def test_what_the_caller_reduces_trains_as_if_it_were_sharded(ranks2, name):
    """Losses, norms (which count it once), clipping and parameters: the same bits."""
    ranks2.run(_trains_as_sharded, CONFIGS[name])


def _norm_of_local_gradients():
    """Gradients that the caller does not reduce: the norm has the mean of their squares over ranks."""
    model, step = _training(config(3))
    step.backward(loss_of(model, batch(NAME, dist.get_rank())))
    squares = torch.zeros(2, dtype=torch.float64)
    step_of(step).finish()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.to_local() if isinstance(parameter, DTensor) else parameter.grad
        squares[int(name in IGNORED)] += gradient.double().square().sum()
    local = [model.get_parameter(name).grad.clone() for name in IGNORED]
    norm = float(step.clip_grad_norm())
    dist.all_reduce(squares)
    assert norm == pytest.approx(float((squares[0] + squares[1] / 2).sqrt()), rel=1e-6)  # fp64 sums in another order
    assert all(torch.equal(g, model.get_parameter(name).grad) for name, g in zip(IGNORED, local, strict=True))
    return local[0].tolist()


def test_gradients_stay_local_and_their_mean_square_is_in_the_norm(ranks2):
    first, second = ranks2.run(_norm_of_local_gradients)
    assert first != second


def _values_of_each_rank():
    """Frozen and ignored, in bf16 and in an integer dtype, with values of each rank's own."""

    def prepare(model):
        weight = model.get_parameter("blocks.0.out.weight")
        weight.requires_grad_(False)
        weight.data = weight.data.bfloat16() + dist.get_rank()
        model.counts = nn.Parameter(torch.arange(5) + dist.get_rank(), requires_grad=False)

    model = _wrapped(config(3), ["blocks.0.out.weight", "counts"], prepare)
    step = zeroamp.TrainStep(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    step.backward(loss_of(model, batch(NAME, dist.get_rank())))
    step.step()
    assert model.get_parameter("blocks.0.out.weight").dtype == torch.bfloat16
    assert model.counts.tolist() == [dist.get_rank() + i for i in range(5)]
    ledger = zeroamp.explain(model)
    row = next(row for row in ledger.parameter_rows() if row["parameter"] == "counts")
    assert row["group"] == "ignored:int64"
    assert row["why"] == "ignored_params: whole on each rank, and its gradient is not reduced"
    assert row["stored_bytes_per_rank"] == 5 * 8
    assert row["all_gathered_bytes_per_step"] == row["reduced_bytes_per_step"] == 0
    assert "ignored:bf16" in str(ledger)
    ledger.verify(model, batch(NAME, 0))


def test_values_may_differ_between_ranks_and_are_listed(ranks2):
    ranks2.run(_values_of_each_rank)


def _resumed(folder):
    cfg = config(3)
    expected = _steps(*_training(cfg), range(2), cfg)
    model, step = _training(cfg)
    _steps(model, step, range(1), cfg)
    zeroamp.save_checkpoint(folder / "checkpoints", model, step)
    zeroamp.export_hf(model, folder / "export")
    exported = full_parameters(model)
    model, step = _training(cfg)
    zeroamp.load_checkpoint(folder / "checkpoints", model, step)
    found = _steps(model, step, range(1, 2), cfg)
    assert (found.losses, found.norms) == (expected.losses[1:], expected.norms[1:])
    assert same_bits(found.parameters, expected.parameters) == []
    assert same_bits(load_file(folder / "export/model.safetensors"), exported) == []
    zeroamp.load_hf(model, folder / "export")
    assert same_bits(full_parameters(model), exported) == []


def test_checkpoints_exports_and_loads_have_them(ranks2, tmp_path):
    ranks2.run(_resumed, tmp_path)


def _hooked(method):
    """Return the error for a hook on a parameter, and whether the hook of an ignored one runs."""
    calls, texts = [], []
    for ignored in ((), ("embed.weight",)):
        model = build(NAME)
        getattr(model.get_parameter("embed.weight"), method)(lambda _: calls.append(1))
        try:
            params = {model.get_parameter(name) for name in ignored}
            model = zeroamp.wrap_model(model, policy(config(3)), ignored_params=params)
        except zeroamp.WrapError as error:
            texts.append(str(error))
            continue
        loss_of(model, batch(NAME, 0)).backward()
    return texts, calls


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_that_would_be_lost_are_refused(ranks2, method):
    texts, calls = ranks2.run(_hooked, method)[0]
    assert calls == [1]
    (text,) = texts
    assert f"embed.weight has a hook of {method}, which its sharded parameter would not have" in text


def _reduced(stage):
    cfg = config(stage, accumulation=2)
    model = zeroamp.wrap_model(build(NAME), policy(cfg))
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    calls = []
    weight = model.get_parameter("embed.weight")
    weight.register_post_accumulate_grad_hook(lambda param: calls.append(isinstance(param.grad, DTensor)))
    weight.register_hook(lambda _: calls.append("register_hook"))
    for micro in range(2):
        step.backward(loss_of(model, batch(NAME, micro)))
        step.step()
    return calls


@pytest.mark.parametrize(("stage", "num_reductions"), [(1, 1), (3, 2)], ids=["once per step", "per micro-batch"])
def test_of_hooks_registered_after_wrap_model_those_after_accumulation_run(ranks2, stage, num_reductions):
    assert ranks2.run(_reduced, stage) == [[True] * num_reductions] * 2


def _errors():
    rank = dist.get_rank()
    other = nn.Parameter(torch.zeros(3))
    texts = []
    for make in (
        lambda model: {other},
        lambda model: {"embed.weight"},
        lambda model: model.embed.weight,
        lambda model: {model.get_parameter(("embed.weight", "norm.weight")[rank])},
    ):
        model = build(NAME)
        with pytest.raises(zeroamp.WrapError) as error:
            zeroamp.wrap_model(model, policy(config(3)), ignored_params=make(model))
        texts.append(str(error.value))
    return texts


def test_what_cannot_be_meant_is_refused(ranks2):
    for texts in ranks2.run(_errors):
        foreign, name, tensor, differing = texts
        assert "ignored_params contains a Parameter of shape (3,) that is not a parameter of the model" in foreign
        assert "not names" in name
        assert "ignored_params must be a set or list of parameters, but is a Parameter" in tensor
        assert "ignored" in differing


@pytest.mark.parametrize("safe", [None, "auto"])
def test_nothing_left_for_the_low_dtype_is_an_error(safe):
    """If nothing is left for the low dtype the error names `ignored_params`."""
    model = build(NAME)
    autocast = {"enabled": True, "dtype": "bf16"} | ({} if safe is None else {"lower_precision_safe_modules": safe})
    cfg, every = policy(config(3, dtype=None, torch_autocast=autocast)), list(model.parameters())
    with pytest.raises(zeroamp.ConfigError, match="ignored_params contains all parameters of Llama, so"):
        zeroamp.build_plan(model, cfg, example_inputs=batch(NAME, 0), ignored_params=every)
