# Everything on a fresh machine with Python 3.11+ and make: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
# 1: the demo runs the checkout (pip install --editable).  0: it runs what a user of a wheel gets.
EDITABLE ?= 1
# The torch to install: anything pip takes, such as torch==2.13.0 or a wheel.  Left empty, a CPU build where
# there is no card and pip sees one, else what pip finds.
TORCH ?=
# Passed on to examples/lora_finetune.py and to pytest.
DEMO_ARGS ?=
PYTEST_ARGS ?=
# Processes that run tests.  Most tests start several ranks each, so more processes than cores only wait.
TEST_PROCESSES ?= 2
# Passed on to benchmarks/ (python -m benchmarks --help) and benchmarks/gpu/.
BENCH_ARGS ?=
GPU_ARGS ?=
# What runs on the card.  A bare machine's own Python has a torch for its driver, and no network to fetch one.
GPU_PYTHON ?= $(PYTHON)
# Passed on to benchmarks/versions (python -m benchmarks.versions --help).
VERSIONS_ARGS ?=
# Passed on to tests/peers (python -m tests.peers --help).
PEERS_ARGS ?=

BIN := $(VENV)/bin
STAMPS := $(VENV)/.fcdp
CHOSEN := $(STAMPS)/torch-$(if $(TORCH),$(firstword $(shell printf %s '$(TORCH)' | cksum)),any)
MODE := $(if $(filter 0,$(EDITABLE)),regular,editable)
# Tests of one file share what their fixtures train, so a file stays in one process.
PARALLEL := --numprocesses=$(TEST_PROCESSES) --dist=loadfile --no-loadscope-reorder
SOURCES := $(shell find fcdp_compile passes runtime -name '*.py' 2>/dev/null)

# Four ranks on few cores: more threads a rank would only take turns.
export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes.  Without bytecode on disk, each compiles all of the source again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-rare test-all bench gpu versions peers release-check docs lint format types clean
# Two pips must not write to one environment at a time.
.NOTPARALLEL:

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMPS)/$(MODE)-examples  ## fine-tune with LoRA on 2 x 2 simulated ranks
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node=4 \
	    examples/lora_finetune.py --nodes 2 $(DEMO_ARGS)

# Always the checkout: Python started here imports fcdp_compile from this folder, and only the editable
# install's finder adds passes/ and runtime/ to it.
test: $(STAMPS)/editable-test  ## run the tests, but for those marked slow or rare
	$(BIN)/python -m pytest -m "not slow and not rare" $(PARALLEL) $(PYTEST_ARGS)

test-slow: $(STAMPS)/editable-test  ## run the tests marked slow; PYTEST_ARGS="--part 0/5" runs a fifth
	$(BIN)/python -m pytest -m slow $(PARALLEL) $(PYTEST_ARGS)

test-rare: $(STAMPS)/editable-test  ## run the tests marked rare, which take hours
	$(BIN)/python -m pytest -m rare $(PARALLEL) $(PYTEST_ARGS)

test-all: $(STAMPS)/editable-test  ## run all tests
	$(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

# What it needs is checked before anything big is installed.
bench: | $(BIN)/python  ## measure against other systems on simulated nodes; needs root and iproute2
	@$(BIN)/python -m benchmarks.launch
	@$(MAKE) --no-print-directory $(STAMPS)/editable-bench $(STAMPS)/deepspeed
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

# Nothing is fetched or installed: the machine has torch, and may have no network and no usable pip.
gpu:  ## run what one CUDA GPU can show, in ten minutes, into docs/gpu.md
	$(GPU_PYTHON) -m benchmarks.gpu $(GPU_ARGS)

# Not part of CI: hours, and gigabytes for each torch that has no CPU build.
versions: | $(BIN)/python  ## try the supported versions of torch and Python; writes docs/versions.md
	$(BIN)/python -m benchmarks.versions $(VERSIONS_ARGS)

# Not part of CI: about an hour.  pip downloads the sources of suites that are in no wheel.
peers: $(STAMPS)/editable-test  ## run other projects' test suites; writes docs/peers.md
	$(BIN)/python -m tests.peers $(PEERS_ARGS)

# Nothing is downloaded: the environment of the tests lends torch and the rest.
release-check: $(STAMPS)/editable-test  ## build wheel and sdist, and try them outside of the repository
	$(BIN)/python -m tests.release.check

docs: $(STAMPS)/editable-docs  ## build the documentation into build/site
	$(BIN)/python -m zensical build --strict --clean

lint: $(STAMPS)/editable-dev  ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMPS)/editable-dev  ## repair style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# See [Note: types of the installed package] in pyproject.toml.  build/ goes first, because setuptools
# would install what an earlier build left there and has since been deleted.
types: $(STAMPS)/editable-dev  ## check types, on the installed package
	rm -rf build
	$(BIN)/python -m pip install --quiet --no-deps --target build/installed .
	cd build/installed && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml \
	    --cache-dir $(CURDIR)/.mypy_cache -p fcdp_compile

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo '$(PYTHON) is not Python 3.11 or newer; use make PYTHON=...' >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# Before anything else, because pip keeps a torch that is there.  One stamp per torch that was asked for.
$(CHOSEN): pyproject.toml | $(BIN)/python
	$(BIN)/python -m benchmarks.versions.torch_build '$(TORCH)'
	@mkdir -p $(STAMPS) && rm -f $(STAMPS)/torch-* && touch $@

# One stamp per way of installing and extra; whoever installs takes back the stamps of the other way.
# torch's range is part of every install, so no extra can pull in another torch.
$(STAMPS)/editable-%: pyproject.toml | $(CHOSEN)
	$(BIN)/python -m pip install --editable '.[$*]'
	@mkdir -p $(STAMPS) && rm -f $(STAMPS)/regular-* && touch $@

$(STAMPS)/regular-%: pyproject.toml $(SOURCES) | $(CHOSEN)
	rm -rf build
	$(BIN)/python -m pip install '.[$*]'
	@mkdir -p $(STAMPS) && rm -f $(STAMPS)/editable-* && touch $@

# Where DeepSpeed cannot be built, the benchmark goes on and the report says so.  Its build needs the torch
# that is here, hence no isolation.
$(STAMPS)/deepspeed: $(STAMPS)/editable-bench
	$(BIN)/python -m pip install setuptools wheel
	$(BIN)/python -m pip install --no-build-isolation --editable '.[bench-deepspeed]' \
	    || echo 'DeepSpeed could not be installed; its rows will be missing' >&2
	@touch $@
