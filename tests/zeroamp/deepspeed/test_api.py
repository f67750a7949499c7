"""The names of the package: what each brings, what is refused, and the small modules beside the engine."""

import argparse
import importlib
import json
import os
from unittest import mock

import pytest
import torch

import zeroamp.deepspeed as deepspeed
from zeroamp.deepspeed import accelerator, comm, utils, zero
from zeroamp.deepspeed.arguments import config_of
from zeroamp.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zeroamp.deepspeed.refused import REFUSED, Refused, UnsupportedError
from zeroamp.deepspeed.runtime.utils import see_memory_usage
from zeroamp.deepspeed.submodules import ALIASES, Submodules
from zeroamp.policies.errors import ConfigError


def test_every_public_name_is_there():
    for name in (*deepspeed.__all__, *deepspeed.MODULES):
        assert getattr(deepspeed, name) is not None
        assert name in dir(deepspeed)
    assert callable(deepspeed.initialize)
    from zeroamp.deepspeed.runtime.engine import DeepSpeedEngine
    from zeroamp.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    assert DeepSpeedEngine is deepspeed.DeepSpeedEngine
    assert ZeroParamStatus is deepspeed.zero.ZeroParamStatus


def test_refused_names_are_imported_and_raise_the_reason_when_used():
    for name in (name for name in REFUSED if not name.startswith("engine.")):
        home, _, last = name.rpartition(".")
        # an object, or the module if another test has imported it
        refused = getattr(importlib.import_module(f"zeroamp.deepspeed.{home}".rstrip(".")), last)
        with pytest.raises(UnsupportedError) as raised:
            refused.anything()
        assert REFUSED[name] in str(raised.value)
        assert f"deepspeed.{name}." in str(raised.value)


def test_a_refused_class_is_no_base_class_and_has_no_instances():
    assert isinstance(deepspeed.PipelineModule, Refused)
    for use in (deepspeed.PipelineModule, lambda: list(deepspeed.PipelineModule), lambda: deepspeed.PipelineModule.a):
        with pytest.raises(UnsupportedError, match="no pipeline"):
            use()
    assert not isinstance(torch.nn.Linear(1, 1), deepspeed.PipelineModule)
    with pytest.raises(UnsupportedError, match="no pipeline"):

        class Model(deepspeed.PipelineModule):
            pass


