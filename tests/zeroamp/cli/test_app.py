"""The commands: what goes to stdout and to stderr, and with which exit code."""

import json
import re

import pytest
import torch

import zeroamp
from tests.models.small import HfLlama, hf_llama_config
from tests.processes.cli import NET, run
from tests.processes.training import config

NETS = f"""{NET}
def talk():
    print("built on", nn.Linear(1, 1).weight.device)
    return Net()

def flat():
    return nn.Linear(8, 8)

def fail():
    raise OSError("no weights here")
"""


@pytest.fixture
def cfg(tmp_path):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(config(3)))
    return path


@pytest.fixture
def net(python_file):
    return f"{python_file('net_of_test.py', NETS)}:Net"


@pytest.fixture
def llama(tmp_path):
    (tmp_path / "llama").mkdir()
    hf_llama_config(dtype="bfloat16").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def asked(monkeypatch):
    """The arguments with which the commands call `policy_from_config`: the config's path, and keywords."""
    calls, policy = [], zeroamp.policy_from_config({})

    def record(cfg, **keywords):
        calls.append((str(cfg), keywords))
        return policy

    monkeypatch.setattr(zeroamp, "policy_from_config", record)
    return calls


def test_check_prints_the_keys_of_the_config_and_their_defaults_if_asked(cfg):
    policy, hint = zeroamp.policy_from_config(cfg), "--all lists all other keys with their defaults.\n"
    model = "--model also checks the names of modules and classes.\n"
    first = f"{cfg}: mode autocast, ZeRO stage 3"
    assert run("check", cfg) == (0, f"{first}\n\n{policy.report()}\n{hint}{model}", "")
    assert run("check", cfg, "--all") == (0, f"{first}\n\n{policy.report(defaults=True)}\n{model}", "")
    assert run("check", "--all") == (0, f"{zeroamp.policy_from_config({}).report(defaults=True)}\n{model}", "")


def test_check_leaves_out_keys_that_an_integration_fills(tmp_path):
    path = tmp_path / "trainer.json"
    stage = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    precision = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    path.write_text(json.dumps({**stage, **precision, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}))
    code, out, err = run("check", path)
    assert (code, err) == (0, "")
    assert "zero_optimization.stage = 3" in out
    left = "bf16.enabled, fp16.enabled, optimizer.params.lr"
    assert f'"auto", and not checked: zero_optimization.reduce_bucket_size, {left}. A Trainer' in out
    assert "bf16 is assumed." in out
    out = run("check", path, "--auto", "bf16=false", "--auto", "fp16=true", "--auto", "lr=0.1")[1]
    assert "not checked: zero_optimization.reduce_bucket_size. A Trainer" in out
    assert "assumed" not in out
    path.write_text(json.dumps({**precision, "zero_optimization": {"stage": 4}}))
    assert "zero_optimization.stage must be" in run("check", path)[2]


def test_check_begins_with_mode_stage_units_and_the_share_in_low_precision(cfg, net, llama, tmp_path):
    code, out, err = run("check", cfg, "--model", net)
    found = re.match(
        rf"{re.escape(str(cfg))} and {re.escape(net)}: mode autocast, ZeRO stage 3, 3 FSDP units below the root, "
        r"4 parameter groups, (\d+\.\d)% of the trainable elements in bf16 Honoured",
        _words(out),
    )
    assert (code, err) == (0, "")
    assert 0 < float(found[1]) < 100
    assert f"{llama}: mode autocast, ZeRO stage 3, 2 FSDP units below" in _words(run("check", cfg, "--model", llama)[1])
    code, out, err = run("check", cfg, "--model", net.replace("Net", "flat"))
    assert "0 FSDP units below the root, 1 parameter group" in _words(out)
    assert err.startswith("Linear has no units below its root: at stage 3 all of its parameters")
    cfg.write_text('{"zero_optimization": {"stage": 2}}')
    assert run("check", "--all", "--model", net)[1].startswith(f"{net}: mode fp32 (none of")
    assert "mode fp32 (none of torch_autocast, bf16 and fp16 is enabled), ZeRO stage 2" in _words(run("check", cfg)[1])


