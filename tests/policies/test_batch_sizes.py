"""train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks, over every subset."""

import pytest

from zeroamp import ConfigError, policy_from_config

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def sizes(given, **arguments):
    cfg = {key: value for key, value in zip(KEYS, given, strict=True) if value is not None}
    policy = policy_from_config(cfg, **arguments)
    return tuple(getattr(policy, key) for key in KEYS)


@pytest.mark.parametrize(
    ("given", "derived"),
    [
        ((None, None, None), (None, None, 1)),
        ((24, None, None), (24, 8, 1)),
        ((None, 2, None), (6, 2, 1)),
        ((None, None, 4), (None, None, 4)),
        ((24, 2, None), (24, 2, 4)),
        ((24, None, 4), (24, 2, 4)),
        ((None, 2, 4), (24, 2, 4)),
        ((24, 2, 4), (24, 2, 4)),
    ],
)
def test_what_is_missing_is_derived_for_three_ranks(given, derived):
    assert sizes(given, world_size=3) == derived


def test_the_ranks_come_from_the_launchers_environment(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert sizes((24, 2, None)) == (24, 2, 4)
    assert sizes((24, None, None), world_size=2) == (24, 12, 1)


@pytest.mark.parametrize("text", ["two", "0", "2.0", " 2", "9" * 5000])
def test_a_malformed_world_size_is_an_error(monkeypatch, text):
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(ConfigError, match="variable WORLD_SIZE must be a whole number from 1 on, but is .*or unset it"):
        sizes((24, None, None))
    assert sizes((24, None, None), world_size=2) == (24, 12, 1)
    monkeypatch.setenv("WORLD_SIZE", "")
    assert sizes((24, None, None)) == (24, None, 1)


def test_without_a_number_of_ranks_only_what_needs_none_is_derived():
    assert sizes((24, None, None)) == (24, None, 1)
    assert sizes((None, 2, None)) == (None, 2, 1)


@pytest.mark.parametrize(
    ("given", "num_ranks", "words"),
    [
        ((24, 2, None), None, "gradient_accumulation_steps is missing.* train_batch_size 24 .*Pass world_size="),
        ((23, 2, 4), 3, "train_batch_size must be 24 = .* is 23. Change one"),
        ((48, 2, 4), 3, "train_batch_size must be 24 = .* is 48. Change one"),
        ((13, 2, None), 3, "train_batch_size must be a multiple of 6 = .* is 13. Change one"),
        ((5, None, 2), 3, "train_batch_size must be a multiple of 6 = .* is 5. Change one"),
        ((25, 2, 4), None, "train_batch_size must be a multiple of 8 = .* is 25"),
    ],
)
def test_sizes_that_do_not_multiply_are_refused_and_not_rounded(given, num_ranks, words):
    with pytest.raises(ConfigError, match=words):
        sizes(given, world_size=num_ranks)
