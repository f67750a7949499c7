"""Every private name of torch that `hooks/_torch` uses has a reason and is there; no other file uses any."""

import ast
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.peers.counting import Collectives
from tests.measuring import private_names
from tests.measuring.sources import ROOT, python_files
from zeroamp.hooks._torch import dispatch, process_groups
from zeroamp.hooks._torch import fsdp as _fsdp
from zeroamp.hooks._torch.private_names import REASONS

FOLDER = ROOT / "hooks" / "_torch"

OF_PRIVATE_CLASSES = {
    *("fsdp_params", "sharded_param", "unsharded_param", "unsharded_accumulated_grad", "wait_for_unshard"),
    *("mesh_info", "shard_process_group", "reduce_scatter_process_group", "post_backward"),
    *("pre_forward", "post_forward", "reduce_grads", "all_reduce_grads", "unshard_async_op"),
    *("post_forward_mesh_info", "shard_mesh_dim", "shard_mesh_size", "fsdp_placement"),
    *("sharded_size", "contiguous_sharded_stride", "reset_sharded_param", "padded_sharded_param_size"),
    *("gradient_divide_factor", "all_gather_outputs"),
}
"""Names of FSDP2's private classes that begin with none."""


def _fully_sharded():
    torch.manual_seed(0)
    module = nn.Linear(2, 2)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    module(torch.ones(1, 2))
    return module


def _missing_of_fsdp():
    """The names that FSDP2's classes lack, and those that are not what they are taken for."""
    module = _fully_sharded()
    (group,) = _fsdp.groups_of(module._get_fsdp_state())
    methods = ("pre_forward", "post_forward", *_fsdp.COMMUNICATION)
    of_group = (*methods, "reduce_grads", "all_reduce_grads", "unshard_async_op", "post_forward_mesh_info")
    of_parameters = ("sharded_param", "unsharded_param", "unsharded_accumulated_grad")
    of_parameters += ("fsdp_placement", "sharded_size", "contiguous_sharded_stride")
    of_parameters += ("param_dtype", "reduce_dtype", "all_gather_outputs")
    of_mesh = ("shard_process_group", "shard_mesh_dim", "shard_mesh_size")
    places = ((group, of_group), (group.fsdp_params[0], of_parameters), (group.mesh_info, of_mesh))
    lacking = [name for owner, names in places for name in names if not hasattr(owner, name)]
    lacking += [name for name in methods if not callable(getattr(group, name, None))]
    lacking += ["gradient_divide_factor"] * (_fsdp.divide_factor(module) is not None)
    return lacking + ["_timeout"] * (not isinstance(_fsdp.timeout_of(dist.group.WORLD, "cpu"), timedelta))


def _of_replicas():
    """What `leave_replicas_alone` leaves of a group: type of its mesh's info, size of its shard group, placements."""
    torch.manual_seed(0)
    module = nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(module, mesh=mesh, reshard_after_forward=True)
    _fsdp.leave_replicas_alone(module)
    (group,) = _fsdp.groups_of(module._get_fsdp_state())
    same = group.post_forward_mesh_info is group.mesh_info
    seen = []
    module.set_all_reduce_hook(lambda reduced: seen.append(reduced.numel()))
    with Collectives() as collectives:
        module(torch.ones(1, 2) * (dist.get_rank() + 1)).sum().backward()
    gradient = module.weight.grad
    return type(group.mesh_info).__name__, same, seen, dict(collectives.calls), gradient.placements, gradient.to_local()


def test_fsdp2_leaves_replicas_to_the_hook(ranks2):
    for rank, (name, same, seen, calls, placements, gradient) in enumerate(ranks2.run(_of_replicas)):
        assert (name, same, seen, calls) == ("FSDPMeshInfo", True, [6], {})
        assert str(placements) == "(Replicate(), Shard(dim=0))"
        assert torch.equal(gradient, torch.full((2, 2), rank + 1.0))


def _groups_after_the_program_has_made_one_for_two_ranks():
    """The ranks of this rank's group of several parts of all ranks, and the sum of the ranks over it."""
    dist.new_group([0, 1])  # only two of the ranks are in a group more
    found = []
    for parts in ([[0, 2], [3, 1]], [[0, 1, 2, 3]]):
        group = process_groups.group_of_parts(parts, timedelta(seconds=30), "gloo", use="a test")
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total, group=group)
        found.append((dist.get_process_group_ranks(group), int(total)))
    return found


