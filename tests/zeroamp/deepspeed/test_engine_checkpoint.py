from pathlib import Path

import pytest
import torch

import zeroamp.deepspeed as deepspeed
from tests.models.small import batch, build, loss_of
from tests.processes.training import check_same_run, full_parameters, same_bits
from tests.selection import slow_but
from tests.zeroamp.deepspeed.engine_cases import NAME, config, start, train
from zeroamp.policies.errors import CheckpointError, StepError


def _cfg(stage):
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}}
    return config(stage, accumulation=2, clip=0.5, scheduler=schedule)


def _resumed(folder, stage):
    first = start(_cfg(stage))
    train(None, 2, engine=first)
    state = {"epoch": 3, "rank": torch.distributed.get_rank(), "sums": torch.arange(3)}
    assert first.save_checkpoint(folder, client_state=state)
    assert first.save_checkpoint(folder, tag="step_7", save_latest=False)
    straight = train(None, 2, first=2, engine=first)

    engine = start(_cfg(stage))
    path, state = engine.load_checkpoint(folder)
    assert path == str(Path(folder) / "global_step2")
    assert (state["epoch"], state["rank"], state["sums"].tolist()) == (3, 0, [0, 1, 2])
    assert engine.global_steps == 2
    check_same_run(train(None, 2, first=2, engine=engine), straight)
    assert engine.get_lr() == first.get_lr()


@pytest.mark.parametrize("stage", slow_but((0, 3), 3))
def test_training_goes_on_bit_for_bit(ranks2, tmp_path, stage):
    ranks2.run(_resumed, str(tmp_path), stage)
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step2", "latest", "step_7"]


def _parts(folder):
    first = start(_cfg(2))
    train(None, 2, engine=first)
    first.save_checkpoint(folder, tag="a")
    first.save_checkpoint(folder, tag="a", client_state={"again": True})  # replaces it
    saved = full_parameters(first.module)

    engine = start(_cfg(2))
    assert engine.load_checkpoint(Path(folder) / "empty") == (None, None)
    _, state = engine.load_checkpoint(folder, tag="a", load_module_only=True)
    assert state == {"again": True}
    assert same_bits(full_parameters(engine.module), saved) == []
    assert (engine.global_steps, engine.get_lr()) == (0, [0.0])
    assert not engine.optimizer.state

    engine = start(_cfg(2))
    engine.load_checkpoint(folder, tag="a", load_optimizer_states=False)
    assert (engine.global_steps, engine.get_lr()) == (2, first.get_lr())
    assert not engine.optimizer.state

    engine = start(_cfg(2))
    engine.load_checkpoint(folder, tag="a", load_lr_scheduler_states=False)
    assert len(engine.optimizer.state) == len(list(engine.parameters()))
    assert engine.lr_scheduler.last_epoch == 0
    engine = start(config(2, accumulation=2))
    engine.backward(loss_of(engine, batch(NAME, 0)))
    engine.step()
    engine.train_step.zero_grad()
    engine.load_checkpoint(folder, tag="a", load_module_only=True)
    assert not engine.is_gradient_accumulation_boundary()

    only = deepspeed.initialize(model=build(NAME), config=config(3))[0]
    only.load_checkpoint(folder, tag="a", load_module_only=True)
    assert same_bits(full_parameters(only.module), saved) == []
    weights_alone = "(?=.*--safe_serialization)(?=.*zeroamp.load_hf)(?=.*Optimizer state)"
    for says, call in {
        "'b'.*its tags: a": lambda: engine.load_checkpoint(folder, tag="b"),
        "'x/y'": lambda: engine.save_checkpoint(folder, tag="x/y"),
        "must hold tensors": lambda: engine.save_checkpoint(folder, tag="c", client_state={"args": object()}),
        "load_module_strict": lambda: engine.load_checkpoint(folder, tag="a", load_module_strict=False),
        weights_alone: lambda: engine.load_checkpoint(Path(folder) / "of DeepSpeed"),
        r"engine.save_checkpoint\(save_dir=\) must be the path .* is None": lambda: engine.save_checkpoint(None),
        r"engine.save_checkpoint\(save_dir=\) must be the path .* is ''": lambda: engine.save_checkpoint(""),
        r"engine.load_checkpoint\(load_dir=\) must be the path .* is None": lambda: engine.load_checkpoint(None),
        r"engine.load_checkpoint\(load_dir=\) must be the path .* is ''": lambda: engine.load_checkpoint(""),
        r"engine.save_16bit_model\(save_dir=\) must be the path": lambda: engine.save_16bit_model(""),
    }.items():
        with pytest.raises((CheckpointError, deepspeed.UnsupportedError), match=f"(?s){says}"):
            call()
    assert same_bits(full_parameters(engine.module), saved) == []


def test_parts_of_a_checkpoint_are_loaded(ranks2, tmp_path):
    """Parts of a checkpoint are loaded and mistakes and folders of DeepSpeed are named."""
    (tmp_path / "of DeepSpeed" / "global_step3").mkdir(parents=True)
    (tmp_path / "of DeepSpeed" / "latest").write_text("global_step3")
    (tmp_path / "of DeepSpeed" / "global_step3" / "mp_rank_00_model_states.pt").write_bytes(b"")
    ranks2.run(_parts, str(tmp_path))
    assert len(list((tmp_path / "a" / "zeroamp").glob("step_*"))) == 1


def _module_state(stage):
    engine = start(config(stage))
    whole = full_parameters(engine.module)
    with deepspeed.zero.GatheredParameters(engine.parameters()):
        gathered = engine.module.state_dict()
        assert same_bits({name: gathered[name] for name in whole}, whole) == []
    if stage == 0:
        found = engine.module.state_dict()
        assert {type(tensor) for tensor in found.values()} == {torch.Tensor}
        assert same_bits({name: found[name] for name in whole}, whole) == []
    else:
        with pytest.raises(StepError, match=r"engine\.module_state_dict\(\)"):
            engine.module.state_dict()
    kept = engine.module.state_dict(keep_vars=True)
    assert all(kept[name] is parameter for name, parameter in engine.module.named_parameters())
    around = torch.nn.ModuleList([engine.module]).state_dict()
    assert all(
        type(around[f"0.{name}"]) is type(parameter.data) for name, parameter in engine.module.named_parameters()
    )


@pytest.mark.parametrize("stage", [0, 2])
def test_the_modules_own_state_dict_never_holds_shards(ranks2, stage):
    ranks2.run(_module_state, stage)


def _weights(folder):
    engine = start(config(3))
    train(None, 1, engine=engine)
    assert engine.save_16bit_model(folder)
    assert engine.save_16bit_model(folder, "model.safetensors")
    return full_parameters(engine.module), engine.module_state_dict(), engine._zero3_consolidated_16bit_state_dict()


def test_whole_weights_are_written_in_the_low_precision(ranks2, tmp_path):
    from safetensors.torch import load_file

    (full, whole, again), (_, second, _) = ranks2.run(_weights, str(tmp_path))
    assert second == {}
    written = torch.load(tmp_path / "pytorch_model.bin")
    assert sorted(written) == sorted(build(NAME).state_dict())
    assert written["head.weight"].data_ptr() == written["embed.weight"].data_ptr()
    for name, tensor in full.items():
        assert torch.equal(written[name], tensor.bfloat16())
    assert same_bits(whole, written) == same_bits(again, written) == []
    build(NAME).load_state_dict(written)
    del written["head.weight"]  # tied
    assert same_bits(load_file(tmp_path / "model.safetensors"), written) == []
