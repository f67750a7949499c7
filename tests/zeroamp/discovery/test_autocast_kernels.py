"""Which expert products autocast casts, by itself and with `zeroamp.autocast_ops`; and the kernels that do it."""

import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.processes.launch import ROOT
from zeroamp import ConfigError
from zeroamp.discovery.autocast_ops import casting, register
from zeroamp.discovery.traced_parameters import register_ops

NAMES = frozenset({"grouped_mm"})
TOKENS, WIDTH, INNER, EXPERTS = 24, 16, 32, 4
ENDS = torch.tensor([6, 10, 18, 24], dtype=torch.int32)


@pytest.fixture(autouse=True)
def _registered():
    assert register(NAMES, "cpu") == []


def _tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, generator=generator, dtype=dtype, requires_grad=True)
    weight = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH, generator=generator, dtype=dtype))
    return x, weight


def grouped(x, weight):
    """Experts by one grouped product, as transformers calls it."""
    return F.grouped_mm(x, weight.mT, offs=ENDS)


def _private(x, weight):
    return torch._grouped_mm(x, weight.mT, offs=ENDS)


def _batched(x, weight):
    """The slices that the tokens chose are copied, then multiplied."""
    of_token = torch.repeat_interleave(torch.arange(EXPERTS), ENDS.diff(prepend=torch.zeros(1, dtype=torch.int32)))
    return torch.bmm(weight[of_token], x[:, :, None])[..., 0]


def _eager(x, weight):
    """One Linear for each expert."""
    starts = [0, *ENDS.tolist()[:-1]]
    return torch.cat([F.linear(x[a:b], weight[i]) for i, (a, b) in enumerate(zip(starts, ENDS, strict=True))])


def _fallback(x, weight):
    pytest.importorskip("transformers.integrations.moe")
    register(NAMES, "cpu")  # again: the package is there now
    return torch.ops.transformers.grouped_mm_fallback(x, weight.mT, ENDS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("product", "is_cast"),
    [(grouped, False), (_private, False), (_fallback, False), (_batched, True), (_eager, True)],
)
def test_what_autocast_casts(product, is_cast, dtype):
    x, weight = _tensors()
    product(x, weight)  # registers, where it has to
    with torch.autocast("cpu", dtype=dtype):
        assert product(x, weight).dtype == (dtype if is_cast else torch.float32)
        with casting(NAMES):
            assert product(x, weight).dtype == dtype
            with casting(frozenset()):
                assert product(x, weight).dtype == (dtype if is_cast else torch.float32)
            with torch.autocast("cpu", enabled=False):
                assert product(x, weight).dtype == torch.float32
    assert product(x, weight).dtype == torch.float32


def _gradients(product, x, weight):
    output = product(x, weight)
    return [output, *torch.autograd.grad(output.float().square().sum(), (x, weight))]


@pytest.mark.parametrize("product", [grouped, _fallback])
def test_the_bits_are_those_of_casts_before_the_product(product):
    x, weight = _tensors()
    expected = _gradients(lambda x, weight: product(x.bfloat16(), weight.bfloat16()), x, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16), casting(NAMES):
        found = _gradients(product, x, weight)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [tensor.dtype for tensor in found] == [torch.bfloat16, torch.float32, torch.float32]


def _twice(x, weight):
    return F.grouped_mm(x, weight, offs=ENDS) + F.grouped_mm(x * 3, weight, offs=ENDS)


def test_a_leaf_is_cast_once_in_a_context_as_by_the_cache_of_autocast():
    x, weight = _tensors()
    leaf = nn.Parameter(weight.detach().mT.contiguous())

    def once(x, weight):
        copy = weight.bfloat16()
        return F.grouped_mm(x.bfloat16(), copy, offs=ENDS) + F.grouped_mm((x * 3).bfloat16(), copy, offs=ENDS)

    def each(x, weight):
        products = (F.grouped_mm(value.bfloat16(), weight.bfloat16(), offs=ENDS) for value in (x, x * 3))
        return sum(products)

    cached, fresh = (_gradients(make, x, leaf)[2] for make in (once, each))
    assert not torch.equal(cached, fresh), "or the test shows nothing"
    for is_cached, expected in ((True, cached), (False, fresh)):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=is_cached), casting(NAMES):
            assert torch.equal(_gradients(_twice, x, leaf)[2], expected)
    with torch.autocast("cpu", dtype=torch.bfloat16), casting(NAMES):
        with torch.no_grad():
            _twice(x, leaf)
        assert torch.equal(_gradients(_twice, x, leaf)[2], cached), "a copy without a graph is not used again"


def test_fp64_is_not_cast():
    x, weight = _tensors(torch.float64)
    no_kernel_takes_it = pytest.raises(RuntimeError)
    with torch.autocast("cpu", dtype=torch.bfloat16), casting(NAMES), no_kernel_takes_it:
        grouped(x, weight)


def test_other_threads_cast_nothing():
    x, weight = _tensors()
    found = []

    def run():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(grouped(x, weight).dtype)

    with casting(NAMES):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert found == [torch.float32]


_WITHOUT_THE_KEY = """
import torch, zeroamp
from tests.models.architectures import mixtral
from tests.processes.training import config, policy
has = torch._C._dispatch_has_kernel_for_dispatch_key
def found():
    return [has(op, "AutocastCPU") for op in ("aten::_grouped_mm", "transformers::grouped_mm_fallback")]
model, _, inputs = mixtral()
zeroamp.wrap_model(model, policy(config(3)))
before = found()
model, _, _ = mixtral()
zeroamp.wrap_model(model, policy(config(3, zeroamp={"autocast_ops": ["grouped_mm"]})))
print(before, found())
"""


@pytest.mark.slow
def test_nothing_is_registered_unless_the_key_is_set():
    pytest.importorskip("transformers", reason="the model is transformers'")
    run = subprocess.run(
        [sys.executable, "-c", _WITHOUT_THE_KEY], capture_output=True, text=True, cwd=ROOT, check=False, timeout=120
    )
    assert run.stdout.split("\n")[0] == "[False, False] [True, True]", run.stderr


def test_an_op_that_autocast_casts_by_itself_is_refused():
    library = torch.library.Library("aten", "IMPL")
    library.impl("_grouped_mm", lambda *args, **kwargs: None, "AutocastXPU")
    try:
        with pytest.raises(ConfigError, match=r"autocast_ops must not name grouped_mm.*Remove it"):
            register_ops(NAMES, "xpu")
    finally:
        library._destroy()
