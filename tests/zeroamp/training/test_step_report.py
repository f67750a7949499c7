"""What a StepReport prints."""

import pytest
import torch

import zeroamp


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "step 3: loss 2.5000, gradient norm 1.234"),
        ({"lr_values": (1e-3, torch.tensor(3e-4))}, "step 3: loss 2.5000, gradient norm 1.234, lr 0.001 / 0.0003"),
        (
            {"loss_scale": 65536.0, "skipped": True, "num_skipped": 2},
            "step 3: loss 2.5000, gradient norm 1.234, loss scale 65,536, skipped (2 so far)",
        ),
    ],
)
def test_it_prints_its_numbers_in_a_line(more, text):
    numbers = {"loss_tensor": torch.tensor(2.5, dtype=torch.float64), "grad_norm_tensor": torch.tensor(1.2344)}
    assert str(zeroamp.StepReport(**{"step": 3, "loss_scale": 1.0, "skipped": False, **numbers, **more})) == text
