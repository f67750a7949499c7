"""The recipe of docs/torchtitan.md, with torchtitan's own LLaMA: the bits of one process, and of torchtitan's FSDP2.

Tensor and context parallelism, activation checkpointing and compilation are applied by torchtitan's code. torchtitan
0.3.0 runs with `partial_dtensor`; its main, which packs sequences into one and always has a mask, with `spmd_types`.
"""

import dataclasses
import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

import zeroamp
from tests.measuring.sources import ROOT
from tests.processes.parallel_training import fp64_norm
from tests.processes.training import full_parameters, same_bits

pytest.importorskip("triton", reason="torchtitan imports triton")
torchtitan = pytest.importorskip("torchtitan", reason="torchtitan is not installed: its LLaMA is trained")

pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit:DeprecationWarning")  # inductor's imports

IS_MAIN = not (Path(torchtitan.__file__).parent / "distributed" / "full_dtensor.py").exists()
BACKEND = "spmd_types" if IS_MAIN else "partial_dtensor"
own_fsdp = pytest.mark.skipif(
    IS_MAIN and torch.__version__ < (2, 15), reason="FSDP2 takes parameters with spmd_types from torch 2.15 on"
)

NUM_STEPS, NUM_MICRO, LENGTH, VOCAB = 3, 2, 16, 2048
MASKED_LENGTH = 256
"""Of sequences with a block mask: torchtitan's blocks have 128 tokens, and each context rank gets one."""
LOW = {"float32": {}, "bfloat16": {"bf16": {"enabled": True}, "communication_data_type": "fp32"}}
"""torchtitan's mixed_precision_param -> the same in a config: bf16 parameters, gradients reduced in fp32."""


def _recipe():
    """Return the functions of the page's examples."""
    names = {"torch": torch}
    for block in re.findall(r"```python[^\n]*\n(.*?)```", (ROOT / "docs" / "torchtitan.md").read_text(), re.DOTALL):
        exec(block, names)
    return names


def _dense_attention():
    """torchtitan's flex attention with torch's sdpa in the place of its kernel, which has no backward on CPUs."""
    from torch.nn.attention.flex_attention import create_mask
    from torchtitan.models.common.attention import FlexAttention

    class DenseAttention(FlexAttention):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(FlexAttention.Config):
            pass

        def forward(self, q_TNH, k_TNH, v_TNH, *, attention_masks, scale=None, enable_gqa=False, **_):
            q, k, v = (each.transpose(-3, -2) for each in (q_TNH, k_TNH, v_TNH))
            batch = 1 if IS_MAIN else q.shape[0]
            mask = create_mask(attention_masks.mask_mod, batch, None, q.shape[-2], k.shape[-2], device=q.device)
            mask = mask[0] if IS_MAIN else mask
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
            return out.transpose(-3, -2)

    return DenseAttention.Config()


