"""FSDP2's methods on a wrapped model: the result of FSDP2 alone, or an error that says what to write."""

import contextlib
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import zeroamp
from tests.processes.launch import ROOT
from tests.processes.training import config
from tests.selection import slow_but
from zeroamp.hooks._torch.fsdp import groups_of
from zeroamp.wrapping.shard import group_modules
from zeroamp.wrapping.state import wrap_state

WIDTH = 8
NUM_MICRO = 2
NUM_STEPS = 2
AS_FSDP2, WRAP_ERROR, STEP_ERROR = "as in FSDP2", "WrapError", "StepError"
TARGETS = {"root": lambda model: model, "unit": lambda model: model.blocks[0]}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Net(nn.Module):
    """The root, and each block, own parameters that autocast casts, and others."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float().square().mean()


def _factor(name):
    def call(_model, module, _is_last):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one of the two is deprecated
            getattr(module, name)(8.0)

    return call


def _flag(name):
    """A flag that is on in the last micro-batch only."""
    return lambda _model, module, is_last: getattr(module, name)(is_last)


def _value(name, *values):
    return lambda _model, module, _is_last: getattr(module, name)(*values)


def _prefetch(name, index):
    return lambda model, module, _is_last: getattr(module, name)([model.blocks[index]])


def _recover(model, module, is_last):
    """A forward fails after the blocks have run."""

    def fail(*_):
        raise ArithmeticError

    if not is_last:  # FSDP2 discards the sums of the micro-batches too
        with model.head.register_forward_pre_hook(fail), contextlib.suppress(ArithmeticError):
            model(torch.ones(2, 4))
        module.reset_iter_state()


def _ahead(_model, module, _is_last):
    handle = module.unshard(async_op=True)
    if handle is not None:
        handle.wait()


@dataclass(frozen=True)
class Method:
    """A method of `FSDPModule`."""

    call: Callable
    """Calls it, with (model, module, whether this is the last micro-batch), before each forward."""
    plain: str = AS_FSDP2
    """What a plain loop does."""
    with_step: str = AS_FSDP2
    """What a loop with `TrainStep` does."""
    remedy: str = ""
    """Pattern of the text of its error."""
    is_new: bool = False
    """Whether torch 2.11 lacks it."""
    after: Callable | None = None
    """Called as `call` is, but after each backward."""
    targets: tuple = ("unit", "root")


def _manual(_model, module, is_last):
    """Only the last backward of a step reduces gradients, or what calls it by `finalize_backward`."""
    module.set_manual_backward_finalization(True)
    module.set_requires_gradient_sync(is_last)


def _finalize(_model, module, is_last):
    if is_last:
        module.finalize_backward()


IS_LAST = r"pass is_last to train.backward"
CUSTOM = r"FSDP2 refuses it beside custom collectives.* Remove the call"
METHODS = {
    "reshard": Method(_value("reshard")),
    "unshard": Method(_ahead),
    "reset_iter_state": Method(_recover, is_new=True, targets=("root",)),
    "set_is_last_backward": Method(_flag("set_is_last_backward"), with_step=STEP_ERROR, remedy=IS_LAST),
    "set_requires_gradient_sync": Method(_flag("set_requires_gradient_sync"), with_step=STEP_ERROR, remedy=IS_LAST),
    "set_requires_all_reduce": Method(
        _flag("set_requires_all_reduce"), with_step=STEP_ERROR, remedy="replicas are summed once"
    ),
    "set_reshard_after_forward": Method(_value("set_reshard_after_forward", False)),
    "set_reshard_after_backward": Method(
        _flag("set_reshard_after_backward"), with_step=STEP_ERROR, remedy="stages 0 to 2 leave parameters unsharded"
    ),
    "set_modules_to_forward_prefetch": Method(_prefetch("set_modules_to_forward_prefetch", 1)),
    "set_modules_to_backward_prefetch": Method(_prefetch("set_modules_to_backward_prefetch", 0)),
    "set_unshard_in_backward": Method(_value("set_unshard_in_backward", True)),
    "set_gradient_divide_factor": Method(
        _factor("set_gradient_divide_factor"), with_step=STEP_ERROR, remedy="Pass one factor to all FSDPModules"
    ),
    "set_reduce_scatter_divide_factor": Method(
        _factor("set_reduce_scatter_divide_factor"), with_step=STEP_ERROR, remedy="Pass one factor to all FSDPModules"
    ),
    "set_force_sum_reduction_for_comms": Method(_value("set_force_sum_reduction_for_comms", True)),
    "set_reduce_scatter_unused_params": Method(_value("set_reduce_scatter_unused_params", True), is_new=True),
    "set_reduce_scatter_max_input_buffers": Method(_value("set_reduce_scatter_max_input_buffers", 2), is_new=True),
    "set_separate_reduce_scatter_group": Method(_value("set_separate_reduce_scatter_group", True), is_new=True),
    "set_keep_unsharded_storage": Method(_value("set_keep_unsharded_storage", True), is_new=True),
    **dict.fromkeys(
        ("set_manual_backward_finalization", "finalize_backward"),
        Method(_manual, AS_FSDP2, STEP_ERROR, "completes its own reductions", True, _finalize, ("root",)),
    ),
    "set_post_optim_event": Method(_value("set_post_optim_event", None)),
    "set_custom_all_gather": Method(
        _value("set_custom_all_gather", None), WRAP_ERROR, WRAP_ERROR, "zeroamp's all-gather. Remove the call"
    ),
    "set_custom_reduce_scatter": Method(
        _value("set_custom_reduce_scatter", None), WRAP_ERROR, WRAP_ERROR, "communication_data_type"
    ),
    "set_all_reduce_hook": Method(
        _value("set_all_reduce_hook", print), WRAP_ERROR, WRAP_ERROR, "register_post_accumulate_grad_hook"
    ),
    "set_allocate_memory_from_process_group_for_comm": Method(
        _value("set_allocate_memory_from_process_group_for_comm", True), WRAP_ERROR, WRAP_ERROR, CUSTOM
    ),
    "set_symm_mem_for_comm": Method(
        _value("set_symm_mem_for_comm"), WRAP_ERROR, WRAP_ERROR, CUSTOM, is_new=True
    ),
}  # fmt: skip


OF_REPLICAS = re.compile("sync|all_reduce|last_backward|factor|force_sum|finaliz")


def _present(shape):
    """The methods of this torch; with replicas, those that concern them."""
    of_shape = OF_REPLICAS if len(shape) == 2 else re.compile("")
    return [name for name in METHODS if hasattr(FSDPModule, name) and of_shape.search(name)]


def _mesh(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _wrapped(shape, threshold, accumulation=1, stage=3):
    torch.manual_seed(0)
    cfg = config(stage, comm="fp32", threshold=threshold, accumulation=accumulation)  # bf16 would round sums
    return zeroamp.wrap_model(Net(), zeroamp.policy_from_config(cfg), _mesh(shape))


def _of_fsdp2(shape, name):
    """FSDP2 alone, for a forward under the caller's autocast."""
    torch.manual_seed(0)
    model, mesh = Net(), _mesh(shape)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
        if name.endswith("divide_factor") and shape[-1] > 1:
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply in a reduction
    return model


