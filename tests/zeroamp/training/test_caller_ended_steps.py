"""Steps that their caller ends: any number of micro-batches, norm and update apart, several optimizers, `zero_grad`."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import zeroamp
from tests.models.small import batch, loss_of
from tests.oracles import one_process
from tests.processes.training import config, full_parameters, same_bits, wrapped
from tests.selection import slow_but
from zeroamp.integrations.loop_driver import reopen
from zeroamp.training.step import driver_of

NAME = "llama_tied"
COUNTS = (1, 3, 2, 4)
CLIP = 0.5
FP16 = {"dtype": None, "fp16": {"enabled": True, "loss_scale": 1024}}


def _trained(cfg, counts, *, by_caller, apart=False, name=NAME):
    """Train with `counts` micro-batches per step; return (losses, norms, parameters, the reports' losses)."""
    model = wrapped(name, cfg)
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))
    losses, norms, mean_losses = [], [], []
    for step, count in enumerate(counts):
        losses.append([])
        for micro in range(count):
            index = (sum(counts[:step]) + micro) * dist.get_world_size() + dist.get_rank()
            loss = loss_of(model, batch(name, index))
            losses[-1].append(float(loss.detach()))
            if by_caller:
                train.backward(loss.float() / count, is_last=micro + 1 == count, divide=False)
            else:
                train.backward(loss)
                report = train.step()
        if apart:
            norm = train.clip_grad_norm()
            report = train.update()
            assert torch.equal(norm, report.grad_norm_tensor)
        elif by_caller:
            report = train.step()
        assert report.step == step + 1
        assert driver_of(train).is_between_steps
        norms.append(report.grad_norm)
        mean_losses.append(report.loss)
    return losses, norms, full_parameters(model), mean_losses


def _all_stages(stages, options, counts, flags):
    return {stage: _trained(config(stage, clip=CLIP, **options), counts, **flags) for stage in stages}


@pytest.mark.parametrize("apart", slow_but([False, True], True))
@pytest.mark.parametrize(
    ("stages", "options", "oracle"),
    [((0, 1), {"comm": "fp32"}, {"reduce_each": False}), ((2, 3), {}, {"reduce_each": True})],
)
def test_any_number_of_micro_batches_equals_one_process(ranks2, stages, options, oracle, apart):
    flags = {"by_caller": True, "apart": apart}
    by_rank = ranks2.run(_all_stages, stages, options, COUNTS, flags)
    losses, norms, parameters = one_process.train(
        NAME, world_size=2, num_steps=len(COUNTS), accumulation=COUNTS, clip=CLIP, **oracle
    )
    for rank, by_stage in enumerate(by_rank):
        for stage, (our_losses, our_norms, our_parameters, mean_losses) in by_stage.items():
            assert our_losses == [ranks[rank] for ranks in losses], f"losses at stage {stage}"
            assert our_norms == norms, f"norms at stage {stage}"
            assert same_bits(our_parameters, parameters) == [], f"parameters at stage {stage}"
            means = [sum(sum(micros) for micros in ranks) / sum(map(len, ranks)) for ranks in losses]
            assert mean_losses == pytest.approx(means, rel=1e-6), "the mean is summed in another order"


OTHERS = [FP16, {"data_types": {"grad_accum_dtype": "bf16"}}, {**FP16, "data_types": {"grad_accum_dtype": "fp16"}}]


@pytest.mark.parametrize(
    "options", slow_but(OTHERS, FP16), ids=["fp16", "accumulated in bf16", "fp16 accumulated in fp16"]
)
def test_the_bits_are_those_of_a_config_of_that_count(ranks2, options):
    counts = (3, 3)
    by_caller = ranks2.run(_all_stages, (0, 1, 2, 3), options, counts, {"by_caller": True})
    by_config = ranks2.run(_all_stages, (0, 1, 2, 3), {**options, "accumulation": 3}, counts, {"by_caller": False})
    for ours, theirs in zip(by_caller, by_config, strict=True):
        for stage in ours:
            assert ours[stage][:2] == theirs[stage][:2], f"stage {stage}"
            assert same_bits(ours[stage][2], theirs[stage][2]) == [], f"stage {stage}"


