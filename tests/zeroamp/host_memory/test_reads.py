"""What a caller reads and writes while state is in host memory: the bits, and never freed memory."""

import copy
import io
import logging

import torch
from torch.distributed.tensor import DTensor

import zeroamp
from tests.processes.training import SmallTraining, adamw, config

NAME = "llama_untied"
PLAIN = {}
KEY = {"zeroamp": {"offload_between_steps": ["optimizer"]}}
DEEPSPEED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def _saved(tensor):
    file = io.BytesIO()
    torch.save(tensor.to_local(), file)
    file.seek(0)
    return torch.load(file)


READS = {
    "full_tensor": lambda each: each.full_tensor(),
    "to_local": lambda each: each.to_local().clone(),
    "norm": lambda each: each.norm().full_tensor(),
    "sum": lambda each: each.sum().full_tensor(),
    "print": repr,
    "numpy": lambda each: each.detach().to_local().numpy().tolist(),
    "item": lambda each: each.to_local().sum().item(),
    "tolist": lambda each: each.to_local().tolist(),
    "data": lambda each: each.data.to_local().clone(),
    "deepcopy": lambda each: copy.deepcopy(each.detach()).to_local(),
    "save": _saved,
    "add": lambda each: (each + 1).full_tensor(),
}


def _trained(more):
    """Train; without an offloading config, leave gradients of another micro-batch, as a plain loop may."""
    training = SmallTraining(config(2, **more), adamw, name=NAME)
    for index in range(2):
        training.step(index)
    if more == PLAIN:
        for parameter in training.model.parameters():
            parameter.grad = parameter.detach() * 0.5
    return training


def _found(training):
    """What each read gives of every third parameter, its gradient and state, and of all together."""
    model, state = training.model, training.optimizer.state
    tensors = {}
    for fqn, parameter in list(model.named_parameters())[::3]:
        tensors[fqn], tensors[f"{fqn}.grad"] = parameter, parameter.grad
        tensors |= {f"{fqn}.{key}": value for key, value in state.get(parameter, {}).items()}
    found = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            found |= {f"{name} {read}": function(tensor) for read, function in READS.items()}
        elif tensor is not None:
            found |= {f"{name} item": tensor.item(), f"{name} print": repr(tensor)}
    block = next(module for module in model.modules() if type(module).__name__ == "Linear")
    found["model"] = repr(model)
    found |= {f"state_dict {key}": each.full_tensor() for key, each in block.state_dict().items()}
    found |= {f"buffer {name}": each.sum().item() for name, each in model.named_buffers()}
    found["copy of the state"] = repr(copy.deepcopy(list(state.values())))
    if any(each.grad is not None for each in model.parameters()):
        found["clip"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()
    return found


def _differing(ours, theirs):
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not _is_same(ours[name], theirs[name])]


def _is_same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def _asleep():
    training = _trained(PLAIN)
    expected = _found(training)
    zeroamp.sleep(training.model, training.optimizer)
    asleep = _differing(_found(training), expected)
    zeroamp.wake(training.model)
    return len(expected), asleep, _differing(_found(training), expected)


def test_every_read_of_a_sleeping_model_is_right(ranks2):
    for num_reads, asleep, awake in ranks2.run(_asleep):
        assert (asleep, awake) == ([], [])
        assert num_reads > 100


def _between_steps():
    expected = _found(_trained({"zero_optimization": {"stage": 2}}))
    return len(expected), [_differing(_found(_trained(more)), expected) for more in (KEY, DEEPSPEED)]


def test_every_read_of_offloaded_state_is_right(ranks2):
    for num_reads, differing in ranks2.run(_between_steps):
        assert differing == [[], []]
        assert num_reads > 100


def _views():
    """Views from before: are they right while asleep, and in the memory of the parameters after a step?"""
    training, messages = _trained(PLAIN), []
    model = training.model
    views = [parameter.detach().to_local() for parameter in model.parameters()]
    before = [view.clone() for view in views]
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("zeroamp").addHandler(handler)
    zeroamp.sleep(model, training.optimizer)
    logging.getLogger("zeroamp").removeHandler(handler)
    asleep = all(map(torch.equal, views, before))
    zeroamp.wake(model)
    training.optimizer.step()
    locals_ = [parameter.detach().to_local() for parameter in model.parameters()]
    has_changed = not any(map(torch.equal, views, before))
    return asleep, has_changed, all(map(torch.equal, views, locals_)), messages


def test_views_from_before_stay_valid_and_are_named(ranks2):
    (*first, messages), (*second, _) = ranks2.run(_views)
    assert (first, second) == ([True] * 3, [True] * 3)
    assert len(messages) == 1, "the first rank logs"
    assert "device memory of params is not freed, because views of it exist" in messages[0]


def _written():
    """Write while asleep; return the gradients and a parameter after."""
    training = _trained(PLAIN)
    model, weight = training.model, next(training.model.parameters())
    zeroamp.sleep(model, training.optimizer)
    training.optimizer.zero_grad(set_to_none=False)
    with torch.no_grad():
        weight.fill_(3.0)
    zeroamp.wake(model)
    grads = [parameter.grad.full_tensor() for parameter in model.parameters() if parameter.grad is not None]
    return [float(each.abs().max()) for each in grads], weight.full_tensor().unique().tolist()


def test_writes_to_a_sleeping_model_are_there_after(ranks2):
    for grads, weight in ranks2.run(_written):
        assert len(grads) > 5
        assert (set(grads), weight) == ({0.0}, [3.0])