def _batch(step, micro):
    index = (step * NUM_MICRO + micro) * dist.get_world_size() + dist.get_rank()
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(index))


def _train(model, call, *targets, after=None, train=None, context=contextlib.nullcontext):
    """Return the whole gradients of each step, by FQN.

    call, after: called before each forward, and after each backward, with the first target, and from the second step on
    with the second one too. train: a `TrainStep`.
    """
    sharded = dict(model.named_parameters())
    optimizer = torch.optim.SGD(sharded.values(), lr=0.1) if train is None else None
    found = []
    for step in range(NUM_STEPS):
        modules = [TARGETS[target](model) for target in targets[: step + 1]]
        for micro in range(NUM_MICRO):
            for module in modules if call is not None else []:
                call(model, module, micro + 1 == NUM_MICRO)
            with context():
                loss = model(_batch(step, micro))
            if train is None:
                (loss / NUM_MICRO).backward()
            else:
                train.backward(loss)
            for module in modules if after is not None else []:
                after(model, module, micro + 1 == NUM_MICRO)
        if train is not None:
            train.clip_grad_norm()
        found.append({fqn: parameter.grad.full_tensor().clone() for fqn, parameter in sharded.items()})
        if train is not None:
            train.update()
        else:
            optimizer.step()
            optimizer.zero_grad()
    return found