def _between_norm_and_update():
    """Return the norm, and the norms of the gradients before and after clipping at 0.1."""
    answers = {}
    for max_norm in (0, 0.1, None):
        model = wrapped(NAME, config(2, clip=0.05, **FP16))
        train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
        train.backward(loss_of(model, batch(NAME, dist.get_rank())), is_last=True)
        norm = train.clip_grad_norm(max_norm)
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(isinstance(gradient, DTensor) and gradient.dtype == torch.float32 for gradient in gradients)
        found = torch.stack([gradient.full_tensor().double().norm() for gradient in gradients]).norm()
        answers[max_norm] = float(norm), float(found)
        train.update()
        assert all(parameter.grad is None for parameter in model.parameters())
    return answers


def test_between_norm_and_update_gradients_are_unscaled_and_clipped(ranks2):
    for answers in ranks2.run(_between_norm_and_update):
        norms = {norm for norm, _ in answers.values()}
        assert len(norms) == 1, "the norm is the one before clipping, whatever it is clipped to"
        assert answers[0][1] == pytest.approx(norms.pop(), rel=1e-6)  # summed in another order
        assert answers[0.1][1] == pytest.approx(0.1, rel=1e-4)  # max_norm / (norm + 1e-6)
        assert answers[None][1] == pytest.approx(0.05, rel=1e-4), "None is the config's"


def _misuse(what):
    model = wrapped(NAME, config(3, accumulation=2))
    train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def backward(**flags):
        train.backward(loss_of(model, batch(NAME, dist.get_rank())), **flags)

    if what == "step after is_last=False":
        backward(is_last=False)
        train.step()
    elif what == "clip after is_last=False":
        backward(is_last=False)
        train.clip_grad_norm()
    elif what == "mixed":
        backward(is_last=False)
        backward()
    elif what == "mixed the other way":
        backward()
        train.step()
        backward(is_last=True)
    elif what == "backward after the last":
        backward(is_last=True)
        backward(is_last=True)
    elif what == "update alone":
        backward(is_last=True)
        train.update()
    elif what == "clip twice":
        backward(is_last=True)
        train.clip_grad_norm()
        train.clip_grad_norm()
    elif what == "backward before update":
        backward(is_last=True)
        train.clip_grad_norm()
        backward(is_last=True)
    elif what == "negative norm":
        backward(is_last=True)
        train.clip_grad_norm(-1.0)
    elif what == "state inside":
        backward(is_last=False)
        train.state_dict()


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("step after is_last=False", "TrainStep.step .*is_last=True"),
        ("clip after is_last=False", "TrainStep.clip_grad_norm .*is_last=True"),
        ("mixed", "is_last for some micro-batches .* for each of them, or for none"),
        ("mixed the other way", "is_last for some micro-batches .* for each of them, or for none"),
        ("backward after the last", r"TrainStep.backward .* Call step\(\)"),
        ("update alone", r"TrainStep.update .*clip_grad_norm\(\)"),
        ("clip twice", r"TrainStep.clip_grad_norm .*twice.*update\(\)"),
        ("backward before update", r"TrainStep.backward .*update\(\)"),
        ("negative norm", "max_norm .*-1.0"),
        ("state inside", "TrainStep.state_dict was called after 1 micro-batch"),
    ],
)
def test_misuse_is_named(ranks2, what, text):
    with pytest.raises(AssertionError, match=rf"StepError: .*{text}"):
        ranks2.run(_misuse, what)


def _with_zero_grad(stage, gives_up):
    """Three steps; where `gives_up`, two micro-batches of another one come before the second, and are given up."""
    model = wrapped(NAME, config(stage, accumulation=3, clip=CLIP))
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    norms = []
    for step in range(3):
        if gives_up and step == 1:
            for micro in range(2):
                train.backward(loss_of(model, batch(NAME, 100 + micro)), is_last=False)
            assert not driver_of(train).is_between_steps
            train.zero_grad()
            assert driver_of(train).is_between_steps
        if gives_up and step == 2:  # gradients that another model's backward left here
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            train.zero_grad()
        for micro in range(3):
            train.backward(loss_of(model, batch(NAME, 2 * (3 * step + micro) + dist.get_rank())))
            report = train.step()
        norms.append(report.grad_norm)
    return norms, full_parameters(model)


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
def test_zero_grad_gives_up_a_step_and_leaves_no_trace(ranks2, stage):
    for ours, theirs in zip(
        ranks2.run(_with_zero_grad, stage, True), ranks2.run(_with_zero_grad, stage, False), strict=True
    ):
        assert ours[0] == theirs[0]
        assert same_bits(ours[1], theirs[1]) == []


