"""What is counted as tokens of a forward."""

from dataclasses import dataclass

import pytest
import torch

from zeroamp.reporting.step_recorder import count_tokens


def ids(*shape, dtype=torch.int64):
    return torch.zeros(shape, dtype=dtype)


@dataclass
class Batch:
    labels: torch.Tensor
    input_ids: torch.Tensor


@pytest.mark.parametrize(
    ("args", "kwargs", "num_tokens"),
    [
        ((), {"input_ids": ids(64), "position_ids": ids(3, 64)}, 64),
        (({"labels": ids(2, 3), "input_ids": ids(2, 5)},), {}, 10),
        ((Batch(ids(2, 3), ids(2, 5)),), {}, 10),
        ((ids(2, 3),), {"batch": [{"input_ids": ids(2, 5)}]}, 10),
        ((), {"position_ids": ids(3, 5), "input_ids": [ids(5), ids(7, dtype=torch.int32)]}, 12),
        ((), {"labels": ids(2, 3), "input_ids": None}, 6),
        (({"chosen": {"input_ids": ids(2, 5)}, "rejected": {"input_ids": ids(2, 7)}},), {}, 24),
        ((), {"input_ids": torch.zeros(2, 5), "labels": ids(2, 3)}, 6),
        ((ids(4), torch.zeros(4, 4), ids(2, 3, dtype=torch.int32), ids(9, 9)), {}, 6),
        ((ids(4), torch.zeros(4, 4)), {"mask": ids(4, 4, dtype=torch.bool)}, None),
    ],
)
def test_tokens_are_the_elements_of_input_ids_else_of_the_first_integers_of_two_dims(args, kwargs, num_tokens):
    assert count_tokens(args, kwargs) == num_tokens
