"""`iter_weights` between two items: what changes or frees the weights is an error, until the iterator is closed."""

import gc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_model
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import _global_optimizer_pre_hooks

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.processes.training import config, full_parameters, policy, same_bits, wrapped
from zeroamp.integrations.peft import iter_merged_weights

NAMED = r"The model \(a .*\) is being read by iter_weights\. Iterate to its end, or call close\(\)"
ERRORS = (zeroamp.StepError, zeroamp.WrapError)


def _trained(stage):
    """A wrapped model whose gradients are complete, its plain optimizer, and its initial weights."""
    model = wrapped("llama_untied", config(stage))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, full_parameters(model)


def _calls(model, optimizer, folder):
    """What would change weights, or free them."""
    parameter = next(model.parameters())
    return [
        lambda: zeroamp.sleep(model, optimizer),
        lambda: zeroamp.sleep(model, what=["grads"]),
        optimizer.step,
        lambda: zeroamp.load_hf(model, folder),
        lambda: zeroamp.load_checkpoint(folder, model),
        lambda: model.load_state_dict(model.state_dict()),
        lambda: zeroamp.set_full_parameter(parameter, torch.zeros(parameter.shape)),
        lambda: next(zeroamp.iter_weights(model)),
        lambda: zeroamp.TrainStep(model, optimizer),
    ]


def _refused(stage, folder):
    model, optimizer, before = _trained(stage)
    made_before = zeroamp.iter_weights(model, None)
    loss_of(model, batch("llama_untied", 0)).backward()
    iterator = zeroamp.iter_weights(model, None, bucket_bytes=4000)
    found = [next(iterator)]
    for call in (*_calls(model, optimizer, folder), lambda: next(made_before)):
        with pytest.raises(ERRORS, match=NAMED):
            call()
        found.append(next(iterator))
    with torch.no_grad():
        model(batch("llama_untied", 1))  # reads weights, as the iterator does
    found += iterator
    assert same_bits(dict(found), before) == []
    optimizer.step()
    return full_parameters(model)


def _undisturbed(stage):
    model, optimizer, _ = _trained(stage)
    loss_of(model, batch("llama_untied", 0)).backward()
    optimizer.step()
    return full_parameters(model)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_changes_weights_between_two_items_is_refused(ranks2, tmp_path, stage):
    save_model(build("llama_untied", seed=3), tmp_path / "model.safetensors")
    found = ranks2.run(_refused, stage, tmp_path)
    assert same_bits(found[0], ranks2.run(_undisturbed, stage)[0]) == []