def _optimizers(kind):
    model = wrapped(NAME, config(3, clip=CLIP))
    parameters = list(model.parameters())
    lr = torch.optim.lr_scheduler.LambdaLR
    if kind == "one":
        groups = [{"params": parameters[::2], "lr": 1e-2}, {"params": parameters[1::2], "lr": 1e-3}]
        optimizer = torch.optim.AdamW(groups)
        schedule = lr(optimizer, [lambda step: 0.9**step, lambda _step: 1.0])
        train = zeroamp.TrainStep(model, optimizer, schedule)
    else:
        first = torch.optim.AdamW(parameters[::2], lr=1e-2)
        second = torch.optim.AdamW(parameters[1::2], lr=1e-3)
        train = zeroamp.TrainStep(model, [first, second], [lr(first, lambda step: 0.9**step), None])
    reports = []
    for step in range(3):
        train.backward(loss_of(model, batch(NAME, 2 * step + dist.get_rank())))
        report = train.step()
        reports.append((report.loss, report.grad_norm, report.lr))
    return reports, full_parameters(model)


def test_several_optimizers_step_with_one_norm(ranks2):
    for one, two in zip(ranks2.run(_optimizers, "one"), ranks2.run(_optimizers, "two"), strict=True):
        assert one[0] == two[0]
        assert same_bits(one[1], two[1]) == []


def _wrong_optimizers(what):
    model = wrapped(NAME, config(3))
    parameters = list(model.parameters())
    first, second = (torch.optim.SGD(params, lr=0.1) for params in (parameters[:2], parameters[1:]))
    if what == "shared":
        zeroamp.TrainStep(model, [first, second])
    scheduler = torch.optim.lr_scheduler.LambdaLR(first, lambda _step: 1.0)
    zeroamp.TrainStep(model, [first, torch.optim.SGD(parameters[2:], lr=0.1)], scheduler)


@pytest.mark.parametrize(("what", "text"), [("shared", "one optimizer"), ("too few", r"scheduler=\) .*None")])
def test_optimizers_that_do_not_fit_are_named(ranks2, what, text):
    with pytest.raises(AssertionError, match=f"StepError: .*{text}"):
        ranks2.run(_wrong_optimizers, what)


def _loss_outside(how, options):
    """The model returns logits; the loss is computed by the caller."""
    cfg = config(3, **options)
    model = wrapped("llama_untied", cfg)
    zeroamp.register_forward_method(model, "logits")
    train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = batch("llama_untied", dist.get_rank())
    if how == "inside":
        loss = model(tokens)
    else:
        logits = model.logits(tokens[:, :-1])
        with train.autocast():
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    train.backward(loss)
    return float(loss.detach()), loss.dtype, train.step().grad_norm


def test_autocast_is_what_a_loss_outside_of_the_forward_needs(ranks2):
    inside, outside = (ranks2.run(_loss_outside, how, {}) for how in ("inside", "outside"))
    assert inside == outside
    assert outside[0][1] == torch.float32


def _autocast_of(options):
    model = wrapped(NAME, config(3, **options))
    train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with train.autocast():
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def test_autocast_is_the_configs(ranks2):
    assert ranks2.run(_autocast_of, {})[0] == (True, torch.bfloat16)
    assert ranks2.run(_autocast_of, {"dtype": "float16", "comm": "fp32"})[0] == (True, torch.float16)
    assert ranks2.run(_autocast_of, {"dtype": None, "bf16": {"enabled": True}})[0][0] is False