def _model(masked=False):
    """The debug model, 2 layers; attention by torch's sdpa, since flex attention trains on GPUs only."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    settings = model_registry("debugmodel").model
    settings.layers = settings.layers[:2]
    for layer in settings.layers:
        attention = layer.attention
        attention.inner_attention = _dense_attention() if masked or IS_MAIN else ScaledDotProductAttention.Config()
        longest = {"max_context_length" if IS_MAIN else "max_seq_len": MASKED_LENGTH}
        attention.rope = dataclasses.replace(attention.rope, **longest)
    set_llama3_sharding_config(settings, enable_sp=True)
    return settings.build()


def _initial(masked=False):
    torch.manual_seed(0)
    model = _model(masked)
    model.init_weights()
    return model


@torch.compiler.set_stance("force_eager")  # block masks are compiled else, which takes longer than all else
def _micro_batches(model, step, rank, masked=False):
    length = MASKED_LENGTH if masked else LENGTH
    generator, found = torch.Generator().manual_seed(100 * step + rank), []
    for each in torch.randint(0, VOCAB, (NUM_MICRO, 2, length + 1), generator=generator):
        positions = torch.arange(length).expand(2, length)
        given = [t.flatten() if IS_MAIN else t.contiguous() for t in (each[:, :-1], each[:, 1:], positions)]
        more = {}
        if masked or IS_MAIN:
            more = {"positions": given[2], "attention_masks": model.get_attention_masks(positions=given[2])}
        found.append((*given[:2], more))
    return found


def _one_process(num_ranks=2):
    """Plain torch: autocast, sums over ranks and micro-batches, each rank after each micro-batch (stage 3)."""
    model = _initial()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parameters, losses, num_tokens = list(model.parameters()), [], num_ranks * NUM_MICRO * 2 * LENGTH
    for step in range(NUM_STEPS):
        total, of_step = None, [[], []]
        for micro in range(NUM_MICRO):
            gradients = []
            for rank in range(num_ranks):
                tokens, labels, more = _micro_batches(model, step, rank)[micro]
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    logits = model(tokens, **more)
                loss = F.cross_entropy(logits.view(-1, VOCAB).float(), labels.flatten(), reduction="sum") / num_tokens
                gradients.append(torch.autograd.grad(loss, parameters))
                of_step[rank].append(float(loss.detach()))
            sums = [one + other for one, other in zip(*gradients, strict=True)]
            total = sums if total is None else [one + other for one, other in zip(total, sums, strict=True)]
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.grad = gradient
        optimizer.step()
        losses.append(sum(map(sum, of_step)))
    return losses, {fqn: parameter.detach() for fqn, parameter in model.named_parameters()}


def _dims(dp=2, cp=1, tp=1, pp=1):
    from torchtitan.distributed import ParallelDims, parallel_dims, utils

    warnings.filterwarnings("ignore", category=UserWarning)  # of DTensor and of compilation
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*should not be instantiated")  # of Dynamo
    parallel_dims.device_type = "cpu"  # it takes "cuda" where there is no accelerator
    utils.set_spmd_backend(BACKEND)
    sizes = {"dp_shard": dp, "cp": cp, "tp": tp, "pp": pp, "world_size": dp * cp * tp * pp}
    return ParallelDims(dp_replicate=1, ep=1, spmd_backend=BACKEND, **sizes)


def _options(dims, checkpointing=None, backend=None, dtype="float32"):
    """The arguments of torchtitan's `parallelize_fn`."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    kinds = {None: None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}
    return {
        "parallel_dims": dims,
        "training": TrainingConfig(mixed_precision_param=dtype, mixed_precision_reduce="float32"),
        "parallelism": ParallelismConfig(spmd_backend=BACKEND),
        "compile_config": CompileConfig(enable=backend is not None, backend=backend or "inductor"),
        "ac_config": kinds[checkpointing],
        "dump_folder": "",
    }


def _clean(named):
    return {fqn.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): t for fqn, t in named.items()}


def _wrapped(recipe, options, masked=False):
    """Build on the meta device, wrap, and give values, as torchtitan's Trainer does."""
    with torch.device("meta"):
        model = _model(masked)
    model = recipe["parallelize_llama_of_main" if IS_MAIN else "parallelize_llama"](model, **options)
    with pytest.raises(zeroamp.StepError, match=r"on the meta device.*to_empty"):
        zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters()))
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    values = dict(_initial(masked).named_parameters())
    for fqn, parameter in _clean(dict(model.named_parameters())).items():
        zeroamp.set_full_parameter(parameter, values[fqn].detach())
    return model


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """What one rank saw."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    """Whole, of the first step."""
    parameters: dict[str, torch.Tensor]
    units: set[str] = dataclasses.field(default_factory=set)
    """FSDP units among the blocks."""


def _batches(dims, model, step, masked):
    """Return this rank's micro-batches: its part of the sequences of its data rank."""
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input

    rank, found = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0, []
    for tokens, labels, more in _micro_batches(model, step, rank, masked):
        if dims.cp_enabled:
            device = torch.device("cpu")
            tokens, labels, more = prepare_context_parallel_input(tokens, labels, more, dims.get_mesh("cp"), device)
        found.append((tokens, labels, more))
    return found


def _loss_and_context(dims):
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed.utils import get_spmd_context

    return partial(cross_entropy_loss, global_vocab_size=VOCAB), get_spmd_context(parallel_dims=dims)


