"""The tensors of a checkpoint: the digests of files that are being written, and a save that fails on one rank."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.processes.checkpoint_training import Case, Training, differences, error_of
from zeroamp.checkpoint import writer
from zeroamp.checkpoint.manifest import record_file
from zeroamp.checkpoint.reader import CheckpointReader
from zeroamp.checkpoint.writer import save_tensors
from zeroamp.rank_group import RankGroup


def _saved_in_two_dtypes(folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ranks, found = RankGroup(mesh), []
    for index, dtype in enumerate((torch.float32, torch.bfloat16)):
        path = folder / str(index)
        ranks.on_first(path.mkdir)
        values = torch.arange(6.0).view(3, 2).to(dtype)
        records = save_tensors({"a": distribute_tensor(values, mesh, [Shard(0)])}, path, ranks)
        of_all = ranks.run(lambda records=records: records)
        files = {name: record for of_rank in of_all for name, record in of_rank.items()}
        found.append(files == {file.name: record_file(file) for file in path.iterdir()} and sorted(files))
        target = {"a": distribute_tensor(torch.zeros_like(values), mesh, [Shard(0)])}
        CheckpointReader(path, files).read_tensors(target)
        found.append(torch.equal(target["a"].full_tensor(), values))
    return found


def test_a_tensor_that_was_cast_since_the_last_save_is_described_in_its_new_dtype(ranks2, tmp_path):
    files = [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert ranks2.run(_saved_in_two_dtypes, tmp_path) == [[files, True, files, True]] * 2


def _fails_between(folder):
    """A save that fails on one rank after the plans were exchanged, between two that do not."""
    training = Training(Case())
    training.run(0, 1).save(folder)
    training.run(1, 2)
    errors = []
    for rank in (0, 1):
        real = writer._HashingFile.write
        if dist.get_rank() == rank:
            writer._HashingFile.write = _full
        errors.append(error_of(training.save, folder))
        writer._HashingFile.write = real
    training.save(folder)
    state = training.state()
    loaded = Training(Case(), seed=7)
    loaded.load(folder)
    return errors, differences(loaded.state(), state)


def _full(*_args, **_kwargs):
    raise OSError(28, "No space left on device")


def test_a_save_after_one_that_failed_is_whole(ranks2, tmp_path):
    for errors, after_load in ranks2.run(_fails_between, str(tmp_path)):
        assert all(error.endswith("No space left on device") for error in errors)
        assert after_load == []