def _refused(what):
    model = wrapped(NAME, config(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if what == "no optimizer":
        zeroamp.TrainStep(model, [])
    train = zeroamp.TrainStep(model, optimizer)
    if what == "metric":
        train.schedulers = [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]
    with pytest.raises(zeroamp.StepError, match="TrainStep.backward .*needs no gradient"):
        train.backward(torch.tensor(1.0))
    train.backward(loss_of(model, batch(NAME, dist.get_rank())))
    raise zeroamp.StepError(f"step {train.step().step} after a loss that was refused")


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("no optimizer", "no optimizer"),
        ("metric", "ReduceLROnPlateau.*evaluation"),
        ("loss", "step 1 after a loss that was refused"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(ranks2, what, text):
    with pytest.raises(AssertionError, match=f"StepError: .*{text}"):
        ranks2.run(_refused, what)


def _bad_arguments():
    model = wrapped(NAME, config(3))
    train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters()))
    train.backward(loss_of(model, batch(NAME, 0)))
    for max_norm in ("1", float("nan"), [1.0], -1):
        with pytest.raises(zeroamp.StepError, match="^max_norm must be a number >= 0, or None, but is "):
            train.clip_grad_norm(max_norm)
    callback = zeroamp.Callback()
    with pytest.raises(zeroamp.StepError, match=r"^TrainStep.callbacks was set.* train.callbacks.append\(callback\)"):
        train.callbacks = [callback]
    train.callbacks.append(callback)
    return train.callbacks == [callback] and bool(train.clip_grad_norm(torch.tensor(1.0)) > 0)


def test_a_norm_that_is_no_number_and_other_callbacks_are_refused(ranks2):
    assert ranks2.run(_bad_arguments) == [True, True]


def _reopened(stage):
    """Every backward is given as the last one; returns the parameters, and those where the last one is known."""
    found = []
    for is_known in (False, True):
        model = wrapped(NAME, config(stage, comm="fp32"))
        train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in range(2):
            reopen(driver_of(train))  # nothing to continue
            for micro in range(3):
                index = (3 * step + micro) * dist.get_world_size() + dist.get_rank()
                loss = loss_of(model, batch(NAME, index)).float() / 3
                if not is_known:
                    reopen(driver_of(train))
                train.backward(loss, is_last=micro == 2 or not is_known, divide=False)
            train.step()
        found.append(full_parameters(model))
    return found


@pytest.mark.parametrize("stage", slow_but([1, 2, 3], 3))
def test_an_optimizer_step_goes_on_after_reopen(ranks2, stage):
    for reopened, known in ranks2.run(_reopened, stage):
        if stage >= 2:  # which reduce every micro-batch in any case
            assert same_bits(reopened, known) == []
        else:  # micro-batches are added after the reduction, in another order
            for name in known:
                torch.testing.assert_close(reopened[name], known[name], rtol=1e-3, atol=1e-4)


def _continued_without_a_reduction_over_replicas():
    """A last micro-batch, one that is not, and a last one again; and the same where the last one is known."""
    found = []
    for marks in ((True, False, True), (False, True, True), (False, False, True)):
        model = wrapped(NAME, config(2, comm="fp32"), mesh_shape=(2, 2))
        train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
        norms = []
        for step in range(2):
            for micro, is_last in enumerate(marks):
                index = (3 * step + micro) * dist.get_world_size() + dist.get_rank()
                reopen(driver_of(train))
                train.backward(loss_of(model, batch(NAME, index)).float() / 3, is_last=is_last, divide=False)
            norms.append(float(train.clip_grad_norm()))
            train.update()
        found.append(norms)
    return found


def test_replicas_are_summed_once_where_a_reopened_step_has_micro_batches_that_are_not_the_last(ranks4):
    for *reopened, known in ranks4.run(_continued_without_a_reduction_over_replicas):
        for norms in reopened:
            assert norms == pytest.approx(known, rel=1e-5)


def _reopened_with_low_sums():
    model = wrapped(NAME, config(2, data_types={"grad_accum_dtype": "bf16"}))
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    train.backward(loss_of(model, batch(NAME, 0)), is_last=True)
    with pytest.raises(zeroamp.StepError, match="data_types.grad_accum_dtype is bf16"):
        reopen(driver_of(train))


def test_reopen_is_refused_for_low_sums(ranks2):
    ranks2.run(_reopened_with_low_sums)
