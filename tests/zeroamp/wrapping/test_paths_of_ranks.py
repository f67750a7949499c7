"""Ranks that take other paths through the model: one order of reductions, or one error, never sums of other groups."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import zeroamp
from tests.measuring.logs import log_lines
from tests.oracles.one_process import combine
from tests.processes.training import config, full_parameters, same_bits
from zeroamp.hooks.collectives.collective_calls import IssuedInStep
from zeroamp.hooks.collectives.traffic import IssuedCollective
from zeroamp.wrapping.reduction_order import compare_orders, order_bytes

WIDTH, NUM_STEPS = 16, 2
NATIVE = {"zeroamp": {"reduce_accumulate_dtype": "native"}}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class ImagesAndText(nn.Module):
    """The vision part has the size of a block, and belongs to the root. The embedding is frozen."""

    def __init__(self):
        super().__init__()
        self.embed, self.visual = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 2 * WIDTH + 2, bias=False)
        self.text = nn.ModuleList(Block() for _ in range(3))
        self.embed.requires_grad_(False)

    def forward(self, tokens, image=None):
        x = self.embed(tokens)
        if image is not None:
            x = x + self.visual(image)[..., :WIDTH]
        for block in self.text:
            x = block(x)
        return x.float().pow(2).mean()


def _seeded(make):
    torch.manual_seed(0)
    return make()


def _inputs(rank, step, has_image):
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 8, (2, 4), generator=generator)
    return tokens, torch.randn(2, 4, WIDTH, generator=generator) if has_image else None


def _one_process(have_images):
    """Losses by step and rank, and parameters, of one process that takes the ranks' batches in turn."""
    model = _seeded(ImagesAndText)
    named = {fqn: parameter for fqn, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(NUM_STEPS):
        gradients, of_ranks = [], []
        for rank, has_image in enumerate(have_images):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(*_inputs(rank, step, has_image))
            of_ranks.append(float(loss.detach()))
            gradients.append(torch.autograd.grad(loss, list(named.values()), allow_unused=True))
        for parameter, table in zip(named.values(), zip(*gradients, strict=True), strict=True):
            parameter.grad = combine([[gradient] for gradient in table], True)
        losses.append(of_ranks)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {fqn: parameter.detach() for fqn, parameter in model.named_parameters()}


def _wrapped(make, stage, **more):
    return zeroamp.wrap_model(_seeded(make), config(stage, **more), auto_wrap_policy={"Block"})


def _train(stage, have_images, in_train_step):
    model, rank = _wrapped(ImagesAndText, stage), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = zeroamp.TrainStep(model, optimizer) if in_train_step else None
    losses = []
    for step in range(NUM_STEPS):
        loss = model(*_inputs(rank, step, have_images[rank]))
        losses.append(float(loss.detach()))
        if train is not None:
            train.backward(loss)
            train.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses, full_parameters(model)


@pytest.mark.parametrize(("stage", "in_train_step"), [(0, False), (3, False), (1, True), (2, True)])
def test_an_image_on_one_rank_gives_bits_of_one_process(ranks2, stage, in_train_step):
    have_images = (True, False)
    losses, parameters = _one_process(have_images)
    for rank, (own, ours) in enumerate(ranks2.run(_train, stage, have_images, in_train_step)):
        assert own == [of_step[rank] for of_step in losses]
        assert same_bits(ours, parameters) == []


def _of_fsdp2_alone(have_images):
    """Return the vision part's gradient after one backward of FSDP2 in fp32, and that of one process."""
    model, rank, gradients = _seeded(ImagesAndText), dist.get_rank(), []
    for number, has_image in enumerate(have_images):
        (gradient,) = torch.autograd.grad(
            model(*_inputs(number, 0, has_image)), [model.visual.weight], allow_unused=True, materialize_grads=True
        )
        gradients.append(gradient)
    for module in (*model.text, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (len(have_images),)))
        module.set_reduce_scatter_unused_params(True)  # else the ranks send different sizes, and gloo aborts
    model(*_inputs(rank, 0, have_images[rank])).backward()
    return model.visual.weight.grad.full_tensor(), sum(gradients) / len(gradients)


def test_fsdp2_alone_adds_gradients_of_other_groups(ranks2):
    """If this fails, FSDP2 has an order of its own, and the table of docs/from-fsdp2.md must lose a row."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("torch 2.11 and 2.12 cannot reduce zeros for unused parameters")
    for found, right in ranks2.run(_of_fsdp2_alone, (True, False)):
        assert (found - right).norm() > 0.1 * right.norm()


class Blocks(nn.Module):
    """Runs its blocks in the order of `order`."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, order):
        for number in order:
            x = self.blocks[number](x)
        return x.float().pow(2).mean()


