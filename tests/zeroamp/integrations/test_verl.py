"""verl's engine interface on zeroamp: bits of plain torch in one process, state off and on, checkpoints, weights."""

import importlib.util

import pytest

import zeroamp
from tests.models.adapters import Adapted, merged, quietly
from tests.processes.verl_training import STEPS, differing, engine_of, in_one_process, started, train, weights
from zeroamp.planning.mesh import local_part

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed: it pins other libraries, so it is no extra", allow_module_level=True)
OFFLOADED, LORA = {"param_offload": True, "optimizer_offload": True}, {"lora_rank": 4, "lora": {"merge": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("verl") / "model")
    quietly(Adapted().base_model().save_pretrained)(path)
    return path


@quietly
def _trained(folder, own):
    engine = started(folder, own)
    return train(engine, range(STEPS)), weights(engine)


@pytest.mark.parametrize("own", [{}, OFFLOADED], ids=["on the device", "offloaded"])
def test_steps_have_the_bits_of_one_process(ranks2, folder, own):
    expected, parameters = quietly(in_one_process)(folder)
    for rank, (seen, found) in enumerate(ranks2.run(_trained, folder, own)):
        assert seen == [(losses[rank], norm, lr) for losses, norm, lr in expected]
        assert differing(found, parameters) == []


@quietly
def _moved(folder, path):
    """Return what differs after state was off, and what differs in two runs that go on: as it was, and loaded."""
    engine, resumed = started(folder), started(folder, OFFLOADED)
    train(engine, range(2))
    before = weights(engine)
    engine.to("cpu")
    tensors = [each for own in engine.optimizer.state.items() for each in (own[0], own[1]["exp_avg"])]
    assert all(local_part(each).untyped_storage().nbytes() == 0 for each in tensors)
    engine.to("device")
    differ = differing(weights(engine), before)
    engine.save_checkpoint(path, global_step=2)
    resumed.load_checkpoint(path)
    runs = [(train(each, range(2, STEPS)), weights(each)) for each in (engine, resumed)]
    return differ, runs


def test_state_that_was_off_or_in_a_checkpoint_has_the_same_bits(ranks2, folder, tmp_path):
    expected, parameters = quietly(in_one_process)(folder)
    for rank, (differ, runs) in enumerate(ranks2.run(_moved, folder, str(tmp_path))):
        assert differ == []
        for seen, found in runs:
            assert seen == [(losses[rank], norm, lr) for losses, norm, lr in expected[2:]]
            assert differing(found, parameters) == []


@quietly
def _streamed(folder, model):
    engine = started(folder, OFFLOADED, model=model)
    train(engine, range(2))
    iterator, adapter = engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
    found = dict(iterator)
    engine.to("cpu", optimizer=False, grad=False)  # as verl does when it has sent them
    return adapter, differing(found, merged(weights(engine), scaling=4))  # lora_alpha / lora_rank


@pytest.mark.parametrize("model", [{}, LORA], ids=["full", "LoRA"])
def test_weights_per_tensor_are_the_parameters_in_bf16(ranks2, folder, model):
    assert ranks2.run(_streamed, folder, model) == [(None, [])] * 2


REFUSED = {
    "engine.seed": {"own": {"seed": 7}},
    "engine.ulysses_sequence_parallel_size": {"own": {"ulysses_sequence_parallel_size": 2}},
    "engine.dtype": {"own": {"dtype": "float16"}},
    "engine.zeroamp.gradient_clipping": {"config": {"gradient_clipping": 1.0}},
    "engine.zeroamp.bf16": {"config": {"torch_autocast": {"enabled": False}, "bf16": {"enabled": True}}},
    "model.use_liger": {"model": {"use_liger": True}},
    "model.lora.merge": {"model": {"lora_rank": 4}},
    "checkpoint.save_contents": {"checkpoint": {"save_contents": ["model"]}},
    "optim.clip_grad": {"optim": {"clip_grad": 0.0}},
}


@quietly
def _refused(folder):
    texts = {}
    for key, arguments in REFUSED.items():
        with pytest.raises(zeroamp.ConfigError) as error:
            engine_of(folder, **arguments)
        texts[key] = str(error.value)
    return [key for key, text in texts.items() if f"{key}: " not in text]


def test_a_key_without_an_effect_is_an_error_that_names_it(ranks2, folder):
    assert ranks2.run(_refused, folder) == [[], []]
