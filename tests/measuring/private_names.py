"""Looks for each private name of torch that zeroamp uses: python -m tests.measuring.private_names

Imports nothing of zeroamp, which may fail to import where a name is gone.
"""

import runpy
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.utils
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.measuring.sources import ROOT


def missing():
    """Return "name: why zeroamp needs it" of the names that this torch lacks. Needs a process group of gloo."""
    reasons = runpy.run_path(str(ROOT / "hooks" / "_torch" / "private_names.py"))["REASONS"]
    module = dist.fsdp.fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    module(torch.ones(1, 2))  # some attributes are set in the first forward
    module.reshard()
    found = {name for owner, names in _places(module) for name in names.split() if _has(owner, name)}
    if found & {"_fsdp_param_group", "_fsdp_param_groups"}:  # one of them, by version
        found |= {"_fsdp_param_group", "_fsdp_param_groups"}
    return [f"{name}: {reason}" for name, reason in reasons.items() if name not in found]


def _has(owner, name):
    try:
        return hasattr(owner(), name)
    except AttributeError:  # the owner has such a name too
        return False


def _places(module):
    """Yield a function that returns what has private names, and the names."""

    def state():
        return module._get_fsdp_state()

    def group():
        return (getattr(state(), "_fsdp_param_groups", None) or [state()._fsdp_param_group])[0]

    yield lambda: torch, "_C _subclasses _disable_dynamo _foreach_norm"
    yield lambda: torch.utils, "_python_dispatch"
    yield lambda: dist, "_functional_collectives _composable_state"
    yield lambda: dist._composable_state, "_module_state_mapping"
    yield lambda: dist.fsdp, "_fully_shard"
    yield lambda: dist.fsdp._fully_shard, "_fsdp_common"
    yield lambda: torch._C, "_current_graph_task_id _current_autograd_node _will_engine_execute_node"
    yield lambda: torch._C, "_set_throw_on_mutable_data_ptr"
    yield lambda: torch.autograd.Variable, "_execution_engine"
    yield lambda: torch.autograd.profiler, "_is_profiler_enabled"
    yield lambda: torch.ops.aten, "_grouped_mm _unsafe_view"
    yield lambda: torch.Tensor, "_base"
    yield lambda: torch.distributed.checkpoint.utils, "_create_file_view"
    yield lambda: DeviceMesh, "_get_root_mesh _flatten _concatenate"
    yield lambda: module, "_get_fsdp_state"
    yield state, "_fsdp_param_group _fsdp_param_groups _pre_forward _post_forward _pre_backward _comm_ctx"
    yield state, "_root_post_backward_final_callback"
    yield group, "_reduce_dtype _to_sharded _partial_reduce_output _register_post_backward_hook _training_state"
    yield group, "_post_forward_indices"
    yield lambda: group().fsdp_params[0], "_init_extensions _sharded_local_tensor _sharded_param_data _unsharded_param"
    yield lambda: module.weight, "_local_tensor"
    yield lambda: dist.group.WORLD, "_get_backend"
    yield lambda: dist.group.WORLD._get_backend(torch.device("cpu")).options, "_timeout"


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    lacking = missing()
    print(f"torch {torch.__version__} lacks {len(lacking)} private names that zeroamp uses.", *lacking, sep="\n")
    sys.exit(len(lacking) > 0)