def _closed(folder):
    model, optimizer, _ = _trained(3)
    num_hooks = len(_global_optimizer_pre_hooks)
    iterator = zeroamp.iter_weights(model, bucket_bytes=4000)
    for end in ("exhausted", "closed", "collected", "left by an error"):
        iterator = zeroamp.iter_weights(model, bucket_bytes=4000)
        next(iterator)
        with pytest.raises(ERRORS, match=NAMED):
            zeroamp.load_hf(model, folder)
        if end == "exhausted":
            list(iterator)
        elif end == "closed":
            iterator.close()
        elif end == "collected":
            del iterator
            gc.collect()
        else:
            with pytest.raises(KeyError):
                iterator.throw(KeyError())
        zeroamp.load_hf(model, folder)
        loss_of(model, batch("llama_untied", 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        zeroamp.sleep(model, optimizer)
        zeroamp.wake(model)
    assert len(_global_optimizer_pre_hooks) == num_hooks
    never_started = zeroamp.iter_weights(model)
    zeroamp.load_hf(model, folder)
    assert same_bits(dict(never_started), {k: v.bfloat16() for k, v in full_parameters(model).items()}) == []


def test_closing_an_iterator_in_any_way_ends_the_refusals(ranks2, tmp_path):
    save_model(build("llama_untied", seed=3), tmp_path / "model.safetensors")
    ranks2.run(_closed, tmp_path)


def _train_step(stage):
    model = wrapped("llama_untied", config(stage))
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    before = full_parameters(model)
    iterator = zeroamp.iter_weights(model, None, bucket_bytes=4000)
    found = [next(iterator)]
    train.backward(loss_of(model, batch("llama_untied", 0)))
    with pytest.raises(ERRORS, match=NAMED):
        train.step()
    found += iterator
    assert same_bits(dict(found), before) == []
    assert train.step().step == 1
    return full_parameters(model)


def _undisturbed_train_step(stage):
    model = wrapped("llama_untied", config(stage))
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    train.backward(loss_of(model, batch("llama_untied", 0)))
    train.step()
    return full_parameters(model)


def test_a_step_of_train_step_between_two_items_is_refused(ranks2):
    found = ranks2.run(_train_step, 3)
    assert same_bits(found[0], ranks2.run(_undisturbed_train_step, 3)[0]) == []


def _checked_after_a_refusal():
    """The first step of an optimizer is refused. What it holds of the model is found at a later step."""
    model, optimizer, _ = _trained(3)
    iterator = zeroamp.iter_weights(model, bucket_bytes=4000)
    next(iterator)
    with pytest.raises(ERRORS, match=NAMED):
        optimizer.step()
    iterator.close()
    model.set_requires_gradient_sync(False)
    loss_of(model, batch("llama_untied", 0)).backward()
    with pytest.raises(zeroamp.StepError, match="did not reduce the gradients"):
        optimizer.step()


def test_an_optimizer_is_checked_after_a_refused_first_step(ranks2):
    ranks2.run(_checked_after_a_refusal)


def _other_model():
    """Another model's optimizer, whose first step is while the iterator is open."""
    model, other = wrapped("llama_untied", config(3)), wrapped("llama_tied", config(3))
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
    loss_of(other, batch("llama_tied", 0)).backward()
    iterator = zeroamp.iter_weights(model)
    next(iterator)
    optimizer.step()
    list(iterator)


def test_other_models_step_between_two_items(ranks2):
    ranks2.run(_other_model)


def _merged():
    peft = pytest.importorskip("peft", reason="the model has adapters")
    model = build("llama_untied")
    targets = [name for name, module in model.named_modules() if name.endswith("down")]
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets))
    model = zeroamp.wrap_model(model, policy(config(3)), auto_wrap_policy={"Block"})
    iterator = iter_merged_weights(model, bucket_bytes=4000)
    next(iterator)
    with pytest.raises(ERRORS, match=r"is being read by iter_merged_weights"):
        zeroamp.sleep(model)
    list(iterator)
    zeroamp.sleep(model)


def test_merged_weights_are_guarded_too(ranks2):
    ranks2.run(_merged)


def _asleep_in_part():
    """The optimizer is asleep already, and wakes between two items."""
    model, optimizer, _ = _trained(3)
    loss_of(model, batch("llama_untied", 0)).backward()
    optimizer.step()
    zeroamp.sleep(model, optimizer, what=["optimizer"])
    iterator = zeroamp.iter_weights(model, bucket_bytes=4000)
    next(iterator)
    with pytest.raises(ERRORS, match="iter_weights|went to sleep"):
        _sleep_and_go_on(model, iterator)


def _sleep_and_go_on(model, iterator):
    zeroamp.sleep(model, what=["params"])
    list(iterator)


def test_freed_weights_are_an_error_not_a_crash(ranks2):
    ranks2.run(_asleep_in_part)


def _lost():
    group = dist.new_group(timeout=timedelta(seconds=1))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    model = zeroamp.wrap_model(build("llama_untied"), policy(config(3)), mesh, auto_wrap_policy={"Block"})
    parameter = next(model.parameters())
    loss_of(model, batch("llama_untied", 0)).backward()
    if dist.get_rank() == 1:  # skips the calls of the other rank
        return
    for name, call in {
        "iter_weights": lambda: list(zeroamp.iter_weights(model)),
        "full_parameter": lambda: zeroamp.full_parameter(parameter),
        "full_gradient": lambda: zeroamp.full_gradient(parameter),
        "set_full_parameter": lambda: zeroamp.set_full_parameter(parameter, torch.zeros(parameter.shape)),
    }.items():
        with pytest.raises(zeroamp.PeerError, match=rf"^{name} failed on rank 0: .*which all ranks must call"):
            call()


def test_calls_that_another_rank_skips_name_themselves(ranks2):
    ranks2.run(_lost)
