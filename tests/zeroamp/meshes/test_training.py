"""Tensor, context and expert parallelism train as one process does, and all stages to the same bits."""

from dataclasses import dataclass, field

import pytest

from tests.models import parallel
from tests.oracles import whole_model
from tests.processes import parallel_training
from tests.processes.parallel_training import check_close, fp64_norm, reported
from tests.processes.training import config, same_bits
from tests.selection import slow_but

BOUND = 2e-6
"""fp32 has 24 bits. A row-wise product is two products of half the length, a rank's gradients sum the tokens of its
part of a sequence, and experts multiply the tokens of all ranks at once: the order of additions differs. 16 times the
rounding of one addition (1.2e-7)."""


def data_axis(mesh):
    return mesh["dp"]


def flattened(mesh):
    return mesh["dp", "cp"]._flatten("dp_cp")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a mesh, and what one process is given in its place."""

    axes: dict[str, int]
    options: dict = field(default_factory=dict)
    """Of `parallel_training.train`."""
    one_process: dict = field(default_factory=dict)
    """Arguments of the whole model."""
    build: str = "decoder"
    """The function of `tests.models.parallel` that builds the whole model."""
    split: str | None = None
    """FQN of a parameter that the parallel axis and FSDP2 split over one dimension."""


TENSOR, CONTEXT, EXPERTS = {"dp": 2, "tp": 2}, {"dp": 2, "cp": 2}, {"dp": 2, "ep": 2}
CASES = {
    "tensor, tied": Case(
        axes=TENSOR,
        options={"tied": True, "passed": data_axis},
        one_process={"tied": True},
        split="blocks.0.attention.q.weight",
    ),
    "tensor, parts of sequences": Case(axes=TENSOR, options={"sequence": True}, split="blocks.0.attention.q.weight"),
    "tensor, a 0-D parameter": Case(axes=TENSOR, options={"scaled": True}, one_process={"scaled": True}),
    "tensor, frozen": Case(axes=TENSOR, options={"adapted": True}, one_process={"adapted": True}),
    "tensor, transformers' plan": Case(
        axes=TENSOR,
        options={"hf": True, "tied": True},
        one_process={"tied": True},
        build="hf_decoder",
        split="lm.model.layers.0.self_attn.q_proj.weight",
    ),
    "context, Ulysses": Case(axes=CONTEXT, options={"passed": flattened}),
    "context, ring": Case(axes=CONTEXT, options={"ring": True}),
    "experts": Case(axes=EXPERTS, options={"experts": True}, build="moe_decoder", split="blocks.0.experts.up"),
    "experts, transformers' plan": Case(
        axes={**EXPERTS, "tp": 1},
        options={"experts": True, "hf": True},
        one_process={"experts": True},
        build="hf_decoder",
        split="lm.model.layers.0.mlp.experts.down_proj",
    ),
}


@pytest.mark.parametrize(
    "name", slow_but(CASES, "tensor, tied", "tensor, transformers' plan", "context, Ulysses", "experts")
)
def test_it_equals_one_process(ranks4, name):
    case = CASES[name]
    if "transformers" in name:
        pytest.importorskip("transformers.distributed.expert_parallel")
    num_data = 4 if "ep" in case.axes else 2
    model = getattr(parallel, case.build)(**case.one_process)
    start = {fqn: parameter.detach().clone() for fqn, parameter in model.named_parameters()}
    frozen = [fqn for fqn, parameter in model.named_parameters() if not parameter.requires_grad]
    oracle = whole_model.train(model, parallel.samples, 2, num_data=num_data, accumulation=2, clip=0.5)
    cfg = config(3, dtype=None, clip=0.5, accumulation=2)
    first, *others = ranks4.run(parallel_training.train, case.axes, cfg, 2, **case.options)
    check_close(first, oracle, BOUND)
    for fqn, parameter in oracle.parameters.items():
        if parameter.dim() == 0:
            assert float(first.parameters[fqn]) == pytest.approx(float(parameter), rel=1e-5)
    for other in others:
        assert (other.losses, other.norms) == (first.losses, first.norms)
        assert same_bits(other.parameters, first.parameters) == []
    assert [fqn for fqn in frozen if fqn in first.gradients or not first.parameters[fqn].equal(start[fqn])] == []
    assert case.split is None or "_StridedShard" in first.placements[case.split]


@pytest.mark.parametrize(
    ("axes", "options", "stages"),
    [
        pytest.param(TENSOR, {}, (1, 2), marks=pytest.mark.slow),
        pytest.param(EXPERTS, {"experts": True}, (1, 2), marks=pytest.mark.slow),
        (CONTEXT, {}, (0,)),
    ],
    ids=["tensor", "experts", "context"],
)
def test_stages_have_the_same_bits(ranks4, axes, options, stages):
    runs = {
        stage: ranks4.run(parallel_training.train, axes, config(stage, clip=0.5), 2, **options)[0]
        for stage in (*stages, 3)
    }
    for stage in stages:
        assert (runs[stage].losses, runs[stage].norms) == (runs[3].losses, runs[3].norms)
        assert same_bits(runs[stage].gradients, runs[3].gradients) == []
        assert same_bits(runs[stage].parameters, runs[3].parameters) == []
    assert runs[3].norms[0] == reported(fp64_norm(runs[3].gradients))
