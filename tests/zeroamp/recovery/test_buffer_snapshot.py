import torch
from torch import nn

from zeroamp.recovery.buffer_snapshot import BufferSnapshot


def _module():
    module = nn.BatchNorm1d(3)
    module.register_buffer("empty", None)
    return nn.Sequential(nn.Linear(3, 3), module)


def test_what_a_step_did_to_buffers_is_undone():
    model = _module()
    snapshot = BufferSnapshot(model)
    expected = [{name: buffer.clone() for name, buffer in model.named_buffers()}]
    model(torch.randn(4, 3))
    for _ in range(2):
        snapshot.take()
        expected.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        buffers = dict(model.named_buffers())
        model(torch.full((4, 3), torch.nan))  # BatchNorm changes values without a new version of the tensor
        model[1].running_var = torch.zeros(3)  # replaced
        model[1].empty = torch.ones(1)
        model[1].register_buffer("new", torch.ones(1))
        snapshot.restore()
        found = dict(model.named_buffers())
        assert found.keys() == expected[-1].keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
        assert all(found[name] is buffers[name] for name in found), "the same tensors, which others may hold"
        assert all(torch.equal(found[name], expected[-1][name]) for name in found)
        assert model[1].empty is None
        model(torch.randn(4, 3))
    assert not torch.equal(expected[0]["1.running_mean"], expected[1]["1.running_mean"])


def test_a_model_without_buffers_has_nothing_to_copy():
    model = nn.Linear(2, 2)
    snapshot = BufferSnapshot(model)
    snapshot.take()
    snapshot.restore()
    assert list(model.buffers()) == []
