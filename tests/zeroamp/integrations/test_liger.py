"""Models with Liger's kernels have the bits of the same kernels in plain torch. Triton interprets them on the CPU."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn

import zeroamp
from tests.models.adapters import quietly
from tests.oracles import one_process
from tests.processes import trainer, trl_training
from tests.processes.ranks import Ranks
from tests.processes.training import config, same_bits, train
from tests.processes.triton_interpreter import interpret

if not (find_spec("liger_kernel") and find_spec("triton")):  # they are imported in interpreting ranks only
    pytest.skip("liger_kernel or triton is not installed: Triton interprets Liger's kernels", allow_module_level=True)

KERNELS = {"rope": False, "swiglu": False, "rms_norm": True}
ARGUMENTS = {
    "use_liger_kernel": True, "liger_kernel_config": KERNELS, "max_steps": 2, "per_device_train_batch_size": 1,
}  # fmt: skip
OVERRIDE = {"own_units": False, "overrides": [{"modules": "@lm_head", "param": "fp32", "communication": "fp32"}]}
LOW = {"dtype": None, "bf16": {"enabled": True}, "zeroamp": {"own_units": False}}


@pytest.fixture(scope="module")
def interpreting():
    """Ranks of their own: Liger replaces functions of transformers' modules."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


def _prepare(model):
    """Untie the head, leave one block, and apply the kernels."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.model.layers = model.model.layers[:1]
    apply_liger_kernel_to_llama(model=model, **KERNELS, fused_linear_cross_entropy=True)


def _loss(model, inputs):
    few = inputs[:1, :8]  # in several chunks, whose gradients are added
    return model(input_ids=few, labels=few).loss


@quietly
def _differences(options, low_model, stages):
    """What differs from the same kernels in one process, by stage."""
    interpret()
    given = {"world_size": 2, "num_steps": 2, "loss_fn": _loss}
    _, norms, parameters = one_process.train("hf_llama", **given, prepare=_prepare, low_model=low_model)
    found = {}
    for stage in stages:
        cfg = config(stage, **options)
        run = train("hf_llama", cfg, 2, prepare_before=_prepare, loss_fn=lambda step, x: _loss(step.model, x))
        found[stage] = same_bits(run.parameters, parameters) + ["norms"] * (run.norms != norms)
    return found


@pytest.mark.parametrize(
    ("options", "low_model"), [({"zeroamp": OVERRIDE}, None), (LOW, torch.bfloat16)], ids=["autocast", "bf16"]
)
def test_fused_cross_entropy_and_norms_have_the_bits_of_one_process(interpreting, options, low_model):
    assert interpreting.run(_differences, options, low_model, (2, 3)) == [{2: [], 3: []}] * 2


def test_a_head_that_is_safe_by_its_class_has_other_bits(interpreting):
    """Liger adds the gradients of the chunks in the dtype of the weight: this is why the head needs an override."""
    for found in interpreting.run(_differences, {"zeroamp": {"own_units": False}}, None, (3,)):
        assert "lm_head.weight" in found[3]


@quietly
def _in_a_trainer(folder):
    """What differs from the stock Trainer, and the head's dtypes in the ledger, after an observed step."""
    interpret()
    runs = []
    for kind in (trainer.DDP, 3):
        made = trainer.trainer_of(kind, folder, model=trainer.llama(num_hidden_layers=1), **ARGUMENTS)
        made.train()
        runs.append(trainer.outcome(made))
    tokens = torch.arange(1, 9).view(1, 8)
    ledger = zeroamp.explain(made.model)
    ledger.verify(made.model, {"input_ids": tokens, "labels": tokens})
    (row,) = (row for row in ledger.to_dict()["parameters"] if row["parameter"] == "lm_head.weight")
    return runs[1].differences(runs[0], norms=False), (row["param"], row["gradient"])


def test_a_trainer_that_applies_the_kernels_has_the_bits_of_ddp(interpreting, tmp_path):
    assert interpreting.run(_in_a_trainer, tmp_path) == [([], ("fp32", "fp32"))] * 2


@quietly
def _in_sft(folder):
    interpret()
    case = trl_training.Case(model={"num_hidden_layers": 1}, arguments={"max_length": 8})
    return trl_training.differences(case, (3,), folder, **ARGUMENTS)


def test_sft_with_the_kernels_has_the_bits_of_ddp(interpreting, tmp_path):
    pytest.importorskip("trl", reason="trl is not installed: its trainer is run")
    assert interpreting.run(_in_sft, str(tmp_path)) == [{3: []}] * 2