def _theirs(dims, options, num_steps, masked=False):
    """torchtitan's own `parallelize_llama`, with its FSDP2, norm and an optimizer."""
    from torchtitan.distributed import utils
    from torchtitan.models.llama3.parallelize import parallelize_llama

    model = parallelize_llama(_initial(masked), **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other sum with a factor
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms, gradients = [], [], {}
    loss_fn, context = _loss_and_context(dims)
    for step in range(num_steps):
        total = torch.zeros(())
        for tokens, labels, more in _batches(dims, model, step, masked):
            with context():
                loss = loss_fn(model(tokens, **more), labels) / _num_tokens(dims, masked)
                loss.backward()
            total += loss.detach()
        named = {fqn: parameter.grad for fqn, parameter in model.named_parameters()}
        gradients = gradients or _clean({fqn: gradient.full_tensor() for fqn, gradient in named.items()})
        norms.append(float(utils.clip_grad_norm_(model.parameters(), float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total, group=dims.get_mesh("loss").get_group())
        losses.append(float(total))
    return _Run(losses=losses, norms=norms, gradients=gradients, parameters=_clean(full_parameters(model)))


def _num_tokens(dims, masked):
    return dims.dp_shard * NUM_MICRO * 2 * (MASKED_LENGTH if masked else LENGTH)


def _ours(dims, options, num_steps, masked=False, cfg=None):
    recipe = _recipe()
    if cfg is not None:
        own = {"reduce": "sum", "reduce_accumulate_dtype": "native"}  # of three ranks on, orders of sums differ
        recipe["POLICY"] = zeroamp.policy_from_config({"zero_optimization": {"stage": 3}, "zeroamp": own, **cfg})
    model = _wrapped(recipe, options, masked)
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses, norms, gradients = [], [], {}
    loss_fn, context = _loss_and_context(dims)

    def note(*_):
        if not gradients:
            named = dict(model.named_parameters())
            gradients.update(_clean({fqn: zeroamp.full_gradient(each).clone() for fqn, each in named.items()}))

    clip = train.clip_grad_norm
    train.clip_grad_norm = lambda max_norm: (note(), clip(max_norm))[1]
    for step in range(num_steps):
        batches = _batches(dims, model, step, masked)
        with context():
            norm, report = recipe["train_one_step"](train, batches, _num_tokens(dims, masked), 0.0, loss_fn)
        losses.append(report.loss * dims.dp_shard * dims.cp)
        norms.append(float(norm))
    units = {group.unit for group in zeroamp.explain(model).plan.groups if group.unit.startswith("layers.")}
    parameters = _clean(full_parameters(model))
    return _Run(losses=losses, norms=norms, gradients=gradients, parameters=parameters, units=units)


def _both(axes, case, num_steps, masked=False):
    dims = _dims(**axes)
    dtype = case.get("dtype", "float32")
    theirs = _theirs(dims, _options(dims, **case), num_steps, masked)
    ours = _ours(dims, _options(dims, **case), num_steps, masked, LOW[dtype])
    return ours, theirs


def _check_same(ours, theirs, case):
    # FSDP2 sums partial gradients, those of norms, in bf16, or from torch 2.15 on rounds them later than main's recipe.
    rounded = {fqn for fqn in theirs.gradients if "norm" in fqn and "dtype" in case}
    assert set(same_bits(ours.gradients, theirs.gradients)) <= rounded
    assert set(same_bits(ours.parameters, theirs.parameters)) <= rounded
    for fqn in rounded:
        assert (ours.gradients[fqn] - theirs.gradients[fqn]).norm() < 2**-8 * theirs.gradients[fqn].norm()
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)  # fp32 losses are added in another order
    # torch's norm of norms is summed in fp32.
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-4)
    assert ours.norms[0] == pytest.approx(fp64_norm(ours.gradients), rel=2**-24)


CASES = [
    {},
    {"checkpointing": "full", "dtype": "bfloat16"},
    {"backend": "inductor"},
    {"checkpointing": "selective", **({} if IS_MAIN else {"backend": "eager"})},
]
"""What torchtitan applies beside tensor parallelism. With checkpointing and another backend than "eager", 0.3.0's own
`parallelize_llama` raises in AOTAutograd on torch 2.13: a DTensor's mesh is among the saved tensors. Main refuses
"eager" for a model with flex attention."""


@own_fsdp
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case.values()) or "plain")
def test_tensor_parallelism_has_the_bits_of_torchtitans_own_fsdp(ranks4, case):
    num_steps = 1 if "dtype" in case else NUM_STEPS  # later, what norms differ by is in all
    for ours, theirs in ranks4.run(_both, {"dp": 2, "tp": 2}, case, num_steps):
        _check_same(ours, theirs, case)


@own_fsdp
@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"dp": 2, "cp": 2}, *[{"dp": 1, "cp": 2, "tp": 2}] * IS_MAIN], ids=str)
def test_context_parallelism_has_the_bits_of_torchtitans_own_fsdp(ranks4, axes):
    for ours, theirs in ranks4.run(_both, axes, {}, 1, masked=True):
        _check_same(ours, theirs, {})


def _alone(checkpointing):
    dims = _dims()
    return _ours(dims, _options(dims, checkpointing), NUM_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [None, "full"])
def test_the_recipe_trains_to_the_bits_of_one_process(ranks2, checkpointing):
    losses, parameters = _one_process()
    for ours in ranks2.run(_alone, checkpointing):
        assert same_bits(ours.parameters, parameters) == []
        assert ours.losses == pytest.approx(losses, rel=1e-6)  # fp32 losses are added in another order
        assert ours.units == {"layers.0", "layers.1"}


