"""The checkpoints of tests/data/deepspeed, and what DeepSpeed said is in each."""

import json
from pathlib import Path

from safetensors.torch import load_file

DATA = Path(__file__).parents[2] / "data" / "deepspeed"
CASES = sorted(path.name for path in DATA.iterdir() if path.is_dir())
TRAINED = [name for name in CASES if not name.startswith("stage0")]


def expected(case, kind):
    """Parameter name -> what DeepSpeed's accessors returned: kind is fp32, exp_avg or exp_avg_sq."""
    tensors = load_file(DATA / case / "expected.safetensors")
    return {name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{kind}/")}


def facts(case):
    return json.loads((DATA / case / "expected.json").read_text())
