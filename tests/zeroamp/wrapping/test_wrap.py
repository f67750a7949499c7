"""`wrap_model`: what it leaves alone, what it refuses, and meta-device models."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import zeroamp
from tests.models.small import HfLlama, Llama, build
from tests.processes.ranks import RankError
from tests.processes.training import SmallTraining, config, full_parameters, same_bits


def _keeps_names_and_values(name, stage):
    plain = build(name)
    keys, values = list(plain.state_dict()), {fqn: p.detach().clone() for fqn, p in plain.named_parameters()}
    model = zeroamp.wrap_model(plain, zeroamp.policy_from_config(config(stage)))
    assert model is plain
    assert isinstance(model, FSDPModule)
    assert list(model.state_dict()) == keys
    assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in model.parameters())
    assert same_bits(full_parameters(model), values) == []


@pytest.mark.parametrize(("name", "stage"), [("llama_tied", 0), ("encoder", 3)])
def test_wraps_in_place_and_leaves_names_and_values_alone(ranks2, name, stage):
    ranks2.run(_keeps_names_and_values, name, stage)


class OwnsEverything(nn.Sequential):
    """A container that owns parameters itself: nothing may be hung into it that it would call."""

    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return super().forward(x) * self.scale


def _keeps_children():
    torch.manual_seed(0)
    model = zeroamp.wrap_model(OwnsEverything(), zeroamp.policy_from_config(config(3)))
    model(torch.ones(2, 4)).sum().backward()
    assert len(model) == 3
    assert all(p.grad is not None for p in model.parameters())


def test_a_container_that_owns_parameters_keeps_its_children(ranks2):
    ranks2.run(_keeps_children)


def _refuse(how):
    model = build("llama_tied")
    policy = zeroamp.policy_from_config(config(0 if how == "mesh" else 3))
    mesh = None
    if how == "twice":
        zeroamp.wrap_model(model, policy)
    if how == "fully_shard":
        fully_shard(model.blocks[1], mesh=init_device_mesh("cpu", (2,)))
    if how == "mesh":
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    if how == "half meta":
        model.head = nn.Linear(32, 80, bias=False, device="meta")
    if how == "inference":
        with torch.inference_mode():
            return zeroamp.wrap_model(model, policy)
    if how == "unequal" and dist.get_rank() == 1:
        model.blocks[2].down.bias.data[0] += 1e-3
    return zeroamp.wrap_model(model, policy, mesh)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("twice", "The root is sharded already.*build it anew"),
        ("fully_shard", "blocks.1 is sharded already.*build it anew"),
        ("mesh", "mesh .*shape \\(1, 2\\) at stage 0"),
        ("half meta", "head.weight is on the meta device.* such as embed.*to_empty"),
        ("inference", "wrap_model .*torch.inference_mode\\(\\)"),
        (
            "unequal",
            "blocks.2.down.bias .*differ between ranks .parameters that differ: 1"
            "(?=.* torch.manual_seed)(?=.*set zeroamp.sync_module_states to true)",
        ),
    ],
)
def test_refusals_on_all_ranks(ranks2, how, text):
    with pytest.raises(RankError, match=f"--- rank 0[\\s\\S]*WrapError: .*{text}") as caught:
        ranks2.run(_refuse, how)
    assert "--- rank 1" in str(caught.value)


TIED = {
    "llama": (lambda: Llama(tied=True), lambda model: model.head.weight is model.embed.weight),
    "hf": (HfLlama, lambda model: model.lm_head.weight is model.get_input_embeddings().weight),
}
"""Name -> (factory, whether the model's head is tied)."""


def _meta(factory_name, stage):
    factory, is_tied = TIED[factory_name]
    with torch.device("meta"):
        model = factory()
    torch.manual_seed(dist.get_rank())
    before = torch.get_rng_state()
    model = zeroamp.wrap_model(model, zeroamp.policy_from_config(config(stage)))
    return torch.equal(before, torch.get_rng_state()), is_tied(model), full_parameters(model)


def _initialized_at_once(factory_name):
    """The same draws, made on a full model: module by module in the order of `named_modules`."""
    model = TIED[factory_name][0]()
    torch.manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if factory_name == "hf":
                for parameter in module.parameters(recurse=False):
                    parameter._is_hf_initialized = False
                if any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
                    model._init_weights(module)
            elif hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return {fqn: p.detach().clone() for fqn, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("factory_name", "stage"), [("llama", 0), ("llama", 3), pytest.param("hf", 3, marks=pytest.mark.slow)]
)
def test_a_meta_model_starts_from_the_values_of_its_own_initialisation(ranks2, factory_name, stage):
    for is_state_unchanged, is_tied, start in ranks2.run(_meta, factory_name, stage):
        assert is_state_unchanged
        assert is_tied
        assert same_bits(start, _initialized_at_once(factory_name)) == []


class BufferOwner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mask", torch.empty(4, dtype=torch.bool))
        self.register_buffer("bytes", torch.empty(4, dtype=torch.uint8))
        self.register_buffer("phase", torch.empty(4, dtype=torch.complex64))
        self.register_buffer("count", torch.empty((), dtype=torch.int64))

    def reset_parameters(self):
        self.mask.fill_(True)
        self.bytes.zero_()
        self.phase.fill_(1j)
        self.count.fill_(7)


def _initialises_buffers():
    with torch.device("meta"):
        model = nn.Sequential(nn.MultiheadAttention(8, 2), BufferOwner())
    model.register_buffer("kept", torch.arange(3.0))  # off the meta device: its values stay
    zeroamp.wrap_model(model, zeroamp.policy_from_config(config(3)))
    own, bias = model[1], model[0].out_proj.bias.full_tensor()
    assert (own.mask.all(), own.bytes.sum(), own.phase[0], own.count) == (True, 0, 1j, 7)
    assert model.kept.tolist() == [0.0, 1.0, 2.0]
    assert bias.abs().max() == 0  # nn.MultiheadAttention zeroes it after nn.Linear has drawn it


def test_meta_buffers_of_every_dtype(ranks2):
    """Meta buffers of every dtype and what a parent sets in its child."""
    ranks2.run(_initialises_buffers)


def _holder_called():
    class CallsChildren(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            for child in self.children():
                x = child(x)
            return x * self.scale

    torch.manual_seed(0)
    zeroamp.wrap_model(CallsChildren(), zeroamp.policy_from_config(config(3)))(torch.ones(1, 4))


def test_a_model_that_calls_all_its_children_is_told(ranks2):
    """A model that calls all its children is told which one to skip."""
    with pytest.raises(RankError, match="WrapError: _zeroamp_group .*model-wide:fp32.* skip children"):
        ranks2.run(_holder_called)


def _unfreeze():
    training = SmallTraining(config(3), prepare_before=lambda model: model.blocks[0].requires_grad_(False))
    training.model.blocks[0].requires_grad_(True)
    training.step()
    return {key.dtype for key in zeroamp.traffic(training.model).calls if key[::2] == ("all_to_all", "blocks.0")}


def test_a_unit_that_is_unfrozen_later_has_its_wire(ranks2):
    assert ranks2.run(_unfreeze)[0] == {torch.bfloat16}


def _meta_without_initialisation():
    with torch.device("meta"):
        model = OwnsEverything()
    zeroamp.wrap_model(model, zeroamp.policy_from_config(config(3)))


def test_a_meta_tensor_that_nothing_initialises_is_refused_by_name(ranks2):
    with pytest.raises(RankError, match="scale .*meta device.*OwnsEverything .*reset_parameters"):
        ranks2.run(_meta_without_initialisation)


class Largest(TorchDispatchMode):
    """`num_bytes`: of the largest storage that is made off the meta device."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.device.type == "cpu":
            self.num_bytes = max(self.num_bytes, out.untyped_storage().nbytes())
        return out


def _materialises_parameter_by_parameter():
    with torch.device("meta"):
        model = Llama(tied=True, num_blocks=8)
    with Largest() as largest:
        zeroamp.wrap_model(model, zeroamp.policy_from_config(config(3)))
    assert largest.num_bytes == 4 * max(p.numel() for p in model.parameters())


def test_materialising_never_holds_more_than_one_modules_parameters(ranks2):
    ranks2.run(_materialises_parameter_by_parameter)