NUM_PIPELINED = 4
"""Micro-batches of a pipeline, of two sequences each."""


def _pipelined(schedule_name, dtype, tp, *, is_theirs):
    """Train in torchtitan's pipeline: with the recipe, or with its own `parallelize_llama` and FSDP2."""
    from torchtitan.distributed import utils
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.parallelize import parallelize_llama

    dims, device, recipe = _dims(pp=2, tp=tp), torch.device("cpu"), _recipe()
    options = _options(dims, dtype=dtype)
    options["training"].local_batch_size = 2 * NUM_PIPELINED
    for name, value in {"degree": 2, "schedule": schedule_name, "microbatch_size": 2}.items():
        setattr(options["parallelism"], f"pipeline_parallel_{name}", value)
    model_config = model_registry("debugmodel").model
    model_config.layers = model_config.layers[:2]
    cross_entropy, context = _loss_and_context(dims)
    given = {"model_config": model_config, "device": device, **options}

    def loss_fn(output, labels, num_tokens):
        return cross_entropy(output, labels) / num_tokens, {}

    if is_theirs:
        schedule, parts, *_ = pipeline_llm(_initial(), parallelize_fn=parallelize_llama, loss_fn=loss_fn, **given)
        for module in (module for part in parts for module in part.modules()):
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other sum with a factor
        optimizer = torch.optim.AdamW([each for part in parts for each in part.parameters()], lr=1e-3)
    else:
        own = {"reduce": "sum", "reduce_accumulate_dtype": "native"}
        cfg = {"zero_optimization": {"stage": 3}, "zeroamp": own, **LOW[dtype]}
        recipe["POLICY"] = zeroamp.policy_from_config(cfg)
        with torch.device("meta"):
            model = _model()
        schedule, train = recipe["pipeline"](model, loss_fn=cross_entropy, **given)
        parts, values = list(train.model.parts), dict(_initial().named_parameters())
        for fqn, parameter in train.model.named_parameters():
            zeroamp.set_full_parameter(parameter, values[fqn].detach())
    first, last = (any(getattr(part, name) is not None for part in parts) for name in ("tok_embeddings", "lm_head"))
    num_tokens = 2 * NUM_PIPELINED * 2 * LENGTH
    norms, gradients, losses = [], {}, []
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(100 * step + dims.get_mesh("batch").get_local_rank())
        whole = torch.randint(0, VOCAB, (2 * NUM_PIPELINED, LENGTH + 1), generator=generator)
        of_step = []
        of_last = {"target": whole[:, 1:].contiguous(), "losses": of_step}
        with context():
            schedule.step(
                *([whole[:, :-1].contiguous()] if first else []),
                **(of_last | {"loss_kwargs": {"num_tokens": num_tokens}} if last else {}),
            )
        named = {fqn: each for part in parts for fqn, each in part.named_parameters()}
        gradients = gradients or {fqn: each.grad.full_tensor() for fqn, each in named.items()}
        losses.append([float(loss) for loss in of_step])
        if is_theirs:
            norm = utils.clip_grad_norm_(list(named.values()), float("inf"), pp_mesh=dims.get_mesh("pp"))
            norms.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
        else:
            norms.append(train.step().grad_norm)
    parameters = {fqn: each for part in parts for fqn, each in full_parameters(part).items()}
    return _Run(losses=losses, norms=norms, gradients=gradients, parameters=parameters)


def _both_pipelined(*case):
    return _pipelined(*case, is_theirs=False), _pipelined(*case, is_theirs=True)


@pytest.mark.skipif(IS_MAIN, reason="main's pipeline_llm has other arguments")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule_name", "dtype", "tp"),
    [("1F1B", "float32", 1), ("1F1B", "bfloat16", 1), ("Interleaved1F1B", "float32", 1), ("1F1B", "float32", 2)],
)
def test_pipelines_have_the_bits_of_torchtitans_own_fsdp(request, schedule_name, dtype, tp):
    found = request.getfixturevalue(f"ranks{4 * tp}").run(_both_pipelined, schedule_name, dtype, tp)
    for ours, theirs in found:
        assert same_bits(ours.gradients, theirs.gradients) == []
        assert same_bits(ours.parameters, theirs.parameters) == []
        assert ours.losses == theirs.losses
        assert ours.norms == pytest.approx(theirs.norms, rel=1e-4)  # torch's norm of norms is summed in fp32
    of_all_stages = {fqn: each for ours, _ in found for fqn, each in ours.gradients.items()}
    assert found[0][0].norms[0] == pytest.approx(fp64_norm(of_all_stages), rel=2**-24)
    assert len(of_all_stages) == len(list(_initial().parameters()))
