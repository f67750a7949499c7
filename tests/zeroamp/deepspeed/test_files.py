"""Which files are a checkpoint, and that reading one runs nothing that is in it."""

import os
import pickle
import shutil

import pytest
import torch

from benchmarks.crafted import checkpoints
from benchmarks.crafted.variant import special
from tests.zeroamp.deepspeed.cases import DATA
from zeroamp import CheckpointError
from zeroamp.checkpoint.archives import Inert
from zeroamp.deepspeed.files import Entries, find_files, read_file
from zeroamp.deepspeed.layout import whole


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def _save(path, value, form):
    if form == "zip":
        torch.save(value, path)
    elif form == "legacy":
        torch.save(value, path, _use_new_zipfile_serialization=False)
    else:
        path.write_bytes(pickle.dumps(value))


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_a_call_in_a_pickle_is_not_run(tmp_path, form):
    path, trace = tmp_path / "mp_rank_00_model_states.pt", tmp_path / "trace"
    _save(path, {"module": Calls(os.system, f"touch {trace}")}, form)
    with pytest.raises(CheckpointError, match=f"{path.name} .*zero_to_fp32|{path.name} cannot be read"):
        read_file(path)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("function", "name"),
    [(os.system, f"{os.name}.system"), (eval, "builtins.eval|eval"), (shutil.rmtree, "shutil.rmtree")],
)
def test_the_refused_global_is_named(tmp_path, function, name):
    torch.save({"module": Calls(function, "1")}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=rf"refers to ({name}), .*zero_to_fp32"):
        read_file(tmp_path / "file.pt")


def test_a_class_of_deepspeed_is_neither_imported_nor_called(tmp_path, python_file):
    python_file("deepspeed/__init__.py", "raise AssertionError('imported')")
    path = tmp_path / "file.pt"
    shutil.copy(next(DATA.glob("stage2_fp16/*/zero_pp_rank_0_mp_rank_00_optim_states.pt")), path)
    state = read_file(path).inside("optimizer_state_dict")
    scaler, stage = state.get("loss_scaler", Inert), state.get("zero_stage", Inert)
    assert scaler.state["cur_scale"] == 4096.0
    assert stage.args == (2,)


def test_a_global_that_the_caller_trusts_is_read_and_the_list_is_put_back(tmp_path):
    torch.save({"note": Entries("a", {})}, tmp_path / "file.pt")
    before = set(torch.serialization.get_safe_globals())
    with pytest.raises(CheckpointError, match=r"zeroamp.deepspeed.files.Entries.*safe_globals"):
        read_file(tmp_path / "file.pt")
    with torch.serialization.safe_globals([Entries]):
        assert read_file(tmp_path / "file.pt").values == {"note": Entries("a", {})}
    assert set(torch.serialization.get_safe_globals()) == before


@pytest.mark.parametrize("num_bytes", [0, 100, 4000])
def test_a_file_that_was_cut_short_is_an_error(tmp_path, num_bytes):
    whole = next(DATA.glob("stage1_bf16/*/mp_rank_00_model_states.pt")).read_bytes()
    (tmp_path / "file.pt").write_bytes(whole[:num_bytes])
    with pytest.raises(CheckpointError, match=r"file\.pt cannot be read .*Copy it again"):
        read_file(tmp_path / "file.pt")


def test_a_file_of_something_else_is_an_error(tmp_path):
    torch.save([1, 2], tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=r"file\.pt .*a dict.*a list"):
        read_file(tmp_path / "file.pt")
    torch.save({"module": 3}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="module .*a dict.*a int"):
        read_file(tmp_path / "file.pt").get("module", dict)
    with pytest.raises(CheckpointError, match="optimizer .*missing"):
        read_file(tmp_path / "file.pt").inside("optimizer")


def _folder(tmp_path, *names):
    for name in ("mp_rank_00_model_states.pt", *names):
        (tmp_path / "tag").mkdir(exist_ok=True)
        (tmp_path / "tag" / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("layer_00-model_00-model_states.pt", "pipeline"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "experts"),
        ("mp_rank_01_model_states.pt", "tensor-parallel"),
        ("bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor-parallel"),
        ("offloaded_tensors", "NVMe"),
        ("zero", "universal"),
    ],
)
def test_other_kinds_of_checkpoints_are_refused_by_name(tmp_path, name, kind):
    with pytest.raises(CheckpointError, match=rf"{name} holds .*{kind}.*zero_to_fp32"):
        find_files(_folder(tmp_path, name), "tag")


def test_files_of_every_rank_are_needed_and_no_others(tmp_path):
    optimizer = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 2)]
    with pytest.raises(CheckpointError, match="per rank, counted from 0"):
        find_files(_folder(tmp_path, *optimizer), "tag")
    second = f"bf16_{optimizer[0]}"
    with pytest.raises(CheckpointError, match="an earlier checkpoint of this tag"):
        find_files(_folder(tmp_path, "zero_pp_rank_1_mp_rank_00_optim_states.pt", second), "tag")


def test_a_rank_without_its_model_states_is_an_error(tmp_path):
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(3)]
    _folder(tmp_path, *names, *(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2)))
    (tmp_path / "tag" / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="has 2 and 3. Copy the files of all ranks"):
        find_files(tmp_path, "tag")


def test_ranks_are_in_the_order_of_their_numbers(tmp_path):
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(11)]
    assert [path.name for path in find_files(_folder(tmp_path, *names), "tag").optimizer] == names


def test_the_tag_is_the_callers_or_the_latest(tmp_path):
    with pytest.raises(CheckpointError, match="latest, .*cannot be read .*tag="):
        find_files(_folder(tmp_path), None)
    (tmp_path / "latest").write_text("tag\n")
    assert find_files(tmp_path, None).path == tmp_path / "tag"
    for tag in ("", "other", "..", "tag/..", "/"):
        with pytest.raises(CheckpointError, match=f"no checkpoint '{tag}'.* tags: tag"):
            find_files(tmp_path, tag)
    (tmp_path / "tag" / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="mp_rank_00_model_states.pt .*has no files"):
        find_files(tmp_path, "tag")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["fifo", "device", "link out"])
def test_only_regular_files_of_the_folder_are_read(tmp_path, kind):
    special("file.pt", kind)(tmp_path)
    with pytest.raises(CheckpointError, match=r"file\.pt.*(not a regular file|leads out of its folder)"):
        read_file(tmp_path / "file.pt")
    (tmp_path / "tag").mkdir()
    special("latest", "fifo" if kind == "link out" else kind)(tmp_path)
    with pytest.raises(CheckpointError, match="latest, .*cannot be read .*not a regular file"):
        find_files(tmp_path, None)


@pytest.mark.parametrize(
    "name", ["a call of bytearray(2**30)", "such a call by a rebuild function", "records that overlap"]
)
def test_a_file_that_would_take_more_memory_than_it_has_bytes_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(checkpoints, "BOMB_BYTES", 4 * 1024**2)
    (tmp_path / "file.pt").write_bytes(checkpoints.ARCHIVES[name](tmp_path))
    with pytest.raises(CheckpointError, match=r"file\.pt cannot be read"):
        read_file(tmp_path / "file.pt")


def test_a_tensor_of_more_elements_than_its_storage_is_not_copied():
    with pytest.raises(CheckpointError, match=r"stored in full, but is one of shape \[1099511627776\]"):
        whole(torch.ones(1).expand(2**40))
    assert whole(torch.arange(6).view(2, 3).T).pieces[0].values.tolist() == [0, 3, 1, 4, 2, 5]