def test_groups_of_all_ranks_do_not_depend_on_the_program(ranks4):
    """Groups of parts of all ranks do not depend on groups of the program."""
    for rank, found in enumerate(ranks4.run(_groups_after_the_program_has_made_one_for_two_ranks)):
        assert found == [([1, 3], 4) if rank % 2 else ([0, 2], 2), ([0, 1, 2, 3], 6)]


def _devices_bound_when_groups_are_made():
    """What `device_id` of `init_process_group` is while groups of a part of the ranks are made, and afterwards."""
    default, bound = dist.group.WORLD, []
    default.bound_device_id = torch.device("cpu", 0)
    new_group = dist.new_group

    def noting(*args, **kwargs):
        bound.append(default.bound_device_id)
        return new_group(*args, **kwargs)

    with mock.patch.object(dist, "new_group", noting):
        process_groups.group_of_parts(
            [[0, 2]] if dist.get_rank() in (0, 2) else [[1]] if dist.get_rank() == 1 else [[3]], use="another test"
        )
    return bound, default.bound_device_id


def test_groups_of_some_ranks_are_not_split_off(ranks4):
    # A split is a collective of all ranks of the job.
    """Groups of a part of the ranks are not split off the default group."""
    assert ranks4.run(_devices_bound_when_groups_are_made) == [([None], torch.device("cpu", 0))] * 4


def _missing_without(name):
    """What is missing, and what more is without one name of DeviceMesh."""
    with mock.patch.object(DeviceMesh, name):
        delattr(DeviceMesh, name)
        return private_names.missing()


def test_each_private_name_exists_or_is_named(ranks2):
    """Each private name exists and one that does not is named with its reason."""
    assert ranks2.run(private_names.missing) == [[], []]
    assert ranks2.run(_missing_without, "_concatenate") == [["_concatenate: one mesh of several slices"]] * 2


def test_the_names_of_fsdp_exist(ranks2):
    assert ranks2.run(_missing_of_fsdp) == [[], []]
    for new, old in (
        ("reduce_scatter_single", "reduce_scatter_tensor"),
        ("all_gather_single", "all_gather_into_tensor"),
    ):
        assert hasattr(torch.distributed, new) or hasattr(torch.distributed, old)


def _private_names(path):
    """The names in a file that only torch can have defined: imported, read as attributes, or looked up as strings."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch"):
            yield from (*node.module.split("."), *(alias.name for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (
                part for alias in node.names if alias.name.startswith("torch") for part in alias.name.split(".")
            )
        elif isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            yield from [node.attr] * (not is_own)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def _is_private(name):
    return name.startswith("_") and not name.startswith("__")


def test_each_private_name_has_a_reason_and_is_used():
    files = [path for path in FOLDER.glob("*.py") if path.name != "private_names.py"]
    used = {name for path in files for name in _private_names(path) if _is_private(name)}
    assert used - REASONS.keys() == set(), "write in private_names.py why no public name serves"
    assert REASONS.keys() - used == set(), "delete them from private_names.py"
    assert [name for name, reason in REASONS.items() if len(reason.split()) < 2] == []


def test_no_other_file_uses_private_names():
    # Names of ops, and one that others use for their own.
    listed = REASONS.keys() - {"_grouped_mm", "_foreach_norm", "_timeout"}
    found = {}
    for path in (path for layer in ("policies", "hooks", "zeroamp") for path in python_files(layer)):
        attributes = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        names = set(_private_names(path)) & listed | attributes & OF_PRIVATE_CLASSES
        if path.parent != FOLDER and names:
            found[str(path.relative_to(ROOT))] = names
    assert found == {}


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


def test_what_is_said_of_profilers_holds():
    found = [dispatch.is_profiling()]
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule, acc_events=True
    ) as profiler:
        for _ in range(3):
            found.append(dispatch.is_profiling())
            profiler.step()
    assert [*found, dispatch.is_profiling()] == [False, False, True, False, False]
