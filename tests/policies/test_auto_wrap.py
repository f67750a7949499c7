"""Which modules become units."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.models.small import Block, ConvNet, HfLlama, Llama
from zeroamp import ConfigError, WrapError
from zeroamp.policies.auto_wrap import find_units
from zeroamp.policies.policy import LeafModules

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def model():
    with torch.device("meta"):
        return Llama(tied=True)


@pytest.mark.parametrize(
    "policy",
    [None, Block, {Block}, ["Block"], "tests.models.small.Block"],
    ids=["default", "class", "set", "list of names", "qualified name"],
)
def test_every_form_of_policy_finds_the_blocks(policy):
    assert sorted(find_units(model(), policy)) == BLOCKS


def test_subclasses_match_by_class_and_by_name():
    class Special(Block):
        pass

    nested = nn.Module()
    nested.block = Special()
    assert find_units(nested, Block) == find_units(nested, "Block") == ["block"]


def test_the_default_is_what_transformers_must_not_split():
    """The default is what transformers must not split or repeated blocks in module lists."""
    assert sorted(find_units(HfLlama())) == ["model.layers.0", "model.layers.1"]
    assert sorted(find_units(ConvNet())) == ["stages.0", "stages.1"]


def test_experts_inside_a_block_are_no_units_by_default():
    mixture = model()
    for block in mixture.blocks:
        block.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    assert sorted(find_units(mixture)) == BLOCKS


@pytest.mark.parametrize("policy", [{nn.Conv2d}, ["Block", "Blok"]], ids=str)
def test_a_policy_that_matches_nothing_names_the_classes_that_exist(policy):
    with pytest.raises(WrapError, match="auto_wrap_policy .* matches no module of Llama. Name .*Block, Embedding"):
        find_units(model(), policy)


def test_a_container_that_is_never_called_is_no_unit():
    with pytest.raises(WrapError, match="auto_wrap_policy chose blocks, a ModuleList.* Name the class of its children"):
        find_units(model(), "ModuleList")


@pytest.mark.parametrize(
    "policy", [3, [], [3], int, ModuleWrapPolicy({Block})], ids=["3", "[]", "[3]", "int", "torch's"]
)
def test_other_forms_are_refused(policy):
    with pytest.raises(WrapError, match="auto_wrap_policy must be module classes or class names"):
        find_units(model(), policy)


@pytest.mark.parametrize(
    "leaf",
    [
        LeafModules(classes=("tests.models.small.RMSNorm",)),
        LeafModules(names=("norm",), name_suffixes=("norm1", "norm2")),
    ],
    ids=str,
)
def test_leaf_modules_are_units_beside_those_of_the_policy(leaf):
    units = find_units(model(), leaf_modules=leaf)
    assert sorted(units) == sorted([*BLOCKS, "norm", *(f"{block}.norm{i}" for block in BLOCKS for i in (1, 2))])
    assert units.index("blocks.0.norm1") < units.index("blocks.0")


def test_no_unit_is_inside_a_leaf_module():
    nested = LeafModules(names=("blocks.0",), name_suffixes=("norm1",))
    units = [*BLOCKS, "blocks.1.norm1", "blocks.2.norm1"]
    assert sorted(find_units(model(), leaf_modules=nested)) == sorted(units)
    assert find_units(model(), leaf_modules=LeafModules(classes=("Llama",))) == []


def test_a_suffix_ends_at_a_dot():
    """A suffix ends at a dot and a shared module matches by any of its names."""
    assert sorted(find_units(model(), leaf_modules=LeafModules(name_suffixes=("norm",)))) == [*BLOCKS, "norm"]
    shared = model()
    shared.alias = shared.blocks[0].norm1
    assert "blocks.0.norm1" in find_units(shared, leaf_modules=LeafModules(names=("alias",)))


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (LeafModules(classes=("Expert",)), r"leaf_module.classes 'Expert' .*no module of Llama.*Block, Embed"),
        (LeafModules(names=("blocks.7",)), r"leaf_module.names 'blocks.7' .*Name .*blocks.2"),
        (LeafModules(name_suffixes=("gate",)), r"leaf_module.name_suffixes 'gate' .*gate_up"),
        (LeafModules(names=("blocks",)), r"leaf_module.names 'blocks' matches blocks, a ModuleList.* Name the module"),
    ],
    ids=str,
)
def test_a_missing_leaf_module_is_refused_by_its_key(leaf, text):
    """A leaf module that is not in the model is refused by its key."""
    with pytest.raises(ConfigError, match=f"zero_optimization.{text}"):
        find_units(model(), leaf_modules=leaf)


def _layer():
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


@pytest.mark.parametrize(
    ("keys", "units"), [(["0", "1"], ["layers.0", "layers.1"]), (["left", "right"], []), (["0", "last"], [])]
)
def test_a_numbered_module_dict_is_a_list_of_blocks(keys, units):
    """A module dict is a list of blocks if its keys are numbers."""
    model = nn.Module()
    model.layers = nn.ModuleDict({key: _layer() for key in keys})
    assert find_units(model) == units


def test_a_module_without_a_sibling_of_its_class_is_no_block():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)])
    assert find_units(model) == []
