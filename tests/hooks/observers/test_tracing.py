"""The two modes on which all recorders are built."""

import pytest
import torch

from zeroamp.hooks.observers.tracing import DtypeReads, OpRecorder

X, W = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
READS = {
    "dtype": (lambda: W.dtype, [W]),
    "size of an element": (lambda: (W.itemsize, W.nbytes, W.element_size()), [W, W, W]),
    "type": (W.type, [W]),
    "promotion": (lambda: torch.result_type(X, W), [X, W]),
    "cast to that of another": (lambda: (X.to(W), X.type_as(W)), [W, W]),
    "cast to a dtype": (lambda: X.to(torch.bfloat16), []),
    "shape": (lambda: (W.shape, W.device), []),
}


@pytest.mark.parametrize("what", READS)
def test_reads_of_a_dtype(what):
    read, expected = READS[what]
    seen = []

    def answer(tensor, result):
        seen.append(tensor)
        return result

    with DtypeReads(answer):
        read()
    assert list(map(id, seen)) == list(map(id, expected))


def test_the_reader_gets_the_answer():
    with DtypeReads(lambda tensor, result: torch.float32 if tensor is W else result):
        assert (W.dtype, X.dtype) == (torch.float32, torch.float32)
    assert W.dtype == torch.bfloat16


def test_assignments_to_data_are_shown():
    """They are shown before the tensor has the new data."""
    seen = []
    tensor = torch.ones(2)
    with DtypeReads(
        lambda _tensor, result: result, lambda assigned: seen.append((assigned, assigned.untyped_storage()))
    ):
        before = tensor.untyped_storage()
        tensor.data = torch.zeros(3)
        tensor.grad = torch.zeros(3)
    ((assigned, storage),) = seen
    assert assigned is tensor
    assert storage.data_ptr() == before.data_ptr() != tensor.untyped_storage().data_ptr()


class _Names(OpRecorder):
    def __init__(self):
        super().__init__()
        self.seen = []

    def see(self, func, arguments, out):
        self.seen.append((str(func.overloadpacket), arguments, out))


def test_each_op_is_shown_after_it_has_run():
    with _Names() as names:
        total = torch.add(X, X, alpha=2)
    assert names.seen == [("aten.add", ((X, X), {"alpha": 2}), total)]
