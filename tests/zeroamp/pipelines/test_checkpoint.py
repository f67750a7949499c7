"""`save_checkpoint` of a `PipelineStep` writes one checkpoint, which other stages, schedules and whole models load."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleGPipe, ScheduleInterleaved1F1B

import zeroamp
from tests.models import pipelines as models
from tests.processes.parallel_training import data_rank, mesh_of

MICRO_BATCHES = 4
"""Of all data ranks in a step. On another number of them the same gradients are added in another order: 1e-6."""
CONFIG = {
    "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    "zero_optimization": {"stage": 3},
    "gradient_clipping": 1.0,
}


class _Kept(torch.nn.Module):
    """Has a value as its extra state."""

    value = 0

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, state):
        self.value = state


def _part(index, number):
    """A part, or the whole model, with a buffer, an extra state and a frozen parameter in each block."""
    part = models.part(index, number)
    for name, block in part.blocks.items():
        block.register_buffer("seen", torch.full((), float(name)))
        block.kept = _Kept()
        block.up.bias.requires_grad_(False)
    return part


def _optimizer(named):
    groups = [[value for name, value in named if ("bias" in name) == is_bias] for is_bias in (True, False)]
    return torch.optim.AdamW([{"params": groups[0], "weight_decay": 0.0}, {"params": groups[1]}], lr=1e-2)


def _train(axes, first, count, folder, *, loads=False, saves=(), interleaves=False, stage=3):
    """Return the loss and norm of each step, and by block the buffer and the extra state.

    saves: folders of checkpoints after the second step, with the frozen parameters and without.
    """
    mesh = mesh_of(**axes)
    data, stages, num_stages = mesh["dp"], mesh["pp"], axes["pp"]
    cfg = CONFIG | {"zero_optimization": {"stage": stage}}
    policy = zeroamp.policy_from_config(cfg, world_size=data.size())
    number = num_stages * (2 if interleaves else 1)
    own = range(stages.get_local_rank(), number, num_stages)
    parts = [zeroamp.wrap_model(_part(i, number), policy, data, auto_wrap_policy={"Block"}) for i in own]
    named = [each for part in parts for each in part.named_parameters()]
    optimizer = _optimizer(named)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    train = zeroamp.PipelineStep(parts, optimizer, scheduler)
    if loads:
        extra = zeroamp.load_checkpoint(folder, train.model, train)
        assert extra == {"sample": 2}
        assert train.num_steps == 2
    else:
        for name, block in (each for part in parts for each in part.blocks.items()):
            block.seen.add_(100 * (1 + data.get_local_rank()))
            block.kept.value = 7 + int(name)
    indexed = zip(own, parts, strict=True)
    found = [PipelineStage(p, i, number, torch.device("cpu"), group=stages.get_group()) for i, p in indexed]
    num_micro = MICRO_BATCHES // data.size()
    cls, of_rank = (ScheduleInterleaved1F1B, found) if interleaves else (ScheduleGPipe, found[0])
    schedule = cls(of_rank, num_micro, loss_fn=train.wrap_loss(models.loss_of))
    seen = []
    for step in range(first, first + count):
        inputs, target = (each.chunk(data.size())[data_rank(mesh)] for each in models.samples(step, 0, 16))
        schedule.step(*([inputs] if 0 in own else []), **({"target": target} if number - 1 in own else {}))
        report = train.step()
        seen.append((report.loss, report.grad_norm))
        for path in saves if step == 1 else ():
            excludes = path == saves[1]
            zeroamp.save_checkpoint(path, train.model, train, extra={"sample": 2}, exclude_frozen_parameters=excludes)
    blocks = [each for part in parts for each in part.blocks.items()]
    return seen, {int(name): (block.seen.item(), block.kept.value) for name, block in blocks}


@pytest.fixture(scope="module")
def unbroken(ranks4, tmp_path_factory):
    """What each step saw, and checkpoints after the second, with the frozen parameters and without."""
    folders = [str(tmp_path_factory.mktemp(name)) for name in ("whole", "trained")]
    return ranks4.run(_train, {"pp": 2, "dp": 2}, 0, 4, None, saves=folders)[0][0], *folders


@pytest.mark.parametrize(
    ("axes", "interleaves", "stage", "error"),
    [
        ({"pp": 2, "dp": 2}, False, 3, 0),
        ({"pp": 2, "dp": 2}, True, 2, 1e-6),
        ({"pp": 1, "dp": 4}, False, 3, 1e-6),
    ],
)
def test_it_resumes_on_other_axes(ranks4, unbroken, axes, interleaves, stage, error):
    (*_, third, fourth), folder, _ = unbroken
    found = ranks4.run(_train, axes, 2, 2, folder, loads=True, interleaves=interleaves, stage=stage)
    for rank, (seen, blocks) in enumerate(found):
        assert seen == [pytest.approx(each, rel=error, abs=0) for each in (third, fourth)]
        data_rank_of_save = rank % 2 if error == 0 else 0  # with other parts, buffers are those of the first ranks
        for block, state in blocks.items():
            assert state == (block + 100 * (1 + data_rank_of_save), 7 + block)


def _train_whole(first, count, folder, *, loads=False, saves=False):
    """As `_train`, with the whole model on each of the ranks."""
    model = zeroamp.wrap_model(_part(0, 1), CONFIG, auto_wrap_policy={"Block"})
    optimizer = _optimizer(list(model.named_parameters()))
    train = zeroamp.TrainStep(model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10))
    if loads:
        zeroamp.load_checkpoint(folder, model, train)
    seen = []
    for step in range(first, first + count):
        inputs, target = (each.chunk(4)[torch.distributed.get_rank()] for each in models.samples(step, 0, 16))
        train.backward(models.loss_of(model(inputs), target))
        report = train.step()
        seen.append((report.loss, report.grad_norm))
    if saves:
        zeroamp.save_checkpoint(folder, model, train, extra={"sample": 2})
    return seen


def test_a_whole_model_loads_a_checkpoint_of_parts(ranks4, unbroken):
    (*_, third, fourth), folder, _ = unbroken
    for seen in ranks4.run(_train_whole, 2, 2, folder, loads=True):
        assert seen == [pytest.approx(each, rel=1e-6) for each in (third, fourth)]


def test_parts_load_a_checkpoint_of_a_whole_model(ranks4, unbroken, tmp_path):
    *_, third, fourth = unbroken[0]
    ranks4.run(_train_whole, 0, 2, str(tmp_path), saves=True)
    for seen, _ in ranks4.run(_train, {"pp": 2, "dp": 2}, 2, 2, str(tmp_path), loads=True):
        assert seen == [pytest.approx(each, rel=1e-6) for each in (third, fourth)]


def test_frozen_parameters_of_all_stages_may_be_left_out(ranks4, unbroken):
    (*_, third, fourth), _, folder = unbroken
    (checkpoint,) = (path for path in Path(folder).iterdir() if path.is_dir())
    assert "up.bias" not in (checkpoint / "zeroamp.json").read_text()
    for seen, _ in ranks4.run(_train, {"pp": 4, "dp": 1}, 2, 2, folder, loads=True, stage=0):
        assert seen == [pytest.approx(each, rel=1e-6) for each in (third, fourth)]


def _mistake(name, folder):
    """The text of the error of a mistake on this rank."""
    mesh = mesh_of(pp=2, dp=1)
    index = mesh["pp"].get_local_rank()
    policy = zeroamp.policy_from_config(CONFIG, world_size=1)
    part = zeroamp.wrap_model(_part(index, 3 if name == "a part is missing" else 2), policy, mesh["dp"])
    lr = 1e-2 * (1 + index * (name == "other hyperparameters"))
    optimizer = torch.optim.SGD(part.parameters(), lr=lr)
    optimizers = [optimizer]
    if name == "other optimizers" and index == 1:
        first, *others = part.parameters()
        optimizers = [torch.optim.SGD(each, lr=lr) for each in ([first], others)]
    train = zeroamp.PipelineStep([part], optimizers)
    call = zeroamp.load_checkpoint if name == "a part is missing" else zeroamp.save_checkpoint
    with pytest.raises(zeroamp.CheckpointError) as caught:
        call(folder, train.model, train)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("other hyperparameters", "lr of param group 0 is 0.01 and 0.02"),
        ("other optimizers", "The first stage has 1 optimizers, but another one has 2"),
        ("a part is missing", r"must have the parameters and buffers of the model, but .*checkpoint: .*, model: none"),
    ],
)
def test_what_cannot_be_joined_raises_on_all_ranks(ranks2, unbroken, tmp_path, name, text):
    for found in ranks2.run(_mistake, name, unbroken[1] if name == "a part is missing" else str(tmp_path)):
        assert re.search(text, found)
    assert not list(tmp_path.iterdir())


def _load_files(folder):
    """The largest difference of a part's weights, loaded from files of the whole model."""
    torch.manual_seed(1)
    whole = models.Decoder()
    if torch.distributed.get_rank() == 0:
        save_file(whole.state_dict(), f"{folder}/model.safetensors")
    mesh = mesh_of(pp=2, dp=1)
    part = zeroamp.wrap_model(models.part(mesh["pp"].get_local_rank(), 2), {}, mesh["dp"])
    zeroamp.load_hf(part, folder)
    values = dict(whole.named_parameters())
    return max((p.full_tensor() - values[name]).abs().max().item() for name, p in part.named_parameters())


def test_a_part_loads_files_of_the_whole_model(ranks2, tmp_path):
    assert ranks2.run(_load_files, str(tmp_path)) == [0.0, 0.0]
