"""After an exception on some ranks, `recover` and what follows: the same bits as if that window had never been."""

import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroamp
from tests.models.prepared import checkpoint_inside, checkpoint_outside, compile_blocks
from tests.models.small import batch, loss_of
from tests.processes.failures import Failed, failing_after, failing_allocation, failing_in
from tests.processes.ranks import RankError
from tests.processes.training import config, full_parameters, policy, same_bits, wrapped
from tests.selection import needs_options, slow_but

NAME = "llama_tied"
RECOVERY = {"zeroamp": {"recovery": True}}


class Training:
    """A model in training, whose windows are numbered. A window gets the same batches whether others fail or not."""

    def __init__(self, options, *, name=NAME, prepare=None, **more):
        self.name, self.accumulation = name, options.get("accumulation", 1)
        options = {**options, "zeroamp": {"recovery": True, **options.get("zeroamp", {})}}
        self.model = wrapped(name, config(**options), **more)
        if prepare is not None:
            prepare(self.model)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        self.step = zeroamp.TrainStep(self.model, optimizer, self.scheduler)
        self.log = []

    def batch(self, window, micro):
        index = window * self.accumulation + micro
        return batch(self.name, index * dist.get_world_size() + dist.get_rank())

    def window(self, window):
        for micro in range(self.accumulation):
            loss = loss_of(self.model, self.batch(window, micro))
            self.log.append(float(loss.detach()))
            self.step.backward(loss)
            report = self.step.step()
        self.log.append((report.step, report.loss, report.grad_norm, report.loss_scale))

    def failed_window(self, window, failure):
        """Run a window in which some rank fails, on this one with `failure` around; return (error, left out)."""
        before, log = self.step.state_dict(), len(self.log)
        error = None
        with failure:
            try:
                self.window(window)
            except (Failed, zeroamp.StepError) as raised:
                error = f"{type(raised).__name__}: {raised}"
        del self.log[log:]
        num_left = self.step.recover()
        assert self.step.state_dict() == before
        assert all(parameter.grad is None for parameter in self.model.parameters())
        return error, num_left

    def outcome(self):
        return self.log, full_parameters(self.model)


def check_same(by_rank, expected):
    for (log, parameters), (their_log, their_parameters) in zip(by_rank, expected, strict=True):
        assert log == their_log
        assert same_bits(parameters, their_parameters) == []


def _without(options, num_windows, more):
    training = Training(options, **more)
    for window in range(num_windows):
        training.window(window)
    return training.outcome()


def _failing_everywhere(options, places, more, first):
    """Before each window of a training, one that fails on some ranks, after `places[window][rank]` collectives."""
    training = Training(options, **more)
    if not first:
        training.window(0)
    errors = []
    for window, place in enumerate(places):
        after = place.get(dist.get_rank())
        failure = nullcontext() if after is None else failing_after(after, training.model)
        errors.append(training.failed_window(100 + window, failure))
        training.window(window if first else window + 1)
    return training.outcome(), errors


def _num_collectives(options, more):
    training = Training(options, **more)
    training.window(0)
    return len(training.step.recovery.calls.last_step)


def fail_everywhere(ranks, options, places, more=None, first=True):
    """Check that training goes on as if nothing had been; return [rank][failed window] of (error, left out)."""
    more = more or {}
    answers = ranks.run(_failing_everywhere, options, places, more, first)
    check_same([outcome for outcome, _ in answers], ranks.run(_without, options, len(places) + (not first), more))
    return [errors for _, errors in answers]


@pytest.mark.parametrize("accumulation", slow_but([1, 2], 1))
@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0))
def test_a_rank_may_fail_after_any_collective_of_a_window(ranks2, stage, accumulation):
    options = {"stage": stage, "accumulation": accumulation, "threshold": 0}
    num_collectives = ranks2.run(_num_collectives, options, {})[0]
    assert num_collectives > 5
    healthy, failed = fail_everywhere(ranks2, options, [{1: after} for after in range(1, num_collectives + 1)])
    for after, (error, num_left) in enumerate(healthy, start=1):
        assert error.startswith("PeerError: ")
        assert f"(Failed: after {after} collectives) on rank 1" in error
        assert num_left == 0
    assert [error for error, _ in failed] == [f"Failed: after {n} collectives" for n in range(1, num_collectives + 1)]
    left_out = [num_left for _, num_left in failed]
    assert left_out == sorted(left_out, reverse=True)
    # At stages 0 and 1 the first micro-batch issues gathers only, at stage 0 not even those.
    assert set(left_out) == ({0} if accumulation == 1 or stage == 0 else {0, 1})


