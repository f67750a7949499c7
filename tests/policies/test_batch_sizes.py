"""train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks, over every subset."""

import pytest

from zeroamp import ConfigError, policy_from_config

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def sizes(cfg, **arguments):
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
    cfg = {key: value for key, value in zip(KEYS, given, strict=True) if value is not None}
    assert sizes(cfg, world_size=3) == derived


def test_the_ranks_come_from_the_launchers_environment(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert sizes({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}) == (24, 2, 4)
    assert sizes({"train_batch_size": 24}, world_size=2) == (24, 12, 1)


@pytest.mark.parametrize("text", ["two", "0", "-1", "2.0", " 2", "9" * 5000])
def test_a_malformed_world_size_is_an_error(monkeypatch, text):
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(ConfigError, match="variable WORLD_SIZE must be a whole number from 1 on, but is .*or unset it"):
        sizes({"train_batch_size": 24})
    assert sizes({"train_batch_size": 24}, world_size=2) == (24, 12, 1)
    assert policy_from_config({}, world_size=2).replace(stage=2).stage == 2, "nothing to derive"
    monkeypatch.setenv("WORLD_SIZE", "")
    assert sizes({"train_batch_size": 24}) == (24, None, 1)


def test_without_a_number_of_ranks_only_what_needs_none_is_derived():
    assert sizes({"train_batch_size": 24}) == (24, None, 1)
    assert sizes({"train_micro_batch_size_per_gpu": 2}) == (None, 2, 1)
    with pytest.raises(
        ConfigError, match="gradient_accumulation_steps is missing.* train_batch_size 24 .*Pass world_size="
    ):
        sizes({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2})


@pytest.mark.parametrize("total", [1, 23, 25, 48])
def test_sizes_that_do_not_multiply_are_refused(total):
    cfg = {"train_batch_size": total, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    with pytest.raises(ConfigError, match=f"train_batch_size must be 24 = .* is {total}. Change one"):
        sizes(cfg, world_size=3)


@pytest.mark.parametrize("total", [1, 5, 13])
def test_nothing_is_rounded(total):
    for given in ({"train_micro_batch_size_per_gpu": 2}, {"gradient_accumulation_steps": 2}):
        with pytest.raises(ConfigError, match=f"train_batch_size must be a multiple of 6 = .* is {total}. Change one"):
            sizes({"train_batch_size": total, **given}, world_size=3)


def test_a_total_that_is_no_multiple_is_refused_before_the_ranks_are_known():
    cfg = {"train_batch_size": 25, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    with pytest.raises(ConfigError, match="train_batch_size must be a multiple of 8 = .* is 25"):
        sizes(cfg)