def _in_other_orders(stage, orders, in_train_step, more):
    """Steps whose last one has an order per rank; return the error, and how far the weights moved with it."""
    model = _wrapped(Blocks, stage, **more)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = zeroamp.TrainStep(model, optimizer) if in_train_step else None
    for order in ((0, 1, 2), orders[dist.get_rank()]):
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        loss = model(torch.ones(2, WIDTH), order)
        if train is not None:
            train.backward(loss)
        else:
            loss.backward()
        try:
            optimizer.step() if train is None else train.step()
        except zeroamp.StepError as error:
            now = [parameter.to_local() for parameter in model.parameters()]
            return str(error), all(map(torch.equal, before, now))
        optimizer.zero_grad()
    return None


@pytest.mark.parametrize(
    ("stage", "in_train_step", "more"),
    [(0, True, {}), (2, False, {}), (3, True, {}), (0, False, NATIVE), (3, False, NATIVE)],
)
def test_another_order_on_one_rank_is_an_error_on_all(ranks2, stage, in_train_step, more):
    """The error comes before the update, names both groups, and what to write. The sums would be of other groups."""
    texts = ranks2.run(_in_other_orders, stage, ((0, 1, 2), (0, 2, 1)), in_train_step, more)
    assert texts[0] == texts[1]
    text, is_unchanged = texts[0]
    assert is_unchanged
    assert "differs between ranks: collective" in text
    assert "blocks.2" in text
    assert "blocks.1" in text
    assert '"zeroamp": {"optional_units": [...]}' in text


def _rates_of_own_metrics():
    """Each rank's scheduler gets the rank's own loss. Return the error, and how far the weights moved with it."""
    model = _wrapped(Blocks, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for metric in (1.0, 1.0 - dist.get_rank(), 1.0):
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        model(torch.ones(2, WIDTH), (0, 1, 2)).backward()
        try:
            optimizer.step()
        except zeroamp.StepError as error:
            now = [parameter.to_local() for parameter in model.parameters()]
            return str(error), all(map(torch.equal, before, now))
        optimizer.zero_grad()
        scheduler.step(metric)
    return None


def test_a_scheduler_of_each_ranks_own_metric_is_an_error(ranks2):
    """The error comes before the update that would be of two learning rates."""
    texts = ranks2.run(_rates_of_own_metrics)
    assert texts[0] == texts[1]
    text, is_unchanged = texts[0]
    assert is_unchanged
    assert "lr of param group 0 is 0.01" in text
    assert "on rank 0, but 0.1 on rank 1" in text
    assert "average over them the metric of a scheduler such as ReduceLROnPlateau" in text


def _late(is_order):
    issued, rank = IssuedInStep(), dist.get_rank()
    state = SimpleNamespace(issued=issued, mesh=SimpleNamespace(device_type="cuda"), world=None)
    texts = []
    for step in range(3):
        is_other = step == 1 and rank == 1
        names = ("b", "a") if is_other and is_order else ("a", "b")
        rates: list[list[tuple[str, object]]] = [[("lr", 0.2 if is_other and not is_order else 0.1)]]
        for name in names:
            issued.on_collective(IssuedCollective("all_to_all", torch.empty(4), name, None))
        maxima = torch.tensor(list(order_bytes(issued, rates)), dtype=torch.uint8)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        try:
            compare_orders(state, maxima, rates)
        except zeroamp.StepError as error:
            texts.append((step, str(error)))
    return texts


def test_on_a_device_the_next_step_raises(ranks2):
    """The host does not wait for the step in which the ranks differed. What differed in that step is named."""
    order = "collective 1 is all_to_all of a (4 elements, fp32) on rank 0, but all_to_all of b"
    for is_order, difference in ((True, order), (False, "lr of param group 0 is 0.1 on rank 0, but 0.2 on rank 1")):
        for texts in ranks2.run(_late, is_order):
            ((step, text),) = texts
            assert step == 2
            assert difference in text
            assert "The step before this one was wrong: restart" in text


def _warnings(optional_units):
    model = _seeded(ImagesAndText)
    model.config = SimpleNamespace(encoder_layerdrop=0.1, decoder_layerdrop=0.0)
    model.text[0].config = model.config
    with log_lines() as lines:
        zeroamp.wrap_model(model, config(3, zeroamp={"optional_units": optional_units}), auto_wrap_policy={"Block"})
    return lines


def test_a_model_that_skips_blocks_at_random_is_warned_of(ranks2):
    (line,), of_others = ranks2.run(_warnings, [])
    assert "config has encoder_layerdrop=0.1: in training, each rank skips different blocks at random" in line
    assert of_others == []  # one message per job
    assert not any("at random" in line for line in ranks2.run(_warnings, ["text"])[0])
