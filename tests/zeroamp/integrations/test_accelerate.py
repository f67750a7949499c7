"""`ZeroampAccelerator` beside accelerate's own `Accelerator`, in the same script, on 2 gloo ranks."""

import dataclasses
import os
import tempfile
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import zeroamp
from tests.models import small
from tests.models.adapters import quietly
from tests.models.families import FAMILIES
from tests.models.small import VOCAB, WIDTH, Block, RMSNorm
from tests.processes.trainer import DDP, REDUCES_EACH, forget_accelerate, reduce_each
from tests.processes.training import SmallTraining, adamw, config, full_parameters, same_bits
from zeroamp.training.step import step_of

pytest.importorskip("accelerate", reason="accelerate is not installed: it is what ZeroampAccelerator is a subclass of")

LENGTH, CLASSES = 8, 3


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))  # one element: its state has one too, as the step count has
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens, labels=None):
        h = self.embed(tokens) * self.gain
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h).mean(1))
        return {"loss": None if labels is None else nn.functional.cross_entropy(logits, labels), "logits": logits}


def examples(number, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (number, LENGTH), generator=generator)
    return [{"tokens": row, "labels": row.sum() % CLASSES} for row in tokens]


def accelerator_of(kind, cfg=None, **kwargs):
    from accelerate import Accelerator

    from zeroamp.integrations.accelerate import ZeroampAccelerator

    forget_accelerate()
    warnings.filterwarnings("ignore", message="Joining uneven inputs")
    if kind in (DDP, REDUCES_EACH):
        return Accelerator(cpu=True, mixed_precision="bf16", **kwargs)
    return ZeroampAccelerator(cpu=True, zeroamp=config(kind, accumulation=None) | (cfg or {}), **kwargs)


def two_groups(model):
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


@dataclasses.dataclass
class Script:
    """A training script as accelerate's examples are written, and what it did."""

    accelerator: object
    max_norm: float | None = None
    model: nn.Module = None
    losses: list = dataclasses.field(default_factory=list)
    norms: list = dataclasses.field(default_factory=list)
    rates: list = dataclasses.field(default_factory=list)
    predictions: list = dataclasses.field(default_factory=list)

    def prepare(self, seed=0, num=24):
        torch.manual_seed(seed)
        self.model = Classifier()
        self.optimizer = two_groups(self.model)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + 0.1 * step))
        train = DataLoader(examples(num, 1), batch_size=4, shuffle=True)
        evaluated = DataLoader(examples(10, 2), batch_size=4)
        self.model, self.optimizer, self.train, self.evaluated, self.scheduler = self.accelerator.prepare(
            self.model, self.optimizer, train, evaluated, self.scheduler
        )
        return self

    def epoch(self):
        self.model.train()
        for batch in self.train:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch)["loss"]
                self.accelerator.backward(loss)
                if self.max_norm is not None and self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_norm)
                    self.norms.append(float(norm))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(float(loss.detach()))
            self.rates.append(self.scheduler.get_last_lr()[0])
        self.model.eval()
        for batch in self.evaluated:
            with torch.no_grad():
                logits = self.model(**batch)["logits"]
            self.predictions += self.accelerator.gather_for_metrics(logits).tolist()
        return self

    def parameters(self):
        return full_parameters(getattr(self.model, "module", self.model))

    def differences(self, other):
        """What differs in any bit."""
        lists = [n for n in ("losses", "norms", "rates", "predictions") if getattr(self, n) != getattr(other, n)]
        return lists + same_bits(self.parameters(), other.parameters())


def run(kind, cfg=None, *, epochs=2, max_norm=None, **kwargs):
    script = Script(accelerator_of(kind, cfg, **kwargs), max_norm)
    if kind == REDUCES_EACH:
        reduce_each(script.accelerator)
    if kind == DDP:
        clip_by_fp64(script.accelerator)
    script.prepare()
    for _ in range(epochs):
        script.epoch()
    return script