def test_submodules_below_a_refused_one_are_refused():
    """Submodules below a refused one answer with its sentence and others are not found."""
    for name, word in (
        ("pipe", "no pipeline"),
        ("utils.timer", "RunReport"),
        ("moe.layer", "no expert-parallel"),
    ):
        with pytest.raises(UnsupportedError, match=word):
            importlib.import_module(f"zeroamp.deepspeed.{name}").any_function()
    for name in ("zeroamp.deepspeed.nothing", "zeroamp.deepspeed.utils.nothing"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


def test_other_names_of_modules_have_the_same_objects():
    """Other names of modules have the same objects and replace no name of their package."""
    for name, target in ALIASES.items():
        package, last = name.rpartition(".")[::2]
        there = vars(importlib.import_module(f"zeroamp.deepspeed.{package}".rstrip("."))).get(last)
        assert there is None or isinstance(there.__loader__, Submodules)
        module, home = (importlib.import_module(f"zeroamp.deepspeed.{each}") for each in (name, target))
        public = next(each for each in vars(home) if callable(getattr(home, each)) and not each.startswith("_"))
        assert getattr(module, public) is getattr(home, public)


def test_memory_is_logged_when_it_is_forced(caplog):
    with caplog.at_level("INFO", logger="zeroamp.deepspeed"):
        see_memory_usage("after the forward")
        assert caplog.messages == []
        see_memory_usage("after the forward", force=True)
    assert caplog.messages[0].startswith("after the forward: allocated 0.00 GiB")


def test_no_name_of_the_engine_is_both_there_and_refused():
    names = [name.removeprefix("engine.") for name in REFUSED if name.startswith("engine.")]
    assert not [name for name in names if hasattr(deepspeed.DeepSpeedEngine, name)]


@pytest.mark.parametrize(
    ("owner", "name", "close"),
    [
        (deepspeed, "initialise", "initialize"),
        (comm, "all_reduces", "all_reduce"),
        (utils, "see_memory", "see_memory_usage"),
        (deepspeed.runtime.utils, "log_dists", "log_dist"),
        (zero, "GatherParameters", "GatheredParameters"),
        (accelerator.get_accelerator(), "device_names", "device_name"),
    ],
)
def test_an_unknown_name_is_told_close_ones(owner, name, close):
    with pytest.raises(UnsupportedError, match=f"'{name}'.*{close}"):
        getattr(owner, name)
    assert not hasattr(owner, name)


def test_arguments_and_configs(tmp_path):
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"bf16": {"enabled": True}, "gradient_clipping": 0.5}))
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    assert args.deepspeed
    config = config_of(args, None, None)
    assert config["bf16"] == {"enabled": True, "check_grad_overflow": True}
    assert config["gradient_clipping"] == 0.5
    given = {"zeroamp": {"sync_module_states": False}}
    assert config_of(None, None, given) == {"gradient_clipping": 1.0, **given}
    assert given == {"zeroamp": {"sync_module_states": False}}
    assert deepspeed.DeepSpeedConfigError is ConfigError
    assert config_of(argparse.Namespace(local_rank=0), {}, None)["zeroamp"] == {"sync_module_states": True}
    for wrong in ((args, {}, None), (None, None, None)):
        with pytest.raises(ConfigError, match="one config"):
            config_of(*wrong)


def test_adam_has_deepspeeds_defaults():
    parameters = [torch.nn.Parameter(torch.ones(2))]
    optimizer = FusedAdam(parameters)
    assert type(optimizer) is torch.optim.AdamW
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (1e-3, 0.0)
    assert type(FusedAdam(parameters, adam_w_mode=False)) is torch.optim.Adam
    assert type(DeepSpeedCPUAdam(parameters, adamw_mode=False, weight_decay=0.1)) is torch.optim.Adam
    for make in (
        lambda: FusedAdam(parameters, bias_correction=False),
        lambda: DeepSpeedCPUAdam(parameters, bias_correction=False),
    ):
        with pytest.raises(UnsupportedError, match="False"):
            make()


def _comm():
    assert comm.is_initialized()
    before = torch.distributed.group.WORLD
    deepspeed.init_distributed()
    assert torch.distributed.group.WORLD is before
    tensor = torch.full((2,), float(comm.get_rank() + 1))
    comm.all_reduce(tensor)
    assert tensor.tolist() == [3.0, 3.0]
    comm.barrier()
    with pytest.raises(UnsupportedError, match="zeroamp.traffic"):
        comm.log_summary()
    with mock.patch.dict(os.environ):
        os.environ.pop("LOCAL_RANK", None)  # a test of a launcher may have left one
        without = comm.get_local_rank()
        os.environ["LOCAL_RANK"] = "3"
        local_ranks = without, comm.get_local_rank()
    return comm.get_world_size(), local_ranks


def test_comm_is_torchs(ranks2):
    assert ranks2.run(_comm) == [(2, (0, 3))] * 2


def test_the_accelerator_is_the_device_of_this_machine(monkeypatch):
    found = accelerator.get_accelerator()
    assert deepspeed.get_accelerator() is found
    if torch.cuda.is_available():
        assert found.device_name(1) == "cuda:1"
        return
    assert found.device_name(1) == found.current_device_name() == found.current_device() == "cpu"
    assert found.communication_backend_name() == "gloo"
    assert found.is_bf16_supported()
    found.set_device(3)
    state = found.get_rng_state()
    first = torch.rand(1)
    found.set_rng_state(state)
    assert torch.equal(torch.rand(1), first)
    assert (found.memory_allocated(), found.max_memory_reserved()) == (0, 0)
