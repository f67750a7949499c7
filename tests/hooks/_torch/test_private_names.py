"""The private names of torch that `hooks/_torch` uses are there; no other file uses any."""

import ast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult

from tests.measuring.sources import ROOT, python_files
from zeroamp.hooks._torch import dispatch
from zeroamp.hooks._torch import fsdp as _fsdp

MODULE_NAMES = {"_get_fsdp_state", "_set_unshard_async_op"}
GROUP_NAMES = {
    "_fsdp_param_groups",
    "_fsdp_param_group",
    "fsdp_params",
    "unsharded_accumulated_grad",
    "_unsharded_param",
    "_to_sharded",
    _fsdp.END_OF_BACKWARD,
    "wait_for_unshard",
    "_modules_to_run_forward",
    "_reset_iter_state",
    "_training_state",
    "_post_forward_indices",
    "_state_ctx",
    "_comm_ctx",
    "_all_gather_result",
    "all_gather_work",
    "all_gather_event",
    "mesh_info",
    "shard_process_group",
    "reduce_scatter_process_group",
    "_cdata",
    "_is_profiler_enabled",
    "_current_graph_task_id",
    "_execution_engine",
}


def _states():
    torch.manual_seed(0)
    module = nn.Linear(2, 2)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    module(torch.ones(1, 2))
    state = module._get_fsdp_state()
    group = (getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group])[0]
    parameter = group.fsdp_params[0]
    found = [callable(getattr(group, name)) for name in ("_to_sharded", *_fsdp.COMMUNICATION)]
    found.append(callable(getattr(state, _fsdp.END_OF_BACKWARD)))
    found.append(isinstance(state._modules_to_run_forward, set))
    found += [hasattr(parameter, name) for name in ("sharded_param", "unsharded_accumulated_grad", "_unsharded_param")]
    found.append(isinstance(torch.ones(1).untyped_storage()._cdata, int))
    found.append(hasattr(group, "_all_gather_result") and isinstance(state._state_ctx.all_states, list))
    groups = ["shard_process_group", *["reduce_scatter_process_group"] * _fsdp.has_reduction_options()]
    found.append(all(hasattr(group.mesh_info, name) for name in groups))
    found.append(hasattr(state, "_reset_iter_state") or _can_be_reset(state, group))
    return [callable(getattr(state, name)) for name in _fsdp.FORWARD_HOOKS] + found


def _can_be_reset(state, group):
    """Up to torch 2.12: the names that `abandon` resets itself."""
    return (
        hasattr(type(state._training_state), "IDLE")
        and isinstance(group._post_forward_indices, list)
        and isinstance(state._comm_ctx.post_forward_order, list)
        and {"all_gather_state", "reduce_scatter_state"} <= vars(state._comm_ctx).keys()
        and {"all_states", "iter_forward_root", "post_backward_final_callback_queued"} <= vars(state._state_ctx).keys()
        and {"_training_state", "_partial_reduce_output", "_all_reduce_state", "_post_reduce_event"}
        <= vars(group).keys()
    )


def test_the_names_exist(ranks2):
    assert ranks2.run(_states)[0] == [True] * 15
    assert all(hasattr(FSDPModule, name) for name in MODULE_NAMES)
    assert {"all_gather_event", "all_gather_work"} <= set(AllGatherResult._fields)
    for base in (_fsdp.ReduceScatter, _fsdp.AllGather):
        assert base.__abstractmethods__ == {"allocate", "__call__"}
    for new, old in (
        ("reduce_scatter_single", "reduce_scatter_tensor"),
        ("all_gather_single", "all_gather_into_tensor"),
    ):
        assert hasattr(torch.distributed, new) or hasattr(torch.distributed, old)


def _private_imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch"):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from (f"{node.module}: {name}" for name in names if name.startswith("_"))
        if isinstance(node, ast.Attribute) and node.attr in {*_fsdp.FORWARD_HOOKS, *GROUP_NAMES, *MODULE_NAMES}:
            yield node.attr


def test_the_names_of_the_dispatch_layer_do_what_is_said_of_them():
    seen = []

    class Mode(dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((func.namespace, func.overloadpacket.__name__, dispatch.is_view_op(func)))
            return func(*args, **(kwargs or {}))

    real = torch.ones(2, 2)
    with dispatch.FakeTensorMode(allow_non_fake_inputs=True), Mode():
        fake = real + 1
        fake.t()
        view = torch.ops.aten._unsafe_view(fake, [4])
    assert [entry for entry in seen if entry[0] == "aten"] == [
        ("aten", "add", False),
        ("aten", "t", True),
        ("aten", "_unsafe_view", True),
    ]
    assert dispatch.storage_of(view) == dispatch.storage_of(fake) != dispatch.storage_of(real)
    assert hash(dispatch.storage_of(view)) == hash(dispatch.storage_of(fake))
    assert dispatch.storage_of(real.to_sparse()) is None


def test_what_is_said_of_profilers_and_backwards_holds():
    seen = []

    def hook(_gradient):
        seen.append(dispatch.is_in_backward())
        dispatch.at_end_of_backward(lambda: seen.append("end"))

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(hook)
    y.sum().backward()
    assert (seen, dispatch.is_in_backward()) == ([True, "end"], False)
    found = [dispatch.is_profiling()]
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule, acc_events=True
    ) as profiler:
        for _ in range(3):
            found.append(dispatch.is_profiling())
            profiler.step()
    assert [*found, dispatch.is_profiling()] == [False, False, True, False, False]


def test_no_other_file_uses_private_names():
    files = [path for layer in ("policies", "hooks", "zeroamp") for path in python_files(layer)]
    found = {str(path.relative_to(ROOT)): list(_private_imports(path)) for path in files}
    assert found.pop("hooks/_torch/fsdp.py")
    assert {name: uses for name, uses in found.items() if uses} == {}
