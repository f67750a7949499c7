"""Checkpoints that DeepSpeed 0.19.8 wrote, read on other numbers of ranks, stages and meshes, bit for bit."""

import shutil

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import zeroamp
from tests.models.deepspeed import WIDTH, batch, build, param_groups
from tests.processes.ranks import RankError, Ranks
from tests.processes.training import full_parameters
from tests.selection import slow_but
from tests.zeroamp.deepspeed.cases import CASES, DATA, expected, facts

DTYPES = {"autocast": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="module")
def ranks1():
    ranks = Ranks(1)
    yield ranks
    ranks.stop()


def _wrapped(stage=3, *, model=None, mesh_shape=None, **cfg):
    mesh = None if mesh_shape is None else init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    policy = zeroamp.policy_from_config({"zero_optimization": {"stage": stage}, **cfg})
    return zeroamp.wrap_model(model or build(seed=1), policy, mesh, {"Block"})


def _load(case, stage, mesh_shape, shard_dim="auto"):
    """Whether all is as DeepSpeed had it: returns the names that differ in any bit, and what was loaded."""
    model = _wrapped(stage, mesh_shape=mesh_shape, zeroamp={"shard_dim": shard_dim})
    dims = {p.placements[-1].dim for p in model.parameters() if isinstance(p, DTensor)}
    is_even_in_dim_1 = dist.get_world_size() == 2 or mesh_shape is not None
    assert dims == ({0, 1} if is_even_in_dim_1 and stage > 0 and shard_dim == "auto" else {0})
    loaded = zeroamp.load_deepspeed_checkpoint(DATA / case, model)
    found, original = full_parameters(model), build()
    frozen = original.frozen.weight.to(DTYPES[case.split("_")[1]]).float()
    differ = [name for name, tensor in expected(case, "fp32").items() if not torch.equal(found[name], tensor)]
    differ += [] if torch.equal(found["frozen.weight"], frozen) else ["frozen.weight"]
    differ += [] if torch.equal(model.offset, original.offset) else ["offset"]
    differ += [] if model.num_forwards.item() == 3 else ["num_forwards"]
    return differ, loaded


@pytest.mark.parametrize("num_ranks", slow_but([1, 2, 4], 2))
@pytest.mark.parametrize("case", CASES)
def test_every_bit_is_read_on_any_number_of_ranks(request, case, num_ranks):
    ranks = request.getfixturevalue(f"ranks{num_ranks}")
    layouts = [(2, None), (3, None)] + ([(3, (2, 2)), (0, None)] if num_ranks == 4 else [(3, None, 0)])
    for layout in layouts:
        for differ, loaded in ranks.run(_load, case, *layout):
            assert differ == []
            assert (loaded.global_steps, loaded.skipped_steps) == (3, facts(case)["skipped_steps"])
            assert loaded.client_state == {"epoch": 1, "note": "of the client"}
            assert (loaded.zero_stage, loaded.version) == (int(case[5]), "0.19.8")


def test_the_expected_tensors_are_told_apart_from_16_bit_ones():
    moved = [case for case in CASES if "16" in case and facts(case)["lr"][0] > 0 and expected(case, "exp_avg")]
    assert len(moved) == 5
    for case in moved:
        for name, tensor in expected(case, "fp32").items():
            assert not torch.equal(tensor.to(DTYPES[case.split("_")[1]]).float(), tensor), name


def _variant(kind):
    model = build()
    if kind == "renamed":
        model.gain = model._parameters.pop("gains")
    elif kind == "reshaped":
        model.gains = torch.nn.Parameter(torch.ones(7))
    elif kind == "buffer":
        model.register_buffer("shift", model._buffers.pop("offset"))
    elif kind == "tied":
        model.blocks[0].norm.bias = model.blocks[0].norm.weight
    elif kind == "low frozen":
        model.frozen.to(torch.bfloat16)
    return model


