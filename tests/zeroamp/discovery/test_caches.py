"""Caches of the model's code are as they were after a traced run."""

import importlib
import types
from functools import lru_cache

import pytest
import torch
from torch import nn

import zeroamp
from tests.models import cache_helpers, caches
from tests.selection import slow_but
from tests.zeroamp.dry_run.plans import plan as plan_of

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def _empty():
    """Give each test caches of its own: what refers to a frozen one, Python does not list."""
    importlib.reload(cache_helpers)
    importlib.reload(caches)


def _discover(model, *args):
    zeroamp.discover_safe_parameters(model, args)


def _expected(model, x):
    return nn.functional.linear(x, model.lin.weight, model.lin.bias) + torch.arange(8.0) / 8


@pytest.mark.parametrize("kind", caches.KINDS)
def test_a_real_forward_after_the_run_reads_no_fake_tensor(kind):
    model = caches.Model(kind)
    _discover(model, X)
    assert torch.equal(model(X), _expected(model, X))


@pytest.mark.parametrize("kind", caches.KINDS)
def test_what_a_real_forward_had_cached_is_right(kind):
    """The run on another size replaces what is cached, in the kinds that retain one table only."""
    model = caches.Model(kind)
    assert torch.equal(model(X), _expected(model, X))
    _discover(model, X)
    assert torch.equal(model(X), _expected(model, X))


@pytest.mark.parametrize("kind", ["lru_in_a_wrapper", "class_attributes", "global_dict"])
def test_caches_are_empty_after_a_run_that_raised(kind):
    def fail(_module, _args, output):
        raise ValueError(output.shape)

    model = caches.Model(kind)
    with model.register_forward_hook(fail), pytest.raises(zeroamp.ConfigError, match="ValueError"):
        _discover(model, X)
    assert torch.equal(model(X), _expected(model, X))


class Remembering(nn.Module):
    """Retains its output where no name leads to it, as a hook does that collects features."""

    def __init__(self, kept, keep):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.kept = lambda: kept
        self.keep = lambda x: keep(kept, x)

    def forward(self, x):
        self.keep(self.lin(x))
        return self.lin(x)


_WAYS = {
    "a list in": (list, lambda kept, x: kept.append(x)),
    "a tuple in a dict in": (dict, lambda kept, x: kept.update(x=(x, 0))),
    "a SimpleNamespace in": (types.SimpleNamespace, lambda kept, x: setattr(kept, "x", x)),
}


@pytest.mark.parametrize("place", _WAYS)
def test_what_a_closure_collects_is_an_error_that_names_the_place(place):
    """Only the caches of functions are cleared there: other containers may have had items before the run."""
    make, keep = _WAYS[place]
    words = rf"Remembering .*fake tensors.*retains some .*{place}.*Remove the code"
    with pytest.raises(zeroamp.ConfigError, match=words):
        _discover(Remembering(make(), keep), X)


def test_a_cache_that_the_run_does_not_fill_stays():
    @lru_cache
    def constant():
        return object()

    model = caches.Model("lru_function")
    model.constant, before = constant, constant()
    _discover(model, X)
    assert constant() is before
    caches.of_function(8)
    _discover(model, X)
    assert caches.of_function.cache_info().currsize == 1


@pytest.mark.parametrize("kind", ["lru_in_a_wrapper", "class_attributes", "global_dict"])
def test_a_plan_leaves_nothing(kind):
    model = caches.Model(kind)
    x = torch.randn(2, 8)
    plan_of(model=model, inputs=lambda batch, seq: torch.zeros(batch, 8), loss_fn=lambda output: output.sum())
    assert torch.equal(model(x), _expected(model, x))


def _detr():
    transformers = pytest.importorskip("transformers")
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"], layer_type="basic"
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False, backbone_config=backbone, backbone=None, use_pretrained_backbone=False,
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=3, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return transformers.DetrForObjectDetection(config)


_VIT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 32}


def _beit():
    transformers = pytest.importorskip("transformers")
    return transformers.BeitModel(
        transformers.BeitConfig(
            **_VIT, patch_size=8, use_relative_position_bias=True, use_absolute_position_embeddings=True
        )
    )


def _dinov3():
    transformers = pytest.importorskip("transformers")
    return transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**_VIT, patch_size=8))


def _rt_detr():
    transformers = pytest.importorskip("transformers")
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.RTDetrConfig(
        backbone_config=backbone, encoder_hidden_dim=16, encoder_in_channels=[8, 16, 16], d_model=16,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
        decoder_in_channels=[16, 16, 16], num_queries=4, decoder_layers=1, num_denoising=0,
    )  # fmt: skip
    return transformers.RTDetrModel(config)


@pytest.mark.parametrize("build", slow_but([_detr, _beit, _dinov3, _rt_detr], _beit))
def test_families_of_transformers_that_cache_positions(build):
    torch.manual_seed(0)
    model = build().eval()
    pixels = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        _discover(model, pixels)
        first = model(pixels)[0]
        assert torch.equal(model(pixels)[0], first)