def clip_by_fp64(accelerator):
    """Give a stock Accelerator the norm of zeroamp: squares added in fp64, the norm rounded to fp32 once.

    torch's is the fp32 norm of fp32 norms of the parameters, an ulp or so apart. AdamW and bf16 compute make more of
    that ulp in every step: after 10 of them, 4e-4 of the norm.
    """

    def clip(parameters, max_norm):
        gradients = [parameter.grad for parameter in parameters]
        norm = sum(gradient.double().square().sum() for gradient in gradients).sqrt().float()
        for gradient in gradients:
            gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    accelerator.clip_grad_norm_ = clip


FP32 = {"communication_data_type": "fp32"}
# 3 batches of each rank in an epoch.
PARITY = {
    "2 epochs": (dict.fromkeys(range(4), DDP), {}, 6),
    "a short last step": ({0: DDP, 1: DDP, 3: REDUCES_EACH}, {"gradient_accumulation_steps": 2}, 4),
    "clipping": ({0: DDP, 3: DDP}, {"max_norm": 0.5}, 6),
}
"""Name -> the oracle of each stage, arguments of `run`, and the optimizer steps."""


def _compared(kind_of_stage, arguments):
    oracles = {kind: run(kind, **arguments) for kind in dict.fromkeys(kind_of_stage.values())}
    found = {}
    for stage, kind in kind_of_stage.items():
        script = run(stage, **arguments)
        found[stage] = script.differences(oracles[kind]), script.accelerator.train_step.num_steps
    return found, oracles[DDP].losses, oracles[DDP].norms


@pytest.mark.parametrize("name", PARITY)
def test_losses_predictions_rates_norms_and_parameters_are_those_of_accelerates_ddp(ranks2, name):
    kinds, arguments, num_steps = PARITY[name]
    for found, losses, norms in ranks2.run(_compared, kinds, arguments):
        assert found == dict.fromkeys(kinds, ([], num_steps))
        assert losses[-1] < losses[0]
        assert (max(norms, default=0.0) > 0.5) == (name == "clipping")


def _by_hand(stage, uses_no_sync):
    """A loop without `accumulate`, whose script divides and steps every second time. Each backward syncs, or the first
    is inside of `no_sync`."""
    script = Script(accelerator_of(stage, FP32)).prepare(num=32)
    oracle = Script(accelerator_of(DDP if uses_no_sync else REDUCES_EACH))
    if not uses_no_sync:
        reduce_each(oracle.accelerator)
    for each in (script, oracle.prepare(num=32)):
        accelerator = each.accelerator
        for index, batch in zip(range(4), each.train, strict=False):
            is_last = index % 2 == 1
            if each is oracle and not uses_no_sync:
                accelerator.gradient_state._set_sync_gradients(is_last)
            with accelerator.no_sync(each.model) if uses_no_sync and not is_last else nullcontext():
                loss = each.model(**batch)["loss"] / 2
                accelerator.backward(loss)
            if is_last:
                each.optimizer.step()
                each.optimizer.zero_grad()
            each.losses.append(float(loss.detach()))
    return script.differences(oracle)


@pytest.mark.parametrize(("stage", "uses_no_sync"), [(0, False), (3, False), (1, True)])
def test_a_loop_without_accumulate_that_steps_after_several_backwards(ranks2, stage, uses_no_sync):
    assert ranks2.run(_by_hand, stage, uses_no_sync) == [[], []]


