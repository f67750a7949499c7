"""`zeroamp.Profile` and `zeroamp profile`: which steps are in the trace, and what happens when something goes wrong."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import zeroamp
from tests.measuring.traces import complete, crossing, names, ours
from tests.processes.cli import run
from tests.processes.launch import torchrun
from tests.processes.training import config
from tests.zeroamp.reporting.runs import take_steps, train_step
from zeroamp.cli.app import main
from zeroamp.wrapping.state import wrap_state


def _read(path):
    return complete(json.loads(Path(path).read_bytes()))


def _profile(folder, num_steps, keywords, accumulation=1):
    train = train_step(config(3, accumulation=accumulation))
    with zeroamp.Profile(train, folder, **keywords) as profile:
        take_steps(train, num_steps)
    labels = {row["label"]: row["calls"] for row in profile.times}
    assert len(str(profile).partition("---")[2].splitlines()) == 1 + len(labels)
    return str(profile.path), labels


def test_each_rank_writes_a_trace_of_the_active_steps(ranks2, tmp_path):
    """Each rank writes a trace of the active steps in which everything nests."""
    answers = ranks2.run(_profile, str(tmp_path / "new" / "traces"), 6, {"active": 2}, 2)
    for rank, (path, labels) in enumerate(answers):
        assert Path(path) == tmp_path / "new" / "traces" / f"rank{rank}.json"
        events = _read(path)
        assert crossing(events) == []
        found = names(events)
        assert found.count("optimizer (AdamW)") == found.count("norm") == 2
        assert found.count("forward (blocks.0)") == found.count("backward") == 4
        assert sum(event["name"].startswith("ProfilerStep#") for event in events) == 2
        assert labels["zeroamp::forward (root)"] == 4
    assert sorted(os.listdir(tmp_path / "new" / "traces")) == ["rank0.json", "rank1.json"]  # no drafts


def test_a_context_that_ends_early_writes_the_steps_it_has(ranks2, tmp_path):
    path, _ = ranks2.run(_profile, str(tmp_path), 3, {"wait": 0, "warmup": 1, "active": 9})[0]
    assert path.endswith("rank0.json")
    assert names(_read(path)).count("optimizer (AdamW)") == 2


def _two_models(folder):
    one, other = train_step(config(3)), train_step(config(3))
    with zeroamp.Profile(one, folder, wait=0, active=1) as profile:
        take_steps(other, 2)
        assert profile.path is None
        take_steps(one, 2)
        written = profile.path
        take_steps(one, 2)
    return written == profile.path is not None, len(wrap_state(one.model).callbacks)


def test_only_the_steps_of_the_one_train_step_count(ranks2, tmp_path):
    assert ranks2.run(_two_models, str(tmp_path)) == [(True, 0), (True, 0)]


def _mistakes(folder):
    """Too few steps, an error inside, and, on rank 1, a file where the folder is to be."""
    with pytest.raises(zeroamp.StepError) as early, zeroamp.Profile(train := train_step(config(3)), folder):
        take_steps(train, 2)
    with pytest.raises(ValueError, match="asked to"), zeroamp.Profile(train, folder, wait=0):
        _step_and_raise(train)
    own = Path(f"{folder} {dist.get_rank()}")
    own.write_text("")
    with pytest.raises(zeroamp.StepError) as unwritable, zeroamp.Profile(train, own, wait=0, active=1):
        take_steps(train, 2)
    return (str(early.value), str(unwritable.value)), len(wrap_state(train.model).callbacks), os.path.exists(folder)


def _step_and_raise(train):
    take_steps(train, 2)
    raise ValueError("asked to")


def test_mistakes_are_errors_and_nothing_is_written_after_one(ranks2, tmp_path):
    for (early, unwritable), num_callbacks, was_written in ranks2.run(_mistakes, str(tmp_path / "traces")):
        assert re.search(r"after 2 optimizer steps.* step 3.* lower wait and warmup", early)
        assert re.match(r"Profile cannot write .*/rank\d\.json: FileExistsError: .*Name another folder\.$", unwritable)
        assert (num_callbacks, was_written) == (0, False)


@pytest.mark.slow
def test_the_command_prints_the_first_ranks_labels(tmp_path):
    """The command runs a script under torchrun and prints the first rank's labels."""
    options = ("--out", tmp_path / "out", "--wait", 18, "--active", 2)
    # 21 steps asked for, 20 made: what there is is written after the script has ended its process group.
    printed = torchrun("-m", "zeroamp", "profile", *options, "examples/minimal.py")
    assert f"\n{tmp_path}/out/rank0.json\n" in printed
    assert printed.count("zeroamp::optimizer (AdamW)") == 1
    for rank in range(2):
        events = _read(tmp_path / "out" / f"rank{rank}.json")
        assert crossing(events) == []
        assert [event["name"] for event in ours(events)].count("optimizer (AdamW)") == 1


def test_a_script_finds_its_arguments(python_file, tmp_path, capsys):
    """A script finds its arguments and without a TrainStep the command fails."""
    script = python_file("script.py", "import sys, json; print(json.dumps([sys.argv[1:], sys.path[0], __name__]))")
    before = list(sys.argv), list(sys.path)
    with pytest.raises(SystemExit) as ended:
        main(["profile", "--out", str(tmp_path / "out"), str(script), "--wait", "x", "--", "-v"])
    out, err = capsys.readouterr()
    assert json.loads(out) == [["--wait", "x", "--", "-v"], str(tmp_path), "__main__"]
    assert ended.value.code == 1
    assert err.startswith("Error: Profile recorded nothing, because no TrainStep was made inside it")
    assert (sys.argv, sys.path) == before
    assert not (tmp_path / "out").exists()


def test_what_a_script_raises_is_raised_and_its_exit_code_is_kept(python_file, tmp_path):
    out = ("profile", "--out", tmp_path / "out")
    with pytest.raises(KeyError, match="of the script"):
        run(*out, python_file("raises.py", "raise KeyError('of the script')"))
    assert run(*out, python_file("exits.py", "raise SystemExit(7)"))[0] == 7
    assert run(*out, tmp_path / "none.py")[0] == 2