def _autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def _differing(ours, expected, rtol=0.0):
    return [
        (step, fqn)
        for step, (left, right) in enumerate(zip(ours, expected, strict=True))
        for fqn in right
        if not torch.allclose(left[fqn], right[fqn], rtol=rtol, atol=rtol)
    ]


def _outcome(run, expected):
    try:
        ours = run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return AS_FSDP2 if (differing := _differing(ours, expected)) == [] else f"WRONG: {differing}"


CHANGES_GRADIENTS = re.compile("sync|all_reduce|last_backward|factor|iter_state|finaliz")


def _runs(names, kind):
    """The methods, each with the targets of a training: one at a time where it raises. Two names of a case run once."""
    for method, name in {METHODS[name]: name for name in names}.items():
        at_a_time = [method.targets] if getattr(method, kind) == AS_FSDP2 else zip(method.targets)
        yield from ((name, targets) for targets in at_a_time)


def _plain(names, shape):
    """{(method, targets): outcome} of a plain loop whose units have typed groups."""
    found, untouched = {}, _train(_of_fsdp2(shape, ""), None, context=_autocast)
    for name, targets in _runs(names, "plain"):
        method, expected = METHODS[name], untouched
        if method.plain == AS_FSDP2 and CHANGES_GRADIENTS.search(name):
            expected = _train(_of_fsdp2(shape, name), method.call, *targets, after=method.after, context=_autocast)
        run = lambda: _train(_wrapped(shape, 0), method.call, *targets, after=method.after)  # noqa: B023, E731
        found[name, targets] = _outcome(run, expected)
    return found


def _with_step(names, shape):
    """{(method, targets): outcome} of a loop with `TrainStep`."""

    def run(call, *targets):
        model = _wrapped(shape, 0, NUM_MICRO)
        train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
        train.zero_grad()
        return _train(model, call, *targets, train=_Both(train))

    expected = run(None)
    return {
        (name, targets): _outcome(lambda: run(METHODS[name].call, *targets), expected)  # noqa: B023
        for name, targets in _runs(names, "with_step")
    }


FLAGS_OF_STEP = (
    *("set_is_last_backward", "set_requires_gradient_sync", "set_requires_all_reduce"),
    "set_reshard_after_backward",
)