def _resumed(folder, stage, dtype):
    from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration

    def start(seed):
        project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
        loaders = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
        cfg = config(stage, dtype=dtype, accumulation=None)
        script = Script(
            accelerator_of(stage, cfg, project_config=project, dataloader_config=loaders, gradient_accumulation_steps=2)
        )
        script.prepare(seed)
        script.seen = nn.Module()  # a custom object of a checkpoint
        script.seen.register_buffer("count", torch.zeros(()))
        script.accelerator.register_for_checkpointing(script.seen)
        return script

    first = start(seed=0)
    for epoch in range(3):
        first.seen.count.fill_(epoch)
        first.losses, first.rates = [], []
        first.train.set_epoch(epoch)
        first.epoch()
        if epoch < 2:
            first.accelerator.save_state()
    first.accelerator.save_state()  # the third: the first is removed
    names = sorted(os.listdir(f"{folder}/checkpoints"))
    expected, shuffled = first.parameters(), torch.rand(3)
    second = start(seed=5)
    second.accelerator.load_state(f"{folder}/checkpoints/checkpoint_1")
    count, steps = int(second.seen.count), second.accelerator.train_step.num_steps
    second.train.set_epoch(2)
    second.epoch()
    second_random = torch.rand(3)
    different = same_bits(second.parameters(), expected)
    same = (second.losses, second.rates) == (first.losses, first.rates)
    third = start(seed=6)
    third.accelerator.load_state()  # the newest
    different += same_bits(third.parameters(), expected)
    return names, count, steps, different, same, torch.equal(shuffled, second_random)


@pytest.mark.parametrize(("stage", "dtype"), [(3, "bfloat16"), pytest.param(1, "float16", marks=pytest.mark.slow)])
def test_training_goes_on_exactly_from_a_state(ranks2, tmp_path, stage, dtype):
    for found in ranks2.run(_resumed, str(tmp_path), stage, dtype):
        assert found == (["checkpoint_1", "checkpoint_2"], 1, 4, [], True, True)


def _not_stepped(folder):
    """A teacher and a student that are prepared one by one, and a state that is loaded before a training step."""

    def start(seed):
        torch.manual_seed(seed)
        accelerator = accelerator_of(3)
        accelerator.prepare_model(Classifier().requires_grad_(False))
        trained = accelerator.prepare_model(Classifier())
        accelerator.prepare_optimizer(torch.optim.AdamW(trained.parameters()))
        return accelerator, trained, full_parameters(trained)

    accelerator, _, expected = start(0)
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    accelerator, trained, others = start(1)
    accelerator.load_state(folder)
    return same_bits(full_parameters(trained), expected), len(same_bits(others, expected)) > 0


def test_a_state_holds_a_model_that_has_not_stepped(ranks2, tmp_path):
    assert ranks2.run(_not_stepped, str(tmp_path)) == [([], True)] * 2


def _saved_model(folder):
    script = run(3, epochs=1)
    accelerator, model, parameters = script.accelerator, script.model, script.parameters()
    accelerator.save_model(model, f"{folder}/model", max_shard_size="6KB")
    state = accelerator.get_state_dict(model)
    assert accelerator.unwrap_model(model) is model
    zeroamp.unwrap_model(model)
    assert type(model) is Classifier
    assert "no_sync" not in vars(model)
    assert not model._forward_hooks
    if not accelerator.is_main_process:
        assert state == {}
        return [], 0
    from accelerate.utils import load_checkpoint_in_model

    plain = Classifier()
    load_checkpoint_in_model(plain, f"{folder}/model")
    different = same_bits(dict(plain.state_dict()), state) + same_bits(state, parameters)
    return different, len(os.listdir(f"{folder}/model"))


def test_a_saved_model_is_the_trained_model(ranks2, tmp_path):
    """A saved model and a whole state_dict are those of the trained model."""
    (different, num_files), _ = ranks2.run(_saved_model, str(tmp_path))
    assert different == []
    assert num_files > 2  # several files and an index


def _overflowed():
    cfg = config(2, dtype="float16", accumulation=None, fp16={"initial_scale_power": 18, "hysteresis": 1})
    script = Script(accelerator_of(2, cfg)).prepare(num=40)
    before = script.parameters()
    accelerator, skips, rates = script.accelerator, [], []
    after_first = None
    for batch in script.train:
        accelerator.backward(script.model(**batch)["loss"])
        script.optimizer.step()
        script.scheduler.step()
        script.optimizer.zero_grad()
        skips.append((accelerator.optimizer_step_was_skipped, script.optimizer.step_was_skipped))
        rates.append(script.scheduler.get_last_lr()[0])
        after_first = after_first or script.parameters()
        if not skips[-1][0]:
            break
    return same_bits(after_first, before), skips, rates