def _failing_allocations(numbers):
    """Return the allocations of the reductions of a step with one shard, before and after steps that fail."""
    training = Training({"stage": 2}, mesh_shape=(2, 1))
    found = []
    for number in (None, *numbers, None):
        found.append(seen := [])
        with failing_allocation(number, seen):
            if number is None:
                training.window(len(found) > 1)
            else:
                training.failed_window(100 + number, nullcontext())
    return found, training.outcome()


def test_memory_that_is_missing_in_a_reduction_changes_no_dtype_of_later_ones(ranks2):
    # With one shard, input and output have the same size: FSDP2 asks for both by the same call.
    numbers = [1, 2, 3, 4]
    answers = ranks2.run(_failing_allocations, numbers)
    check_same([outcome for _, outcome in answers], ranks2.run(_without, {"stage": 2}, 2, {"mesh_shape": (2, 1)}))
    first, *failed, last = answers[0][0]
    assert last == first
    assert {dtype for _, dtype in first[::2]} == {torch.bfloat16, torch.float32}  # inputs
    assert {dtype for _, dtype in first[1::2]} == {torch.float32}  # outputs
    assert [len(seen) for seen in failed] == [0, 1, 2, 3]


@pytest.mark.parametrize("stage", slow_but([0, 3], 3))
def test_ranks_may_fail_in_different_places_or_in_the_same(ranks2, stage):
    options = {"stage": stage, "accumulation": 2, "threshold": 0}
    last = ranks2.run(_num_collectives, options, {})[0]
    places = [{0: 1, 1: last}, {0: last, 1: 1}, {0: last // 2, 1: last // 2 + 1}, {0: 2, 1: 2}]
    for errors in fail_everywhere(ranks2, options, places):
        assert all(error.startswith("Failed: after") for error, _ in errors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (1, {"mesh_shape": (2, 2)}),
        (3, {"mesh_shape": (2, 2)}),
        (3, {"mesh_shape": (4, 1)}),
        (3, {"fields": {"hpz_partition_size": 2}}),
        pytest.param(3, {"fields": {"separate_reduce_scatter_group": True}}, marks=needs_options),
        (3, {"fields": {"prefetch_bucket_size": 20_000, "reduce_bucket_size": 20_000}}),
        (0, {}),
    ],
    ids=str,
)
def test_more_ranks_in_meshes_of_two_axes_and_sharding_options(ranks4, stage, more):
    options = {"stage": stage, "accumulation": 2, "threshold": 0}
    last = ranks4.run(_num_collectives, options, more)[0]
    places = [{3: 1}, {0: last // 3, 2: last // 2}, {1: last}]
    first = not {"hpz_partition_size", "separate_reduce_scatter_group"} & more.get("fields", {}).keys()
    errors = fail_everywhere(ranks4, options, places, more, first)
    assert "on rank 0 (" not in errors[1][1][0]
    assert all(f"collectives) on rank {rank}" in errors[1][1][0] for rank in (0, 2))


FP16 = {"dtype": None, "fp16": {"enabled": True, "initial_scale_power": 4}}
NATIVE = {"zeroamp": {"reduce_accumulate_dtype": "native"}}


@pytest.mark.parametrize(
    "options",
    slow_but([FP16, {**FP16, **NATIVE}, NATIVE, {"accumulation": 2, "data_types": {"grad_accum_dtype": "bf16"}}], FP16),
    ids=str,
)
def test_every_kind_of_wire_and_accumulation(ranks2, options):
    options = {"stage": 2, **options}
    last = ranks2.run(_num_collectives, options, {})[0]
    fail_everywhere(ranks2, options, [{0: n} for n in (1, last // 2, last - 1, last)])


PREPARE = {"compile": compile_blocks, "inside": checkpoint_inside, "outside": checkpoint_outside}


def _failing_in_a_block(stage, how, fails):
    training = Training({"stage": stage}, prepare=PREPARE[how])
    errors = []
    for window in range(4):
        if fails:
            # Inside of what is compiled whole, nothing may raise.
            block = training.model.norm if how == "compile" else training.model.blocks[1]
            is_here = dist.get_rank() == window % 2
            place = failing_in(block, "forward" if window < 2 else "backward") if is_here else nullcontext()
            errors.append(training.failed_window(100 + window, place)[0].partition(":")[0])
        training.window(window)
    return training.outcome(), errors


@pytest.mark.parametrize("how", slow_but(PREPARE, "inside"))
@pytest.mark.parametrize("stage", slow_but([0, 3], 3))
def test_failures_in_compiled_and_checkpointed_blocks(ranks2, stage, how):
    answers = ranks2.run(_failing_in_a_block, stage, how, True)
    expected = ranks2.run(_failing_in_a_block, stage, how, False)
    check_same([outcome for outcome, _ in answers], [outcome for outcome, _ in expected])
    assert answers[0][1] == ["Failed", "PeerError"] * 2
    assert answers[1][1] == ["PeerError", "Failed"] * 2


def _outside_of_the_model(fails):
    """Rank 1 fails before its first forward, between forward and backward, and between backward and step."""
    training = Training({"stage": 2, "accumulation": 2})
    answers = []
    for window in range(3):
        if fails and dist.get_rank() == 0:
            answers.append(training.failed_window(100 + window, nullcontext()))
        elif fails:
            if window > 0:
                loss = loss_of(training.model, training.batch(100 + window, 0))
            if window > 1:
                training.step.backward(loss)
            try:
                raise OSError("a broken file")
            except OSError:
                answers.append(training.step.recover())
        training.window(window)
    return training.outcome(), answers


def test_an_error_outside_of_the_model_is_one_of_the_window_too(ranks2):
    answers = ranks2.run(_outside_of_the_model, True)
    expected = ranks2.run(_outside_of_the_model, False)
    check_same([outcome for outcome, _ in answers], [outcome for outcome, _ in expected])
    assert all("the training loop (OSError: a broken file) on rank 1" in error for error, _ in answers[0][1])
    assert answers[1][1] == [1, 1, 1]


def _swallowed(place, then):
    training = Training({"stage": 3})
    with failing_in(training.model.blocks[1], place), pytest.raises(Failed):
        training.window(0)
    step, inputs = training.step, training.batch(1, 0)
    {
        "forward": lambda: loss_of(training.model, inputs),
        "evaluation": lambda: torch.no_grad()(loss_of)(training.model, inputs),
        "backward": lambda: step.backward(torch.ones((), requires_grad=True) * 1),
        "step": step.step,
    }[then]()


@pytest.mark.parametrize("then", ["forward", "evaluation", "backward", "step"])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_going_on_without_recover_is_refused(ranks2, place, then):
    with pytest.raises(RankError, match=f"StepError: .*failure in {place} .Failed: .*train.recover"):
        ranks2.run(_swallowed, place, then)


def _failing_evaluation(options, fails):
    training = Training(options)
    for window in range(3):
        for index in range(2):
            place = nullcontext()
            if fails and index == 0 and dist.get_rank() == 1:
                model = training.model
                place = failing_after(2, model) if window == 1 else failing_in(model.blocks[1], "forward")
            with place, torch.no_grad():
                try:
                    training.log.append(float(loss_of(training.model, batch(NAME, index))))
                except Failed:
                    assert training.step.recover() == 0
        training.window(window)
    return training.outcome()


@pytest.mark.parametrize(
    "options",
    slow_but([{"stage": 1}, {"stage": 3}, {"stage": 3, "threshold": 0}], {"stage": 3, "threshold": 0}),
    ids=str,
)
def test_an_evaluation_between_windows_is_made_up_for_on_the_rank_alone(ranks2, options):
    answers = ranks2.run(_failing_evaluation, options, True)
    expected = ranks2.run(_failing_evaluation, options, False)
    assert answers[0][0] == expected[0][0], "the other rank saw nothing of it"
    assert len(answers[1][0]) == len(expected[1][0]) - 3
    assert same_bits(answers[1][1], expected[1][1]) == []


def _failing_evaluation_inside():
    training = Training({"stage": 3, "accumulation": 2})
    training.window(0)
    training.step.backward(loss_of(training.model, training.batch(1, 0)))
    training.step.step()
    with failing_in(training.model.blocks[1], "forward"), pytest.raises(Failed), torch.no_grad():
        loss_of(training.model, training.batch(1, 1))
    training.step.recover()


def test_an_evaluation_inside_a_window_cannot_be_made_up_for(ranks2):
    with pytest.raises(RankError, match="TrainStep.recover .*an evaluation inside .*Restart"):
        ranks2.run(_failing_evaluation_inside)


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.norm(self.first(x))).square().mean()


def _buffers(fails):
    torch.manual_seed(0)
    model = zeroamp.wrap_model(Normalized(), policy(config(3, **RECOVERY)), auto_wrap_policy={"Linear"})
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for window in range(4):
        inputs = torch.randn(4, 8, generator=generator)
        place = failing_in(model.last, "forward") if window == 2 and dist.get_rank() == 1 else nullcontext()
        if window == 2 and not fails:
            continue
        error = None
        with place:
            try:
                step.backward(model(inputs))
                step.step()
            except (Failed, zeroamp.PeerError) as raised:
                error = raised
        if error is not None:
            step.recover()
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_buffers_are_what_they_were_before_the_window(ranks2):
    for ours, theirs in zip(ranks2.run(_buffers, True), ranks2.run(_buffers, False), strict=True):
        assert same_bits(ours, theirs) == []
        assert int(ours["norm.num_batches_tracked"]) == 3


class FailsOnRank1(torch.optim.SGD):
    def step(self, closure=None):
        if dist.get_rank() == 1:
            raise Failed("in the optimizer")
        return super().step(closure)


def _optimizer_failed_on_one_rank():
    model = wrapped(NAME, config(3, **RECOVERY))
    step = zeroamp.TrainStep(model, FailsOnRank1(model.parameters(), lr=0.1))
    errors = []
    for index in range(3):
        try:
            step.backward(loss_of(model, batch(NAME, index)))
            step.step()
        except Failed:
            pass
        except zeroamp.StepError as error:
            errors.append(f"{type(error).__name__}: {error}")
            break
        if dist.get_rank() == 1:
            with pytest.raises(zeroamp.StepError) as caught:
                step.recover()
            errors.append(str(caught.value))
            break
    with pytest.raises(zeroamp.StepError, match="last checkpoint"):
        step.recover()
    with pytest.raises(zeroamp.StepError, match="last checkpoint"):
        model(batch(NAME, 0))
    return errors


def test_an_optimizer_that_raised_on_one_rank_ends_the_training_on_all(ranks2):
    (healthy,), (failed,) = ranks2.run(_optimizer_failed_on_one_rank)
    assert re.match("PeerError: .*optimizer.step .Failed: in the optimizer. on rank 1", healthy)
    assert healthy.endswith("Restart from the last checkpoint.")
    assert re.match("TrainStep.recover .*optimizer.step .Failed: in the optimizer.*Restart from the last", failed)


def _without_a_gradient_on_rank_1():
    training = Training({"stage": 3})
    backward = training.step.backward
    if dist.get_rank() == 1:  # as if nothing had reached the parameters

        def backward_without_gradients(loss):
            backward(loss)
            for parameter in training.model.parameters():
                parameter.grad = None

        training.step.backward = backward_without_gradients
    with pytest.raises(zeroamp.StepError) as caught:
        training.window(0)
    training.step.backward = backward
    training.log.clear()
    training.window(0)
    return str(caught.value), training.outcome()


def test_no_gradient_on_one_rank_is_an_error_on_all_and_training_goes_on(ranks2):
    (healthy, first), (failed, second) = ranks2.run(_without_a_gradient_on_rank_1)
    assert re.search("step .StepError: .*no gradient on any parameter.* on rank 1", healthy)
    assert re.match("TrainStep.step .*no gradient on any parameter", failed)
    check_same([first, second], ranks2.run(_without, {"stage": 3}, 1, {}))


def _unknown(how):
    if how == "first window":
        training = Training({"stage": 3, "accumulation": 2}, name="conv")
    else:
        training = Training({"stage": 3, "threshold": 0})
        training.window(0)
    calls = training.step.recovery.calls
    if how == "windows that differ":
        calls.step = [calls.last_step[0]]  # as if a unit had run once more
        training.window(1)
    if how == "another order":
        calls.last_step.reverse()
    with failing_after(3, training.model), pytest.raises(Failed):
        training.window(2)
    if how == "collective raises":
        dist.all_to_all_single, kept = _raise, dist.all_to_all_single
        try:
            training.step.recover()
        finally:
            dist.all_to_all_single = kept
    training.step.recover()


def _raise(*args, **kwargs):
    raise RuntimeError("connection closed by peer")


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("first window", "it failed in the first optimizer step"),
        ("windows that differ", "the last two .* different collectives"),
        ("another order", "collective 0 of this step was all_gather of .*, but .* in earlier steps"),
        ("collective raises", "recovery .RuntimeError: connection closed by peer"),
    ],
)
def test_where_the_rest_is_not_known_recover_raises_at_once(ranks2, how, text):
    with pytest.raises(RankError, match=f"StepError: TrainStep.recover .*{text}.*Restart from the last checkpoint"):
        ranks2.run(_unknown, how)


def _whole_model_compiled(fails):
    training = Training({"stage": 3})
    root, training.model = training.model, torch.compile(training.model, backend="aot_eager")
    for window in range(2):
        if fails:
            place = failing_after(3, root) if dist.get_rank() == 1 else nullcontext()
            training.failed_window(100 + window, place)
        training.window(window)
    return training.log, full_parameters(root)


@pytest.mark.slow
def test_a_model_that_is_compiled_as_a_whole(ranks2):
    check_same(ranks2.run(_whole_model_compiled, True), ranks2.run(_whole_model_compiled, False))


def _registered_method(fails):
    model = wrapped("llama_untied", config(3, **RECOVERY))
    zeroamp.register_forward_method(model, "logits")
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    norms = []
    for window in range(4):
        if window % 2 == 0 and not fails:
            continue
        place = failing_in(model.blocks[1], "forward") if window % 2 == 0 and dist.get_rank() == 0 else nullcontext()
        error = None
        with place:
            try:
                step.backward(model.logits(batch(NAME, window)).square().mean())
                norms.append(step.step().grad_norm)
            except (Failed, zeroamp.PeerError) as raised:
                error = raised
        if error is not None:
            assert "forward" in str(error)
            step.recover()
    return norms, full_parameters(model)


def test_methods_that_are_registered_as_forwards(ranks2):
    check_same(ranks2.run(_registered_method, True), ranks2.run(_registered_method, False))


def _part_of_the_ranks(fails):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "shard"))["shard"]
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model = zeroamp.wrap_model(layers, policy(config(3, **RECOVERY)), mesh, {"Linear"})
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.ones(2, 8)
    error = None
    if fails and dist.get_rank() in (2, 3):
        with failing_in(model[1], "forward") if dist.get_rank() == 3 else nullcontext():
            try:
                step.backward(model(inputs).sum())
                step.step()
            except (Failed, zeroamp.PeerError) as raised:
                error = str(raised)
        step.recover()
    step.backward(model(inputs).sum())
    return error, step.step().grad_norm


def test_ranks_outside_of_the_mesh_are_not_asked(ranks4):
    answers = ranks4.run(_part_of_the_ranks, True)
    assert "on rank 3" in answers[2][0]
    assert [norm for _, norm in answers] == [norm for _, norm in ranks4.run(_part_of_the_ranks, False)]


def _with_recovery(is_on):
    training = Training({"stage": 3, "zeroamp": {"recovery": is_on}})
    for window in range(2):
        training.window(window)
    outcome = training.outcome()
    error = None
    if not is_on:
        with pytest.raises(zeroamp.StepError) as raised:
            training.step.recover()
        error = str(raised.value)
    return outcome, error


def test_recovery_may_be_off_with_the_same_bits(ranks2):
    answers = ranks2.run(_with_recovery, False)
    check_same([outcome for outcome, _ in answers], [outcome for outcome, _ in ranks2.run(_with_recovery, True)])
    assert all(re.match('TrainStep.recover .*"recovery": true.*last checkpoint', error) for _, error in answers)
