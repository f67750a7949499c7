"""`--model`: a folder or a factory becomes a module on the meta device, or an error that says why not."""

import json
import re
import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zeroamp
from tests.models.small import hf_llama_config
from tests.processes.training import config
from zeroamp.cli.model_source import load_model

FACTORY = """
import torch
from torch import nn

def build():
    return nn.Linear(3, 2)
"""


class DevicesOfResults(TorchDispatchMode):
    """Records on which devices anything is allocated."""

    def __init__(self):
        super().__init__()
        self.devices = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else [result]
        self.devices |= {each.device.type for each in results if isinstance(each, torch.Tensor)}
        return result


def dtypes_and_devices(model):
    return {(parameter.dtype, parameter.device.type) for parameter in model.parameters()}


def folder_of(tmp_path, **entries):
    (tmp_path / "config.json").write_text(json.dumps(entries))
    return tmp_path


def test_a_folder_is_a_causal_language_model_on_meta(tmp_path):
    """A folder is a causal language model on meta in fp32 whatever it was saved in."""
    hf_llama_config(dtype="bfloat16").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    with DevicesOfResults() as seen:
        model = load_model(str(tmp_path))
    assert seen.devices == {"meta"}
    assert type(model).__name__ == "LlamaForCausalLM"
    assert dtypes_and_devices(model) == {(torch.float32, "meta")}


def test_a_folder_that_names_its_architecture_is_that_class(tmp_path):
    """A folder that names its architecture is that class with all parts in fp32."""
    from transformers import CLIPVisionConfig, LlavaConfig

    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=8, patch_size=4
    )
    text = hf_llama_config(dtype="bfloat16")
    both = LlavaConfig(vision_config=vision, text_config=text, architectures=["LlavaForConditionalGeneration"])
    both.save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    assert type(model).__name__ == "LlavaForConditionalGeneration"
    assert dtypes_and_devices(model) == {(torch.float32, "meta")}


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"hidden_size": 8}, "ValueError: Unrecognized model in"),
        ({"model_type": "llama", "hidden_size": "wide"}, "got str|'str' and 'int'"),
        ({"model_type": "llama", "architectures": ["LlamaOfTomorrow"]}, "has no attribute LlamaOfTomorrow"),
    ],
)
def test_a_config_json_that_is_no_model_says_what_is_wrong(tmp_path, entries, words):
    with pytest.raises(zeroamp.WrapError) as raised:
        load_model(str(folder_of(tmp_path, **entries)))
    assert str(raised.value).startswith(f"--model {tmp_path}")
    assert re.search(words, str(raised.value))  # each release of transformers has its own


def test_code_in_a_folder_is_neither_run_nor_asked_about(tmp_path, monkeypatch):
    (tmp_path / "own_code.py").write_text("raise AssertionError('the code ran')")
    folder_of(tmp_path, model_type="own", auto_map={"AutoConfig": "own_code.Own"})
    questions = []
    monkeypatch.setattr("builtins.input", lambda text: questions.append(text) or "y")
    with pytest.raises(
        zeroamp.WrapError, match=r"(?s)contains custom code .* with custom code needs a factory"
    ) as raised:
        load_model(str(tmp_path))
    assert "the code ran" not in str(raised.value)
    assert not questions


def test_a_factory_is_a_module_in_the_current_directory(python_file, tmp_path, monkeypatch):
    python_file("one_package/nets.py", FACTORY)
    monkeypatch.chdir(tmp_path)
    with DevicesOfResults() as seen:
        model = load_model("one_package.nets:build")
    assert isinstance(model, nn.Linear)
    assert seen.devices == {"meta"}


def test_a_factory_is_in_a_file_anywhere_which_finds_its_neighbours(python_file):
    python_file("folder/neighbour.py", FACTORY)
    path = python_file("folder/some_nets.py", "from neighbour import build")
    assert dtypes_and_devices(load_model(f"{path}:build")) == {(torch.float32, "meta")}


def test_a_config_names_the_classes_of_the_file(python_file):
    text = "from torch import nn\nclass Own(nn.Linear): pass\ndef build(): return nn.ModuleList([Own(2, 2), Own(2, 2)])"
    path = python_file("net_file.py", text)
    block = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["net_file.Own"]}
    policy = zeroamp.policy_from_config(config(torch_autocast=block, dtype=None))
    plan = zeroamp.build_plan(load_model(f"{path}:build"), policy)
    assert {param.dtypes.param for param in plan.params} == {torch.bfloat16}
    assert type(load_model(f"{path}:build")[0]) is sys.modules["net_file"].Own  # read once


def test_the_file_itself_runs_with_real_tensors(python_file):
    path = python_file("constants.py", f"{FACTORY}\nWIDTH = int(torch.tensor(5))\nnet = lambda: nn.Linear(WIDTH, 1)")
    assert load_model(f"{path}:net").in_features == 5


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "organisation/model",
            "is no folder and names no function. .* hf download organisation/model config.json --local-dir ",
        ),
        ("some_file.py", r"is no folder and names no function. Write some_file.py:function\.$"),
        (
            "module:",
            "is no folder and names no function. Name a folder with a transformers config.json, or write package.mod",
        ),
        (":factory", "is no folder and names no function. Name a folder"),
        ("no/such.py:build", "must be a folder with a transformers config.json, package.module:function or"),
    ],
)
def test_a_source_that_leads_nowhere_says_what_is_possible(source, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(zeroamp.WrapError, match=f"^--model {re.escape(source)} {words}"):
        load_model(source)


def test_a_folder_without_transformers_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(zeroamp.WrapError, match=r"which is not installed\. Run pip install transformers\."):
        load_model(str(folder_of(tmp_path, model_type="llama")))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import no_such_dependency", "ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("raise SystemExit(2)", "SystemExit: 2"),
        ("def make(): pass", "has no attribute 'build'"),
        ("def built(): pass", "Did you mean 'built'?"),
        ("build = 3", "build is a int, not a function"),
        ("def build(): raise OSError('no weights')", "raised OSError: no weights. "),
        ("def build(width): pass", "raised TypeError: build() missing 1 required positional"),
        ("import torch\ndef build(): torch.ones(1).item()", 'under torch.device("meta")'),
        ("def build(): return {}", "returns a dict"),
    ],
)
def test_a_factory_that_is_none_says_what_is_wrong(python_file, text, words):
    path = python_file("mistake.py", text)
    with pytest.raises(zeroamp.WrapError) as raised:
        load_model(f"{path}:build")
    assert str(raised.value).startswith(f"--model {path}:build")
    assert words in str(raised.value)
