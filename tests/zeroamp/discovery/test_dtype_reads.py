"""Which tensors' dtypes a piece of code asks for."""

import pytest
import torch

from zeroamp.discovery.use_recorder import DtypeReads


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda x, w: w.dtype, "w"),
        (lambda x, w: w.itemsize + x.nbytes, "wx"),
        (lambda x, w: w.element_size(), "w"),
        (lambda x, w: w.type(), "w"),
        (torch.result_type, "xw"),
        (lambda x, w: x.to(w), "w"),
        (lambda x, w: x.type_as(w), "w"),
        (lambda x, w: w.to(torch.float64), ""),
        (lambda x, w: torch.nn.functional.linear(x, w).shape, ""),
        (lambda x, w: w.detach().t(), ""),
    ],
)
def test_who_is_asked(ask, expected):
    x, w = torch.ones(2, 2), torch.ones(2, 2)
    noted = []
    with DtypeReads(noted.append):
        ask(x, w)
    assert "".join("w" if tensor is w else "x" if tensor is x else "?" for tensor in noted) == expected