def test_a_step_whose_gradients_overflow_is_skipped_and_so_is_the_scheduler(ranks2):
    for changed, skips, rates in ranks2.run(_overflowed):
        assert changed == []
        assert skips[0] == (True, True)
        assert rates[0] == 1e-2
        assert skips[-1] == (False, False)
        assert rates[-1] < 1e-2


def _two_optimizers(kind, in_turn):
    """Train a body by an optimizer that is built before the model is prepared and has state, a head by one built after.

    in_turn: each has a backward of its own, as a GAN's, and discards the gradients of the other.
    """
    accelerator = accelerator_of(kind)
    torch.manual_seed(0)
    model = Classifier()
    body = [parameter for name, parameter in model.named_parameters() if not name.startswith("head")]
    first = torch.optim.AdamW(body, lr=1e-2)
    model(examples(1, 3)[0]["tokens"][None], torch.tensor([1]))["loss"].backward()
    first.step()  # the same on every rank
    first.zero_grad()
    model.zero_grad()
    prepared = accelerator.prepare(model)
    head = (prepared.module if kind == DDP else prepared).head
    optimizers = [accelerator.prepare(first), accelerator.prepare(torch.optim.SGD(head.parameters(), lr=0.1))]
    losses = []
    for batch in accelerator.prepare(DataLoader(examples(16, 1), batch_size=4)):
        for stepped in [[each] for each in optimizers] if in_turn else [optimizers]:
            loss = prepared(**batch)["loss"]
            accelerator.backward(loss)
            for optimizer in stepped:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses, full_parameters(model)


@pytest.mark.parametrize("in_turn", [False, True], ids=["together", "in turn"])
def test_optimizers_that_are_built_before_with_state_or_after_and_prepared_apart(ranks2, in_turn):
    ours, stock = (ranks2.run(_two_optimizers, kind, in_turn) for kind in (3, DDP))
    for (losses, parameters), (expected, others) in zip(ours, stock, strict=True):
        assert losses == expected
        assert same_bits(parameters, others) == []


def _misused():
    def raises(says, call, *args, **kwargs):
        with pytest.raises(zeroamp.StepError) as error:
            call(*args, **kwargs)
        assert says in str(error.value)

    script = Script(accelerator_of(2, gradient_accumulation_steps=2)).prepare()
    accelerator, model = script.accelerator, script.model
    batch = next(iter(script.train))
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch)["loss"])
        raises("accelerator.sync_gradients", accelerator.clip_grad_norm_, model.parameters(), 1.0)
        folder = f"{tempfile.mkdtemp()}/state"
        raises("1 micro-batch", accelerator.save_state, folder)
        assert not os.path.exists(folder)  # accelerate has not begun: it removes older states first
        script.optimizer.step()  # nothing: the optimizer step goes on
        script.optimizer.zero_grad()
    assert step_of(accelerator.train_step).state.step.num_micro_batches == 1
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch)["loss"])
        raises("model.parameters()", accelerator.clip_grad_norm_, model.head.parameters(), 1.0)
        raises("2-norm", accelerator.clip_grad_norm_, model.parameters(), 1.0, 1)
        before = script.parameters()
        script.optimizer.zero_grad()  # instead of a step: the optimizer step is discarded
    assert step_of(accelerator.train_step).is_between_steps
    assert same_bits(script.parameters(), before) == []
    with model.no_sync():
        accelerator.backward(model(**batch)["loss"])
    accelerator.backward(model(**batch)["loss"])
    accelerator.clip_grad_value_(model.parameters(), 1e-3)
    assert max(float(p.grad.full_tensor().abs().max()) for p in model.parameters()) == pytest.approx(1e-3)
    script.optimizer.step()
    with accelerator.no_sync(model):
        accelerator.backward(model(**batch)["loss"])
        raises("LocalSGD", script.optimizer.step)
    script.optimizer.zero_grad()
    raises("even_batches=True", accelerator.join_uneven_inputs, [model])
    other = Classifier()
    raises("2 models", accelerator.prepare, other, torch.optim.SGD(other.parameters()))