def test_check_warns_of_a_warm_up_that_is_longer_than_the_run(tmp_path):
    path = tmp_path / "zero.json"
    params = {"warmup_num_steps": 100, "total_num_steps": 10}
    path.write_text(json.dumps({"scheduler": {"type": "WarmupDecayLR", "params": params}}))
    assert "warmup_num_steps is 100, but total_num_steps is 10" in run("check", path)[2]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("zero.json", '{\n  // stage\n  "bf16": {}}', "JSON has no comments. Remove them."),
        ("zero.json", '{"bf16": {} # on\n}', "JSON has no comments. Remove them."),
        ("zero.yaml", "bf16:\n  enabled: true\n", "This file is YAML."),
        ("zero.json", "", "Correct the file."),
    ],
)
def test_a_config_that_is_not_json_says_what_it_has(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    assert words in run("check", tmp_path / name)[2]


def test_a_class_that_is_misspelt_has_a_suggestion(tmp_path, net):
    block = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["Linaer"]}
    (tmp_path / "zero.json").write_text(json.dumps({"torch_autocast": block}))
    assert "Did you mean 'Linear'?" in run("check", tmp_path / "zero.json", "--model", net)[2]


def _words(text):
    return " ".join(text.split())


def test_check_shows_to_what_each_override_applies(tmp_path, net):
    path = tmp_path / "zero.json"
    overrides = [{"modules": "1.0", "compute": "fp32"}, {"modules": "Linear", "communication": "fp32"}]
    path.write_text(json.dumps(config(3, zeroamp={"overrides": overrides})))
    code, out, _ = run("check", path, "--model", net)
    assert code == 0
    assert '"modules": "1.0"' in run("check", path)[1]
    assert _words(out).endswith(
        "zeroamp.overrides.0: compute fp32 for 2 parameters: blocks.1.0.weight, blocks.1.0.bias "
        "zeroamp.overrides.1: communication fp32 for 4 parameters: "
        "blocks.0.0.weight, blocks.0.0.bias, blocks.2.0.weight, blocks.2.0.bias"
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"zero_optimisation": {}}', "Did you mean 'zero_optimization'?"),
        ('{"bf16": {"enabled": "yes"}, "gradient_clipping": -1}', "\nbf16.enabled "),  # both lines
        ("{", "Correct the file."),
    ],
)
@pytest.mark.parametrize("command", ["check", "explain"])
def test_a_mistake_in_the_config_goes_to_stderr_whole(tmp_path, net, command, content, words):
    """A mistake in the config goes to stderr whole and without a traceback."""
    path = tmp_path / "zero.json"
    path.write_text(content)
    with pytest.raises(zeroamp.ConfigError) as raised:
        zeroamp.policy_from_config(path)
    where = "" if str(path) in str(raised.value) else f"{path}: "
    assert run(command, path, "--model", net) == (1, "", f"Error: {where}{raised.value}\n")
    assert words in str(raised.value)


def test_a_model_that_cannot_be_built_goes_to_stderr(cfg, net):
    code, out, err = run("explain", cfg, "--model", net.replace("Net", "fail"))
    assert (code, out) == (1, "")
    assert err.startswith("Error: --model ")
    assert "raised OSError: no weights here" in err
    assert "Traceback" not in err
    code, _, err = run("check", cfg, "--auto-wrap", "Linear")
    assert code == 1
    assert "Name one with --model" in err


@pytest.mark.parametrize("command", ["check", "explain"])
def test_units_by_class(cfg, net, command):
    assert "3 FSDP units" in run(command, cfg, "--model", net, "--auto-wrap", "Sequential")[1]
    assert "6 FSDP units" in run(command, cfg, "--model", net, "--auto-wrap", "LayerNorm", "--auto-wrap", "Linear")[1]
    code, out, err = run(command, cfg, "--model", net, "--auto-wrap", "Sequentail")
    assert (code, out) == (1, "")
    assert "Sequentail" in err