def _refused(kind, case):
    model = _wrapped(model=_variant(kind))
    before = full_parameters(model)
    try:
        zeroamp.load_deepspeed_checkpoint(DATA / case, model)
    except zeroamp.CheckpointError as error:
        assert all(torch.equal(tensor, before[name]) for name, tensor in full_parameters(model).items())
        return str(error)
    return None


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("renamed", "1 missing: gain; 1 unexpected: gains"),
        ("reshaped", r"1 of another shape: gains \(5,\) .*\(7,\)"),
        ("buffer", "1 missing: shift; 1 unexpected: offset"),
        ("tied", "1 stored apart, but shared in the model: blocks.0.norm.weight and blocks.0.norm.bias"),
        ("low frozen", "1 of a dtype that would lose bits: frozen.weight torch.float32 .*torch.bfloat16"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_by_name_and_left_alone(ranks2, kind, text):
    errors = ranks2.run(_refused, kind, "stage3_autocast")
    assert errors[0] == errors[1]
    with pytest.raises(zeroamp.CheckpointError, match=text):
        raise zeroamp.CheckpointError(errors[0])


def _untied():
    model = build(seed=1)
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    model = _wrapped(model=model)
    zeroamp.load_deepspeed_checkpoint(DATA / "stage3_fp16", model)
    found = full_parameters(model)
    return torch.equal(found["head.weight"], found["embed.weight"])


def test_a_weight_that_was_shared_is_loaded_under_both_names(ranks2):
    assert ranks2.run(_untied) == [True, True]
    assert ranks2.run(_load, "stage0_autocast", 3, None)[0][0] == []


def _compiled():
    model = build(seed=1)
    model.blocks[0] = torch.compile(model.blocks[0])
    model = _wrapped(model=model)
    zeroamp.load_deepspeed_checkpoint(DATA / "stage3_fp16", model)
    found = full_parameters(model)
    assert "blocks.0._orig_mod.up.weight" in found
    return [
        name
        for name, tensor in expected("stage3_fp16", "fp32").items()
        if not torch.equal(found[name.replace("blocks.0.", "blocks.0._orig_mod.")], tensor)
    ]


def test_names_that_torch_compile_changed_are_found(ranks2):
    assert ranks2.run(_compiled) == [[], []]


def _missing_on_rank_1(folder):
    path = DATA / "stage2_bf16" if dist.get_rank() == 0 else folder
    try:
        zeroamp.load_deepspeed_checkpoint(path, _wrapped())
    except zeroamp.CheckpointError as error:
        return str(error)
    return None


def test_a_file_that_one_rank_does_not_see_is_an_error_on_all(ranks2, tmp_path):
    texts = ranks2.run(_missing_on_rank_1, str(tmp_path))
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"rank 1: {tmp_path}/latest, ")


def test_files_of_a_checkpoint_that_more_ranks_wrote_are_refused(ranks2, tmp_path):
    shutil.copytree(DATA / "stage3_autocast", tmp_path / "copy")
    for path in (tmp_path / "copy" / "global_step3").glob("zero_pp_rank_2_*"):
        path.unlink()
    with pytest.raises(RankError, match="partition_count is 3, .*2 ranks.*Copy the files"):
        ranks2.run(_load_from, str(tmp_path / "copy"))


def _load_from(folder):
    zeroamp.load_deepspeed_checkpoint(folder, _wrapped())


def test_a_low_precision_checkpoint_of_stage_0_is_refused(ranks2, tmp_path):
    shutil.copytree(DATA / "stage0_autocast", tmp_path / "copy")
    path = tmp_path / "copy" / "global_step3" / "mp_rank_00_model_states.pt"
    state = torch.load(path)
    state["module"]["gains"] = state["module"]["gains"].half()
    torch.save(state, path)
    with pytest.raises(RankError, match="gains is torch.float16 at ZeRO stage 0.*at stage 1"):
        ranks2.run(_load_from, str(tmp_path / "copy"))


def test_a_model_that_is_split_over_ranks_is_refused(ranks2, tmp_path):
    shutil.copytree(DATA / "stage0_autocast", tmp_path / "copy")
    path = tmp_path / "copy" / "global_step3" / "mp_rank_00_model_states.pt"
    torch.save(torch.load(path) | {"mp_world_size": 2}, path)
    with pytest.raises(RankError, match="mp_world_size is 2, .*zero_to_fp32"):
        ranks2.run(_load_from, str(tmp_path / "copy"))


def _loss_after_loading(num_forwards_before):
    model = _wrapped(stage=2)
    for _ in range(num_forwards_before):
        model(batch(0))  # without a backward: what it gathered is still there
    zeroamp.load_deepspeed_checkpoint(DATA / "stage1_autocast", model)
    return model(batch(1)).item()


def test_nothing_that_an_earlier_forward_gathered_is_used_after_loading(ranks2):
    assert ranks2.run(_loss_after_loading, 1) == ranks2.run(_loss_after_loading, 0)


class _Allocations(TorchDispatchMode):
    """Remembers the largest tensor of numbers that is made, in elements; views of a mapped file do not count."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_new = isinstance(result, torch.Tensor) and not isinstance(result, DTensor) and not func.is_view
        if is_new and result.is_floating_point():  # agreement sends bytes
            is_in_place = func._schema.arguments[0].is_write if func._schema.arguments else False
            self.largest = self.largest if is_in_place else max(self.largest, result.numel())
        return result


def _largest_allocation(case):
    model = _wrapped()
    train = zeroamp.TrainStep(model, torch.optim.AdamW(param_groups(model)))
    with _Allocations() as allocations:
        zeroamp.load_deepspeed_checkpoint(DATA / case, model, train)
    shards = [p.to_local().numel() for p in model.parameters()]
    return allocations.largest, max(shards), max(p.numel() for p in model.parameters())


@pytest.mark.parametrize("case", ["stage2_bf16", "stage3_bf16"])
def test_no_rank_makes_a_tensor_larger_than_its_largest_shard(ranks2, case):
    for allocated, largest_shard, largest_parameter in ranks2.run(_largest_allocation, case):
        assert allocated <= largest_shard <= 6 * WIDTH < largest_parameter