def _with_flags_on(stage):
    """What the flags of `TrainStep` change that are set to True before each forward."""

    def run(call):
        model = _wrapped((2,), 0, NUM_MICRO, stage)
        train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return _train(model, call, "root", train=_Both(train))

    def set_all(_model, module, _is_last):
        for name in FLAGS_OF_STEP:
            getattr(module, name)(True)

    expected = run(None)
    return _outcome(lambda: run(set_all), expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_flags_that_are_on_change_nothing_with_train_step(ranks2, stage):
    """`True` is FSDP2's default, and `TrainStep` sets these flags for each micro-batch: only `False` is an error."""
    assert ranks2.run(_with_flags_on, stage) == [AS_FSDP2] * 2


class _Both:
    """A `TrainStep` whose `step` is called between micro-batches."""

    def __init__(self, train):
        self._train, self._num = train, 0
        self.clip_grad_norm, self.update = train.clip_grad_norm, train.update

    def backward(self, loss):
        self._train.backward(loss)
        self._num += 1
        if self._num % NUM_MICRO:
            assert self._train.step() is None


def _check(by_rank, kind):
    for found in by_rank:
        for (name, targets), outcome in found.items():
            expected = getattr(METHODS[name], kind)
            assert outcome.partition(":")[0] == expected, (name, targets, outcome)
            if expected != AS_FSDP2:
                assert re.search(METHODS[name].remedy, outcome), (name, targets, outcome)


RUNS = {
    "plain loop, shards": (_plain, (2,)),
    "TrainStep, shards": (_with_step, (2,)),
    "TrainStep, replicas": (_with_step, (2, 1)),
}


@pytest.mark.parametrize("name", slow_but(RUNS, "plain loop, shards", "TrainStep, replicas"))
def test_each_method_has_the_result_of_fsdp2_or_raises(ranks2, name):
    run, shape = RUNS[name]
    _check(ranks2.run(run, _present(shape), shape), "plain" if run is _plain else "with_step")


@pytest.mark.slow
def test_each_method_on_replicas_of_shards(ranks4):
    _check(ranks4.run(_plain, _present((2, 2)), (2, 2)), "plain")


def _sums_only(shape):
    """Differences that collectives which only sum make, set on each FSDPModule, group holders included."""

    def call(model, _module, _is_last):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    return _differing(_train(_wrapped(shape, 8), call, "root"), _train(_wrapped(shape, 8), None, "root"))


@pytest.mark.slow
def test_collectives_that_only_sum_divide_once(ranks4):
    assert ranks4.run(_sums_only, (2, 2)) == [[]] * 4


def _table():
    """The rows of the table in the docs: its cells."""
    _, _, rest = (ROOT / "docs" / "from-fsdp2.md").read_text().partition("<!-- methods -->\n")
    lines = rest.partition("<!-- end: methods -->")[0].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_of_the_docs_has_each_public_method():
    public = {name for name in dir(FSDPModule) if not name.startswith("_")}
    assert public - METHODS.keys() == set(), "what does zeroamp do with these?"
    assert {name for name in METHODS.keys() - public if not METHODS[name].is_new} == set(), "torch has them no more"
    by_outcome = {}
    for name, method in METHODS.items():
        cell = f"`{name}`" + "\\*" * method.is_new
        by_outcome.setdefault((method.plain, method.with_step), []).append(cell)
    rows = [[", ".join(cells), *outcomes] for outcomes, cells in by_outcome.items()]
    text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    assert _table() == rows, f"docs/from-fsdp2.md needs these rows:\n{text}"


MODEL_WIDE = {
    (2,): ("set_requires_gradient_sync", "set_force_sum_reduction_for_comms"),
    (2, 1): ("set_requires_gradient_sync", "set_requires_all_reduce"),
}


def _with_model_wide(shape):
    """Differences from FSDP2 alone where small parameters of all units are in one group."""
    found = {}
    for name in MODEL_WIDE[shape]:
        for target in TARGETS:
            model, call = _wrapped(shape, 1000), METHODS[name].call
            assert [group.kind for group in wrap_state(model).plan.groups].count("model-wide") == 1
            expected = _train(_of_fsdp2(shape, name), call, target, context=_autocast)
            found[name, target] = _differing(_train(model, call, target), expected, rtol=1e-6)
    return found


def _with_some_factors(shape):
    """Outcomes of a divide factor on the root alone, on each FSDPModule, and on the unit after that."""
    model = _wrapped(shape, 1000)
    outcomes = [_outcome(lambda: _train(model, METHODS["set_gradient_divide_factor"].call, "root"), None)]

    def on_all(model, _module, _is_last):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(8.0)

    name = "set_gradient_divide_factor"
    expected = _train(_of_fsdp2(shape, name), on_all, "root", context=_autocast)
    model = _wrapped(shape, 1000)
    model.set_gradient_divide_factor(4.0)  # repaired by the next calls
    outcomes.append(_outcome(lambda: _train(model, on_all, "root"), expected))
    model.set_gradient_divide_factor(4.0)  # after factors that were equal
    outcomes.append(_outcome(lambda: _train(model, None, "root"), None))
    return outcomes


@pytest.mark.parametrize("shape", MODEL_WIDE, ids=["shards", "replicas"])
def test_the_group_of_all_units_follows_its_units(ranks2, shape):
    for found in ranks2.run(_with_model_wide, shape):  # reducing more often adds in another order
        assert not any(found.values()), found


def test_the_group_of_all_units_follows_equal_factors(ranks2):
    for alone, on_all, at_the_end in ranks2.run(_with_some_factors, (2,)):
        assert re.match("StepError: set_gradient_divide_factor: the root .*8.0, but blocks.0 by None", alone), alone
        assert on_all == AS_FSDP2
        assert re.match("StepError: set_gradient_divide_factor: the root .*4.0, but blocks.0 by 8.0", at_the_end)


def _fail_in_backward(model):
    """Run a micro-batch whose backward raises after the groups behind the first block have had theirs."""

    def fail(_gradient):
        raise ArithmeticError

    with model.blocks[0].register_forward_hook(lambda _module, _args, output: output.register_hook(fail) and None):
        loss = model(_batch(0, 0))
    with contextlib.suppress(ArithmeticError):
        loss.backward()


def _after_a_reset(shape, threshold):
    """Differences from a model that ran only what follows: a sum without a reduction and a failed backward are lost."""
    expected, ours = _of_fsdp2(shape, ""), _wrapped(shape, threshold)
    with _autocast():
        expected(_batch(0, 1)).backward()
    ours.set_requires_gradient_sync(False)
    ours(_batch(1, 0)).backward()
    ours.set_requires_gradient_sync(True)
    _fail_in_backward(ours)
    ours.reset_iter_state()
    ours.zero_grad()
    ours(_batch(0, 1)).backward()
    whole = [{fqn: p.grad.full_tensor() for fqn, p in model.named_parameters()} for model in (ours, expected)]
    return _differing(whole[:1], whole[1:])


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this torch has no reset_iter_state")
@pytest.mark.parametrize(("shape", "threshold"), [((2,), 0), ((2, 1), 1000)])
def test_reset_iter_state_loses_the_failed_iteration(ranks2, shape, threshold):
    assert ranks2.run(_after_a_reset, shape, threshold) == [[], []]


def _steps_too_early():
    model = _wrapped((2, 1), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_requires_all_reduce(False)
    model(_batch(0, 0)).backward()
    optimizer.step()


def test_a_step_without_the_sum_over_replicas_raises(ranks2):
    with pytest.raises(
        AssertionError, match=r"StepError: .*Call model.set_requires_all_reduce\(True\) before the last"
    ):
        ranks2.run(_steps_too_early)


def _counted():
    """The all-reduces of each backward of a plain loop that sums replicas in the last one."""
    model, counts = _wrapped((2, 1), 0), []
    traffic = wrap_state(model).traffic
    for is_last in (False, False, True):
        model.set_requires_all_reduce(is_last)
        traffic.reset()
        model(_batch(0, 0)).backward()
        counts.append(sum(calls for key, calls in traffic.calls.items() if key.collective == "all_reduce"))
    return counts


def test_replicas_are_summed_with_the_last_micro_batch_only(ranks2):
    assert ranks2.run(_counted) == [[0, 0, 7]] * 2, "one per group"


FLAGS = {
    "set_unshard_in_backward": "unshard_in_backward",
    "set_requires_gradient_sync": "reduce_grads",
    "set_requires_all_reduce": "all_reduce_grads",
    "set_reshard_after_backward": "reshard_after_backward",
}


def _groups_that_follow(name, recurse):
    """Whether the groups of the unit have the flag that was set on the unit, and whether others have it."""
    model = _wrapped((2,), 0)
    options = {} if recurse is None else {"recurse": recurse}
    getattr(model.blocks[0], name)(False, **options)
    state = wrap_state(model)
    of_unit = set(group_modules(model, state.plan, state.holders)["blocks.0"])
    assert len(of_unit) == 2
    flags = {
        module: getattr(group, FLAGS[name])
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in groups_of(module._get_fsdp_state())
    }
    return {flags[module] for module in of_unit}, {flags[module] for module in flags.keys() - of_unit}


def _all_groups_that_follow():
    return {
        (name, recurse): _groups_that_follow(name, recurse)
        for name in FLAGS
        for recurse in ((None,) if name == "set_unshard_in_backward" else (True, False))
    }


def test_a_setter_of_a_unit_reaches_its_groups_and_no_others(ranks2):
    for found in ranks2.run(_all_groups_that_follow):
        assert set(map(str, found.values())) == {"({False}, {True})"}, found


def _sharded_names(model):
    return {fqn for fqn, parameter in model.named_parameters() if isinstance(parameter, DTensor)}


def _unsharded_by_hand():
    """The FQNs of parameters that are sharded: after `unshard` of a unit, of the root, and after `reshard` of it."""
    model = _wrapped((2,), 1000)
    found = []
    for module, method in ((model.blocks[0], "unshard"), (model, "unshard"), (model, "reshard")):
        getattr(module, method)()
        found.append(_sharded_names(model))
    return found


def test_unshard_gives_all_parameters_of_a_module(ranks2):
    for of_unit, of_root, after in ranks2.run(_unsharded_by_hand):
        assert not any(fqn.startswith("blocks.0.") for fqn in of_unit)
        assert of_root == {"blocks.1.linear.weight", "blocks.1.linear.bias"}
        assert after == {fqn for fqn, _ in Net().named_parameters() if not fqn.startswith("blocks.0.linear")}