def test_ranks_and_automatic_values_reach_the_config(asked, cfg, net):
    values = {"a": 3, "b": 0.001, "c": "bf16", "d": "x=y", "e": True, "f": {"g": [1]}, "h": "3"}
    written = ("a=3", "b=1e-3", "c=bf16", "d=x=y", "e=true", 'f={"g": [1]}', 'h="3"')
    arguments = (cfg, "--world-size", 8, *(part for text in written for part in ("--auto", text)))
    for command in (("check",), ("explain", "--model", net)):
        assert run(*command, *arguments)[0] == 0
        assert asked == [(str(cfg), {"world_size": 8, **values})]
        asked.clear()
    assert run("check", cfg)[0] == 0
    assert asked == [(str(cfg), {"world_size": None})]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("explain",), "the following arguments are required: config, --model"),
        (("chekc", "some.json"), "there is no command 'chekc'. Did you mean 'check'?"),
        (("check", "some.json", "--world_size", "2"), "unrecognized arguments: --world_size 2"),
        (("check", "some.json", "--world", "2"), "unrecognized arguments: --world 2"),
        (("check", "some.json", "--world-size", "0"), "argument --world-size: '0' is not an integer of 1 or more"),
        (("check", "some.json", "--auto", "a"), "'a' is not KEY=VALUE"),
        (("check", "some.json", "--auto", "=3"), "'=3' is not KEY=VALUE"),
        (("plan", "some.json", "--model", "a:b"), "the following arguments are required: --world-size"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_arguments_exits_with_2(asked, arguments, words):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert not asked


def test_check_without_a_config_is_a_mistake(asked):
    assert run("check") == (1, "", "Error: The config is missing. Name a JSON file, or list all keys with --all.\n")
    assert not asked


@pytest.mark.parametrize("command", ["check", "explain"])
def test_inputs_of_a_traced_run(tmp_path, net, command):
    path = tmp_path / "zero.json"
    key = {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": "auto"}
    path.write_text(json.dumps(config(3, dtype=None, torch_autocast=key)))
    code, out, err = run(command, path, "--model", net)
    assert (code, out) == (1, "")
    assert 'torch_autocast.lower_precision_safe_modules "auto" needs inputs' in err
    assert "--inputs file.py:function" in err
    code, out, err = run(command, path, "--model", net, "--inputs", net.replace("Net", "batch"))
    assert (code, err) == (0, "")
    assert "in bf16" in out


def test_explain_prints_the_ledger(cfg, llama):
    with torch.device("meta"):
        model = HfLlama()
    ledger = zeroamp.Ledger(plan=zeroamp.build_plan(model, zeroamp.policy_from_config(cfg)))
    assert run("explain", cfg, "--model", llama) == (0, f"{ledger}\n", "")
    assert run("explain", cfg, "--model", llama, "--per-parameter")[1] == f"{ledger}\n\n{ledger.per_parameter()}\n"


@pytest.mark.parametrize(
    ("more", "shape"), [({}, (8, None)), ({"zeroamp": {"dp_replicate_size": 4}}, (2, 4)), ({"stage": 0}, (1, 8))]
)
def test_explain_counts_bytes_per_rank_where_the_ranks_are_said(tmp_path, net, more, shape):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(config(**{"stage": 3, **more})))
    code, out, _ = run("explain", path, "--model", net, "--json", "--world-size", 8)
    as_dict = json.loads(out)
    assert (code, tuple(as_dict["ranks"].values())) == (0, shape)
    rows = {row["parameter"]: row for row in as_dict["parameters"]}
    assert rows["blocks.0.0.weight"]["stored_bytes_per_rank"] == 8 * 8 * 4 // shape[0]
    assert "The number of ranks is not known" not in run("explain", path, "--model", net, "--world-size", 8)[1]


def test_check_refuses_replicas_that_do_not_divide_the_ranks(tmp_path):
    (tmp_path / "zero.json").write_text(json.dumps(config(3, zeroamp={"dp_replicate_size": 2})))
    assert run("check", tmp_path / "zero.json", "--world-size", 4)[0] == 0
    code, _, err = run("check", tmp_path / "zero.json", "--world-size", 3)
    assert code == 1
    assert f"{tmp_path / 'zero.json'}: zeroamp.dp_replicate_size must" in err


def test_explain_as_json_is_one_object_whatever_the_factory_prints(cfg, net):
    code, out, err = run("explain", cfg, "--model", net.replace("Net", "talk"), "--json")
    ledger = json.loads(out)
    assert (code, err) == (0, "built on meta\n")
    assert list(ledger)[:5] == ["config", "units", "summary", "groups", "parameters"]
    assert ledger["units"] == ["blocks.0", "blocks.1", "blocks.2"]
    assert len(ledger["parameters"]) == 12


def test_the_log_goes_to_stderr(cfg, net):
    _, out, err = run("explain", cfg, "--model", net.replace("Net", "flat"), "--json")
    json.loads(out)
    assert err.startswith("Linear has no units below its root")


def test_the_version_and_the_help():
    assert run("--version") == (0, f"zeroamp {zeroamp.__version__}\n", "")
    code, out, err = run("explain", "--help")
    assert (code, err) == (0, "")
    assert out.startswith("usage: zeroamp explain [-h]")