def test_what_a_script_may_not_call(ranks2):
    ranks2.run(_misused)


def _without_optimizer():
    """What differs from DDP's parameters and norms, with an optimizer of the caller, and other weights per rank."""
    found = []
    for kind in (DDP, 0, 3):
        accelerator = accelerator_of(kind)
        torch.manual_seed(dist.get_rank())
        model, loader = accelerator.prepare(Classifier(), DataLoader(examples(16, 3), batch_size=4))
        optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.1), []
        for batch in loader:
            with accelerator.no_sync(model):
                accelerator.backward(model(**batch)["loss"])
            accelerator.backward(model(**batch)["loss"])
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 100.0)))
            optimizer.step()
            optimizer.zero_grad()
        found.append((full_parameters(getattr(model, "module", model)), norms))
    (expected, norms), *ours = found
    accelerator = accelerator_of(0, {"gradient_clipping": 1.0}, gradient_accumulation_steps=2)
    model = accelerator.prepare(Classifier())
    with pytest.raises(zeroamp.StepError, match="gradient_accumulation_steps=2, but no optimizer is prepared"):
        accelerator.backward(torch.ones((), requires_grad=True))
    with pytest.raises(zeroamp.StepError, match=r"a ZeroampAccelerator trains. Call accelerator.backward\(loss\)"):
        model(torch.ones(1, 2, dtype=torch.long))["logits"].sum().backward()
    accelerator = accelerator_of(0, {"gradient_clipping": 1.0})
    model = accelerator.prepare(Classifier())
    with pytest.raises(zeroamp.StepError, match=r"needs. Call accelerator.prepare\(model, optimizer\)"):
        accelerator.backward(model(torch.ones(1, 2, dtype=torch.long))["logits"].sum())
    return [(same_bits(parameters, expected), each == pytest.approx(norms)) for parameters, each in ours]


def test_a_model_prepared_without_an_optimizer_trains_as_with_ddp(ranks2):
    """Also with other first weights on each rank, which get those of the first."""
    assert ranks2.run(_without_optimizer) == [[([], True)] * 2] * 2


def _teacher():
    """A frozen model, prepared with the trained one, and another training after `free_memory`."""
    stock = accelerator_of(DDP)
    ours = accelerator_of(3)
    logits = []
    for accelerator in (stock, ours):
        torch.manual_seed(7)
        teacher, student = Classifier().requires_grad_(False).eval(), Classifier()
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
        student, optimizer = accelerator.prepare(student, optimizer)
        batch = torch.stack([each["tokens"] for each in examples(4, 5)])
        with torch.no_grad():
            target = teacher(batch)["logits"]
        found = student(batch)["logits"]
        assert found.dtype == target.dtype == torch.float32
        loss = nn.functional.mse_loss(found, target)  # outside of the model: of fp32 outputs
        with accelerator.autocast():
            loss = loss + (target @ target.T).mean().float()
        accelerator.backward(loss)
        optimizer.step()
        logits.append((target, student(batch)["logits"].detach(), loss.detach()))
    assert ours.train_step.model is student
    student, optimizer = ours.free_memory(student, optimizer)
    with pytest.raises(zeroamp.StepError, match="No model is prepared"):
        _ = ours.train_step
    script = Script(ours).prepare().epoch()
    return [torch.equal(*pair) for pair in zip(*logits, strict=True)], len(script.losses)


