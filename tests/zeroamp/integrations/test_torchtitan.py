"""The recipe of docs/torchtitan.md, with torchtitan's own LLaMA: the bits of one process."""

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import zeroamp
from tests.measuring.sources import ROOT
from tests.processes.training import full_parameters, same_bits

pytest.importorskip("triton", reason="torchtitan imports triton")
pytest.importorskip("torchtitan", reason="torchtitan is not installed: its LLaMA is trained")

pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit:DeprecationWarning")  # inductor's imports

NUM_STEPS, NUM_MICRO, LENGTH, VOCAB = 3, 2, 16, 2048


def _recipe():
    """Return the functions of the page's examples."""
    names = {"torch": torch}
    for block in re.findall(r"```python[^\n]*\n(.*?)```", (ROOT / "docs" / "torchtitan.md").read_text(), re.DOTALL):
        exec(block, names)
    return names


def _model():
    """The debug model, 2 layers; attention by torch's sdpa, since flex attention trains on GPUs only."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    settings = model_registry("debugmodel").model
    settings.layers = settings.layers[:2]
    for layer in settings.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return settings.build()


def _initial():
    torch.manual_seed(0)
    model = _model()
    model.init_weights()
    return model


def _micro_batches(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, VOCAB, (NUM_MICRO, 2, LENGTH + 1), generator=generator)
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


NUM_TOKENS = 2 * NUM_MICRO * 2 * LENGTH


def _one_process():
    """Plain torch: autocast, sums over ranks and micro-batches, each rank after each micro-batch (stage 3)."""
    model = _initial()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parameters, losses = list(model.parameters()), []
    for step in range(NUM_STEPS):
        total, of_step = None, [[], []]
        for micro in range(NUM_MICRO):
            gradients = []
            for rank in range(2):
                tokens, labels = _micro_batches(step, rank)[micro]
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    logits = model(tokens)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / NUM_TOKENS
                gradients.append(torch.autograd.grad(loss, parameters))
                of_step[rank].append(float(loss.detach()))
            sums = [one + other for one, other in zip(*gradients, strict=True)]
            total = sums if total is None else [one + other for one, other in zip(total, sums, strict=True)]
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.grad = gradient
        optimizer.step()
        losses.append(sum(map(sum, of_step)))
    return losses, {fqn: parameter.detach() for fqn, parameter in model.named_parameters()}


def _trained(checkpointing):
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.activation_checkpoint import FullAC

    recipe = _recipe()
    parallel_dims.device_type = "cpu"  # it takes "cuda" where there is no accelerator
    dims = ParallelDims(
        dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=1, world_size=2, spmd_backend="partial_dtensor"
    )
    with torch.device("meta"):
        model = _model()
    model = recipe["parallelize_llama"](
        model,
        parallel_dims=dims,
        training=TrainingConfig(),
        parallelism=ParallelismConfig(),
        compile_config=CompileConfig(),
        ac_config=FullAC.Config() if checkpointing else None,
        dump_folder="",
    )
    with pytest.raises(zeroamp.StepError, match=r"on the meta device.*to_empty"):
        zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters()))
    model.to_empty(device="cpu")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DTensor random operators")  # on CPUs
        model.init_weights()
    values = dict(_initial().named_parameters())
    clean = {fqn: fqn.replace("_checkpoint_wrapped_module.", "") for fqn, _ in model.named_parameters()}
    for fqn, parameter in model.named_parameters():
        zeroamp.set_full_parameter(parameter, values[clean[fqn]].detach())
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for step in range(NUM_STEPS):
        _, report = recipe["train_one_step"](train, _micro_batches(step, dist.get_rank()), NUM_TOKENS, 0.0)
        losses.append(report.loss * 2)
    units = sorted({group.unit for group in zeroamp.explain(model).plan.groups if group.unit.startswith("layers.")})
    return losses, {clean[fqn]: value for fqn, value in full_parameters(model).items()}, units


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_recipe_trains_to_the_bits_of_one_process(ranks2, checkpointing):
    losses, parameters = _one_process()
    for ours, found, units in ranks2.run(_trained, checkpointing):
        assert same_bits(found, parameters) == []
        assert ours == pytest.approx(losses, rel=1e-6)  # fp32 losses are added in another order
        assert units == ["layers.0", "layers.1"]
