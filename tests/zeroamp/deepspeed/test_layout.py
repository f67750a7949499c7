"""Flat vectors written out as DeepSpeed writes them, and parameters found again, for many sizes."""

import math
import random

import pytest
import torch

from zeroamp import CheckpointError
from zeroamp.deepspeed.layout import place_frozen, place_parts, place_stretches, whole


def _parameters(seed):
    rng = random.Random(seed)
    groups = []
    for group in range(rng.randint(1, 3)):
        shapes = [tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 3))) for _ in range(rng.randint(1, 5))]
        groups.append({f"p{group}.{index}": torch.randn(shape) for index, shape in enumerate(shapes)})
    return groups


def _shapes(groups):
    return [{name: tuple(tensor.shape) for name, tensor in group.items()} for group in groups]


def _is_found(groups, placed, flats, num_readers):
    """Whether the parts of every parameter that `num_readers` ranks would copy make it whole again."""
    for name, tensor in ((name, tensor) for group in groups for name, tensor in group.items()):
        stored = placed[name].take([flat[placed[name].group] for flat in flats])
        found = torch.full((tensor.numel(),), math.nan)
        chunk = math.ceil(tensor.numel() / num_readers)
        for begin in range(0, tensor.numel(), chunk):
            stored.copy_to(found[begin : begin + chunk], begin)
        if not torch.equal(found.view(tensor.shape), tensor) or not _runs_are_found(stored, tensor, num_readers):
            return False
    return True


def _runs_are_found(stored, tensor, num_readers):
    """Whether ranks that each copy a part of some dimension, one run per index of those before it, copy its values."""
    for dim, length in enumerate(tensor.shape):
        runs, stride, inner = (
            math.prod(sizes) for sizes in (tensor.shape[:dim], tensor.shape[dim:], tensor.shape[dim + 1 :])
        )
        part = math.ceil(length / num_readers)
        for start in range(0, length, part):
            expected = tensor.narrow(dim, start, min(part, length - start))
            found = torch.full((runs, expected.shape[dim] * inner), math.nan)
            stored.copy_runs(found, start * inner, stride)
            if not torch.equal(found.view(expected.shape), expected):
                return False
    return True


@pytest.mark.parametrize("has_paddings", [False, True], ids=["packed", "aligned"])
@pytest.mark.parametrize("is_lean", [False, True], ids=["padded", "lean"])
def test_parameters_are_found_in_the_stretches_of_stages_1_and_2(has_paddings, is_lean):
    for seed in range(40):
        groups, num_ranks = _parameters(seed), 1 + seed % 5
        flats, paddings = [[] for _ in range(num_ranks)], []
        for group in groups:
            numels = [tensor.numel() for tensor in group.values()]
            paddings.append([-numel % 4 if has_paddings else 0 for numel in numels])
            parts = [
                torch.cat([t.flatten(), torch.zeros(padding)])
                for t, padding in zip(group.values(), paddings[-1], strict=True)
            ]
            flat = torch.cat(parts)
            size = math.ceil(len(flat) / (2 * num_ranks)) * 2
            padded = torch.cat([flat, torch.zeros(size * num_ranks - len(flat))])
            for rank in range(num_ranks):
                end = min(size * (rank + 1), len(flat)) if is_lean else size * (rank + 1)
                flats[rank].append(padded[size * rank : max(end, size * rank)])
        placed = place_stretches(_shapes(groups), paddings if has_paddings else None, flats)
        assert _is_found(groups, placed, flats, 1 + seed % 3)


def test_parameters_are_found_in_the_parts_of_stage_3():
    for seed in range(40):
        groups, num_ranks = _parameters(seed), 1 + seed % 5
        flats = [[] for _ in range(num_ranks)]
        for group in groups:
            for rank in range(num_ranks):
                flats[rank].append(torch.cat([_part(tensor, rank, num_ranks) for tensor in group.values()]))
        placed = place_parts(_shapes(groups), flats)
        assert _is_found(groups, placed, flats, 1 + seed % 3)


def _part(tensor, rank, num_ranks):
    part = math.ceil(tensor.numel() / num_ranks)
    padded = torch.cat([tensor.flatten(), torch.zeros(part * num_ranks - tensor.numel())])
    return padded[rank * part : (rank + 1) * part]


def test_a_frozen_parameter_is_put_together_from_the_parts_of_the_ranks():
    tensor = torch.randn(3, 5)
    stored = place_frozen((3, 5), [_part(tensor, rank, 4) for rank in range(4)])
    found = torch.empty(15)
    stored.copy_to(found, 0)
    assert torch.equal(found.view(3, 5), tensor)
    with pytest.raises(CheckpointError, match="at rank 3 .* 3 or more .* of 2[.]"):
        place_frozen((3, 5), [torch.zeros(4)] * 3 + [torch.zeros(2)])


@pytest.mark.parametrize("numel", [5, 9])
def test_a_vector_whose_length_the_shapes_do_not_explain_is_refused(numel):
    with pytest.raises(CheckpointError, match=rf"param group 0 .* 6 to 7 .* of {numel}\."):
        place_stretches([{"weight": (2, 3)}], None, [[torch.zeros(numel)]])
    with pytest.raises(CheckpointError, match=rf"sub-group 0 of rank 0 .* of 6 .* of {numel}\."):
        place_parts([{"weight": (2, 3)}], [[torch.zeros(numel)]])


def test_a_tensor_that_is_stored_in_one_piece_keeps_its_dtype():
    stored = whole(torch.arange(6, dtype=torch.bfloat16).view(2, 3))
    found = torch.empty(2)
    stored.copy_to(found, 3)
    assert stored.dtype == torch.bfloat16
    assert found.tolist() == [3.0, 4.0]
