"""The variants of the sum's kernel that are compiled when a model is wrapped, and those that a run then uses."""

import math
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import zeroamp
from tests.measuring.logs import log_lines
from tests.oracles.one_process import tree
from tests.processes import parallel_training
from tests.processes.training import SmallTraining, adamw, config, mesh_of
from tests.selection import slow_but
from zeroamp.hooks.collectives import gradient_reduction, tree_sum
from zeroamp.two_level import nodes


def variant_of(rows, output):
    """What Triton compiles the kernel for: rows, dtype, and whether rows and output allow accesses of 16 bytes."""
    of_a_load = 16 // rows.element_size()
    alignment = math.gcd(rows.stride(0), of_a_load)
    return len(rows), rows.dtype, alignment, output.numel() % 4 == 0


@contextmanager
def a_kernel(fails=lambda _variant: False):
    """Sum with a kernel that records its variants, on tensors of a CPU, and rows that are aligned as on CUDA."""
    seen, aligned = set(), gradient_reduction.row_length

    def kernel(rows, output, divide_by=1):
        seen.add(variant_of(rows, output))
        if fails(variant_of(rows, output)):
            raise RuntimeError("Failed to find C compiler")
        tree_sum._loop(rows, output, divide_by)
        return 1

    with (
        mock.patch.object(tree_sum, "_has_kernel", side_effect=lambda _device: tree_sum._failure is None),
        mock.patch.object(tree_sum, "_kernel", return_value=kernel),
        mock.patch.object(tree_sum, "_failure", None),
        mock.patch.object(
            gradient_reduction, "row_length", lambda numel, dtype, _: aligned(numel, dtype, torch.device("cuda"))
        ),
    ):
        yield seen


class _Odd(nn.Module):
    """Shards of 9 and 3 elements on 2 ranks: no multiples of 16 bytes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 6, bias=False)

    def forward(self, x):
        return self.last(self.norm(self.first(x))).float().square().mean()


def _odd(cfg, mesh_shape=None):
    torch.manual_seed(0)
    model = zeroamp.wrap_model(_Odd(), zeroamp.policy_from_config(cfg), mesh_of(mesh_shape))
    return model, lambda index: model(torch.ones(2, 3) * (index + 1)), lambda: list(model.parameters())


def _small(cfg, mesh_shape=None, name="two_blocks_untied"):
    training = SmallTraining(cfg, name=name, mesh_shape=mesh_shape)
    return training.model, training.loss, lambda: list(training.model.parameters())


def _parallel(cfg, axes, **options):
    mesh = parallel_training.mesh_of(**axes)
    policy = zeroamp.policy_from_config(cfg, world_size=parallel_training.num_data(mesh))
    model = zeroamp.wrap_model(parallel_training.prepared(mesh, **options), policy, mesh)
    return model, lambda index: model(*parallel_training.inputs_of(mesh, index)), lambda: list(model.parameters())


def _nodes(partials="fp32"):
    return {"zeroamp": {"ranks_per_node": 2, "partials_between_nodes": partials}}


CASES = {
    "stage 0": (_small, {"cfg": config(0)}),
    "stage 2": (_small, {"cfg": config(2)}),
    "stage 3, sum": (_small, {"cfg": config(3, zeroamp={"reduce": "sum"})}),
    "odd shards": (_odd, {"cfg": config(2)}),
    "HSDP": (_small, {"cfg": config(2), "mesh_shape": (2, 2)}),
    "HSDP, odd shards": (_odd, {"cfg": config(3), "mesh_shape": (2, 2)}),
    "two levels": (_small, {"cfg": config(2, **_nodes())}),
    "two levels, odd shards, bf16 partials": (_odd, {"cfg": config(2, comm="fp32", **_nodes("bf16"))}),
    "two levels of replicas": (_small, {"cfg": config(0, **_nodes("bf16"))}),
    "experts": (_parallel, {"cfg": config(2), "axes": {"dp": 2, "ep": 2}, "experts": True}),
    "tensor": (_parallel, {"cfg": config(2), "axes": {"dp": 2, "tp": 2}, "sequence": True}),
}


def _variants(case, factor, piece):
    """Return the variants that `wrap_model` compiles, and those that two backwards use."""
    make, options = CASES[case]
    with a_kernel() as seen, mock.patch.object(nodes, "BYTES_OF_A_PIECE", piece):
        model, loss, parameters = make(**options)
        ahead = set(seen)
        seen.clear()
        if factor is not None:
            for unit in (each for each in model.modules() if isinstance(each, FSDPModule)):
                unit.set_gradient_divide_factor(factor)
        for index in range(2):
            loss(index).backward()
            for parameter in parameters():
                parameter.grad = None
        return ahead, set(seen)


FACTORS = ("odd shards", "HSDP, odd shards")
FAST = ("stage 0", "odd shards", "HSDP", "two levels, odd shards, bf16 partials", "experts", "tensor")


@pytest.mark.parametrize("case", slow_but(list(CASES), *FAST))
def test_all_variants_of_the_kernel_are_compiled_at_wrap(request, case):
    needs_four = any(word in case for word in ("HSDP", "levels", "experts", "tensor"))
    ranks = request.getfixturevalue("ranks4" if needs_four else "ranks2")
    for ahead, used in ranks.run(_variants, case, 1.0 if case in FACTORS else None, 64):
        assert used
        assert used - ahead == set()
        # A sum of several micro-batches is sent in fp32.
        low = {variant for variant in ahead if variant[1] != torch.float32}
        assert {(rows, torch.float32, True) for rows, *_ in low} <= {(rows, dtype, True) for rows, dtype, *_ in ahead}


def _without_one_variant(when):
    """Train where the kernel of one variant fails, at wrap or in a backward. Return losses, parameters and the log."""

    def fails(variant):
        return when == "wrap" or (when == "backward" and variant[1] == torch.bfloat16 and is_wrapped)

    is_wrapped = False
    with a_kernel(fails) as seen, log_lines() as lines:
        training = SmallTraining(config(2), adamw, name="two_blocks_untied")
        is_wrapped = True
        losses = [training.step(index).loss for index in range(2)]
        tried = len(seen)
        SmallTraining(config(2), adamw, name="two_blocks_untied").step(0)  # a second model
    assert tried >= 1
    return losses, training.parameters(), [line for line in lines if "Failed to find C compiler" in line]


def test_a_variant_that_fails_in_a_backward_is_summed_by_the_loop(ranks2):
    expected = ranks2.run(_without_one_variant, "never")
    for when in ("wrap", "backward"):
        for (losses, parameters, lines), (same, others, none) in zip(
            ranks2.run(_without_one_variant, when), expected, strict=True
        ):
            assert losses == same
            assert all(torch.equal(parameters[fqn], others[fqn]) for fqn in others)
            assert none == []
            assert len(lines) == 1
            assert "same bits" in lines[0]


def _full_memory():
    rows, output = torch.randn(3, 40).bfloat16(), torch.empty(40)

    def kernel(*_args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with a_kernel(), mock.patch.object(tree_sum, "_kernel", return_value=kernel):
        with pytest.raises(torch.OutOfMemoryError):
            tree_sum.tree_sum(rows, output, 3)
        assert tree_sum._failure is None
    with a_kernel(lambda _variant: True):
        tree_sum.tree_sum(rows, output, 3)
    return torch.equal(output, tree(rows) / 3), dist.is_initialized()


def test_memory_that_is_full_does_not_end_the_use_of_the_kernel():
    assert _full_memory()[0]