def test_a_frozen_teacher_and_another_training_with_the_same_accelerator(ranks2):
    assert ranks2.run(_teacher) == [([True] * 3, 3)] * 2


@quietly
def _generates_from_an_image():
    model = FAMILIES["LLaVA"].seeded().eval()
    inputs = {name: tensor for name, tensor in FAMILIES["LLaVA"].batch(0).items() if name != "labels"}
    inputs |= {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.generate(**inputs)
    return torch.equal(accelerator_of(3).prepare_model(model).generate(**inputs), expected)


def test_generation_encodes_an_image_before_the_first_forward(ranks2):
    pytest.importorskip("transformers", reason="transformers is not installed: its model generates")
    assert ranks2.run(_generates_from_an_image) == [True, True]


def _filled():
    auto = {
        "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "torch_autocast": {"enabled": "auto", "dtype": "auto"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
    }  # fmt: skip
    script = Script(accelerator_of(2, auto, gradient_accumulation_steps=3, mixed_precision="bf16"))
    early = script.accelerator.mixed_precision
    policy = script.prepare().accelerator.policy
    sizes = policy.train_micro_batch_size_per_gpu, policy.gradient_accumulation_steps, policy.train_batch_size
    return early, policy.mode, policy.param_dtype, sizes, policy.gradient_clipping


def test_auto_values_are_filled_from_the_arguments(ranks2):
    """Auto values are filled from the arguments and batch sizes are left out."""
    for found in ranks2.run(_filled):
        assert found == ("bf16", "autocast", torch.bfloat16, (None, 3, None), 0.0)


@pytest.fixture
def _fresh(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    forget_accelerate()
    yield
    forget_accelerate()


@pytest.mark.usefixtures("_fresh")
def test_the_config_sets_accumulation_and_precision():
    """The config sets accumulation and mixed precision is autocast where it has no precision."""
    from zeroamp.integrations.accelerate import ZeroampAccelerator

    cfg = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4}
    accelerator = ZeroampAccelerator(zeroamp=cfg, mixed_precision="fp16", cpu=True)
    assert (accelerator.mixed_precision, accelerator.policy.mode) == ("fp16", "autocast")
    assert accelerator.gradient_accumulation_steps == 4


def _counted_without_cpu(**arguments):
    from zeroamp.integrations.accelerate import ZeroampAccelerator

    forget_accelerate()
    accelerator = ZeroampAccelerator(zeroamp=config(3), **arguments)
    accelerator.prepare(Classifier())
    return accelerator.num_processes


def _of_one_rank_each():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("own", "dp"))["dp"]
    return _counted_without_cpu(wrap_arguments={"mesh": mesh})


def test_ranks_that_accelerate_does_not_count(ranks2):
    with pytest.raises(AssertionError, match="accelerate deals samples to 1 of the 2 ranks .* pass cpu=True"):
        ranks2.run(_counted_without_cpu)
    assert ranks2.run(_of_one_rank_each) == [1, 1]


REFUSED = {
    "fsdp_plugin": {"fsdp_plugin": object()},
    "deepspeed_plugin": {"deepspeed_plugin": object()},
    "megatron_lm_plugin": {"megatron_lm_plugin": object()},
    "parallelism_config": {"parallelism_config": object()},
    "fp8": {"mixed_precision": "fp8"},
    "torch_autocast.dtype": {"mixed_precision": "fp16"},
    'precision "no"': {"mixed_precision": "no"},
    "fp16.initial_scale_power": {"kwargs_handlers": ["GradScalerKwargs"]},
    "accelerator.autocast": {"kwargs_handlers": ["AutocastKwargs"]},
    "block.compile()": {"dynamo_backend": "eager"},
    "gradient_accumulation_steps is 3, but": {"gradient_accumulation_steps": 2},
    "ACCELERATE_USE_FSDP": {"environment": "ACCELERATE_USE_FSDP"},
    "ACCELERATE_USE_DEEPSPEED": {"environment": "ACCELERATE_USE_DEEPSPEED"},
    "ACCELERATE_USE_MEGATRON_LM": {"environment": "ACCELERATE_USE_MEGATRON_LM"},
}
"""What the error names -> arguments; `environment`: a variable that `accelerate launch` sets."""


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_cannot_be_honoured_is_refused(monkeypatch, name):
    from accelerate import utils

    arguments = dict(REFUSED[name])
    if (variable := arguments.pop("environment", None)) is not None:
        monkeypatch.setenv(variable, "true")
    handlers = [getattr(utils, handler)() for handler in arguments.get("kwargs_handlers", ())]
    with pytest.raises(zeroamp.ConfigError) as error:
        accelerator_of(1, {"gradient_accumulation_steps": 3}, **arguments | {"kwargs_handlers": handlers})
    assert name in str(error.value)


