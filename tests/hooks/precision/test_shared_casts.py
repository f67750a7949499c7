"""Linears that read one tensor share its low-precision copy: the bits of autocast, fewer casts, fewer saved bytes."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.processes.training import check_same_run, config, same_bits, train
from zeroamp.hooks.precision import shared_casts
from zeroamp.hooks.precision.shared_casts import SharedCasts, linears_that_may_share

WIDTH = 8


@pytest.fixture(params=[0, shared_casts.MAX_NUMEL_OF_NODE_ON_CPU], ids=["large tensors", "small tensors"])
def max_numel_of_node(request, monkeypatch):
    """The limit of [Note: A native node] in `shared_casts.py`. With 0, all tensors are large."""
    monkeypatch.setattr(shared_casts, "MAX_NUMEL_OF_NODE_ON_CPU", request.param)
    return request.param


class Attention(nn.Module):
    """Three consumers of one tensor, and one of another."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        return self.o(self.q(x) * self.k(x) + self.v(x))


class Casts(TorchDispatchMode):
    """Counts copies into bfloat16."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16:
            self.count += 1
        return result


def attention(*, shares):
    torch.manual_seed(0)
    model = Attention()
    if shares:
        casts = SharedCasts("cpu")
        for linear in linears_that_may_share(model.children()):
            casts.attach(linear)
    return model


def inputs(**more):
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1), **more)


def run(model, x, call=None):
    """Return (output, {name: gradient}, casts). The model reads a tensor that is computed from `x`."""
    with torch.autocast("cpu", dtype=torch.bfloat16), Casts() as casts:
        output = (call or nn.Module.__call__)(model, x * 3)
    output.float().square().sum().backward()
    return output.detach(), {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}, casts.count


def check_same(ours, theirs):
    assert torch.equal(ours[0], theirs[0])
    assert same_bits({name: grad for name, grad in ours[1].items() if grad is not None},
                     {name: grad for name, grad in theirs[1].items() if grad is not None}) == []  # fmt: skip


def test_a_leaf_has_the_bits_of_autocast_too():
    def call(model, x):
        return model(leaf)

    outcomes = []
    for shares in (True, False):
        leaf = inputs(requires_grad=True)
        outcome = run(attention(shares=shares), leaf, call)
        outcomes.append((outcome[0], outcome[1] | {"x": leaf.grad}))
    check_same(*outcomes)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_one_cast_of_the_tensor_and_the_bits_of_autocast(requires_grad, max_numel_of_node):
    ours = run(attention(shares=True), inputs(requires_grad=requires_grad))
    theirs = run(attention(shares=False), inputs(requires_grad=requires_grad))
    check_same(ours, theirs)
    assert theirs[2] - ours[2] == (0 if requires_grad and max_numel_of_node else 2)


def _num_saved_copies(model, x):
    """Return how many copies of `x` in bfloat16 q, k and v save for their backwards."""
    storages = []

    def keep(tensor):
        if tensor.dtype == torch.bfloat16 and tensor.shape == x.shape:
            storages.append(tensor.untyped_storage())
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.autocast("cpu", dtype=torch.bfloat16), hooks:
        outputs = [linear(x) for linear in (model.q, model.k, model.v)]
    assert len(outputs) == 3
    return len({storage.data_ptr() for storage in storages})


def test_one_copy_is_saved_for_the_backwards(max_numel_of_node):
    assert _num_saved_copies(attention(shares=True), inputs(requires_grad=True) * 3) == 1
    assert _num_saved_copies(attention(shares=False), inputs(requires_grad=True) * 3) == 3


def test_the_bits_of_autocast_where_the_backward_runs_the_forward_again(max_numel_of_node):
    def call(model, x):
        return checkpoint(model, x, use_reentrant=False)

    ours = run(attention(shares=True), inputs(requires_grad=True), call)
    check_same(ours, run(attention(shares=False), inputs(requires_grad=True), call))


def test_a_tensor_that_was_written_to_is_cast_again():
    model, x = attention(shares=True), inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        before = model.q(x)
        x.mul_(2)
        after = model.k(x)
        x.div_(2)
        assert torch.equal(model.q(x), before)
        assert torch.equal(after, attention(shares=False).k(x * 2))


def test_the_copy_ends_with_its_tensor():
    model, casts, x = attention(shares=False), SharedCasts("cpu"), inputs()
    casts.attach(model.q)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.q(x)
        assert casts._copy is not None
        del x
    assert casts._copy is None


def test_what_autocast_does_not_cast_is_left_alone():
    model, theirs = attention(shares=True), attention(shares=False)
    assert torch.equal(model(inputs()), theirs(inputs()))  # outside of autocast
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = inputs().to(torch.bfloat16)
        assert torch.equal(model(low), theirs(low))
        with torch.inference_mode():
            assert torch.equal(model(inputs()), theirs(inputs()))


def test_only_linears_with_inputs_of_one_width_may_share():
    class Doubled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    linears = [nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 5), Doubled(2, 3), nn.LayerNorm(2)]
    assert linears_that_may_share(linears) == [linears[0], linears[2]]


def _saved_bytes(cfg):
    from tests.models.small import batch, loss_of
    from tests.processes.training import wrapped

    seen = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    model = wrapped("hf_llama", cfg)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model, batch("hf_llama", 0))
    loss.backward()
    return sum(seen.values())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_wrapped_model_trains_to_the_same_bits(ranks2, stage):
    shared, apart = (config(stage, zeroamp={"share_casts": shares}) for shares in (True, False))
    runs = (ranks2.run(train, "hf_llama", cfg, 3) for cfg in (shared, apart))
    for ours, theirs in zip(*runs, strict=True):
        check_same_run(ours, theirs)


def test_a_wrapped_model_saves_less(ranks2):
    # At stage 0, where no parameter's storage is freed and made again meanwhile.
    shared, apart = (config(0, zeroamp={"share_casts": shares}) for shares in (True, False))
    assert ranks2.run(_saved_bytes, shared)[0] < ranks2.run(_saved_bytes, apart)[0]