def _small_losses_in_fp16():
    """The parameters that accelerate's loop and a TrainStep train, on this rank."""
    keys = {"fp16": {"enabled": True, "initial_scale_power": 8}, "zeroamp": {"reproducible": True}}
    cfg = config(3, dtype=None, accumulation=4, **keys)
    accelerator, training = accelerator_of(3, cfg | {"torch_autocast": {"enabled": False}}), SmallTraining(cfg, adamw)
    model = small.build(training.name)
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    for index in range(8):
        with accelerator.accumulate(model):
            loss = small.loss_of(model, small.batch(training.name, 2 * index + dist.get_rank()))
            accelerator.backward(loss.float() * 1e-4)  # float16 rounds gradients of a fourth otherwise
            optimizer.step()
            optimizer.zero_grad()
        report = training.step(index, 1e-4)
    assert accelerator.last_report.loss == report.loss
    return full_parameters(model), training.parameters()


def test_a_reproducible_accelerator_divides_gradients_once(ranks2):
    for ours, expected in ranks2.run(_small_losses_in_fp16):
        assert same_bits(ours, expected) == []


@pytest.mark.usefixtures("_fresh")
def test_the_config_comes_from_the_environment_where_a_script_passes_none(monkeypatch, tmp_path):
    from zeroamp.integrations.accelerate import ZeroampAccelerator

    with pytest.raises(zeroamp.ConfigError, match="ZEROAMP_CONFIG"):
        ZeroampAccelerator(cpu=True)
    (tmp_path / "config.json").write_text('{"fp16": {"enabled": true}}')
    monkeypatch.setenv("ZEROAMP_CONFIG", str(tmp_path / "config.json"))
    assert ZeroampAccelerator(cpu=True).mixed_precision == "fp16"


@pytest.mark.usefixtures("_fresh")
def test_blocks_of_the_config_that_the_script_does_not_use_are_refused():
    from accelerate.utils.deepspeed import DummyOptim

    from zeroamp.integrations.accelerate.arguments import refuse_other_optimizers, refuse_other_scheduler

    parameters = [nn.Parameter(torch.zeros(2))]
    policy = zeroamp.policy_from_config({
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    })  # fmt: skip
    own = zeroamp.optimizer_from_config(policy, parameters)
    refuse_other_optimizers(policy, [own])
    refuse_other_scheduler(policy, zeroamp.scheduler_from_config(policy, own))
    for other in (torch.optim.SGD(parameters, lr=0.1), torch.optim.AdamW(parameters, lr=0.2)):
        with pytest.raises(zeroamp.ConfigError, match=r"optimizer.type.*optimizer_from_config"):
            refuse_other_optimizers(policy, [other])
    with pytest.raises(zeroamp.ConfigError, match=r"scheduler.type.*scheduler_from_config"):
        refuse_other_scheduler(policy, torch.optim.lr_scheduler.ConstantLR(own))
    with pytest.raises(zeroamp.ConfigError, match="DummyOptim"):
        accelerator_of(3).prepare(DummyOptim(parameters))
