# One command each; `make help` lists them. The virtual environment is made once and again when the pins change.
PYTHON ?= python3
# Passed to pip, for example an index that has CPU-only builds of torch: PIP_FLAGS="--extra-index-url URL".
PIP_FLAGS ?=
PYTEST_FLAGS ?=
# Test files at one time. Most of them wait for processes more than they compute.
JOBS ?= 4
BY_FILE := --dist loadfile --no-loadscope-reorder
# Files in the order given: those of one long test first, or they would run alone at the end. Each worker takes two files
# at the start, so behind the four longest (chaos, histories) come short ones: what stands behind a history ends last.
ordered = $(1) $(filter-out $(1) tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))
FOLDERS := $(call ordered,tests/sim tests/chaos)
LONG_FOLDERS := $(call ordered,tests/chaos tests/histories tests/unit tests/soak tests/integration)
# make chaos: kills, and their seed (default: a new one, printed).
KILLS ?= 200
SEED ?=
# make fuzz: how long; SEED as above.
SECONDS ?= 60
# make sim: histories, events in each, the first seed.
SEEDS ?= 100
EVENTS ?= 2000
FIRST ?= 0
# make soak: minutes.
MINUTES ?= 60

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)
NUMPY := $(shell sed -n 's/^\(numpy==[^ ]*\).*/\1/p' constraints.txt)

# Many images set it to stay small. Here it would compile the whole package anew in each of the hundreds of processes
# that the tests start: half of their computing.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-long test-vllm sim chaos soak fuzz check bench bench-peers protos docs dist gpu-test gpu-bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1#\2/p' $(MAKEFILE_LIST) | awk -F'#' '{printf "%-18s %s\n", $$1, $$2}'

venv: $(STAMP) ## make .venv with the pinned packages (skipped while the pins are unchanged)

# torch first and pinned: resolved freely, it or nixl-cu13 would pull a CUDA stack of several GB.
$(STAMP): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or later is needed: make venv PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -n "$(TORCH)" && test -n "$(NUMPY)"
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt $(TORCH) $(NUMPY)
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[test,dev]'
	touch $(STAMP)

demo: $(STAMP) ## replay real agent sessions through a prefill and a decode node on this machine
	$(BIN)/kvmanager demo

test: $(STAMP) ## the default tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) $(BY_FILE) $(FOLDERS) $(PYTEST_FLAGS)

test-long: $(STAMP) ## the tests that take minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m long -n 4 $(BY_FILE) --durations=12 $(LONG_FOLDERS) $(PYTEST_FLAGS) || { \
	  rc=$$?; test $$rc -ne 5 || echo "make test-long: no test is marked long, so nothing was tested" >&2; exit $$rc; }

test-vllm: $(STAMP) ## a real vLLM engine as a client (its environment is made once: minutes, 2.5 GB)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m vllm -s tests/vllm $(PYTEST_FLAGS)

sim: $(STAMP) ## seeded histories of the core: SEEDS=300 EVENTS=2000 FIRST=0
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sim --seeds $(SEEDS) --events $(EVENTS) --first $(FIRST)

soak: $(STAMP) ## replayed sessions on two nodes under random kills: MINUTES=60 SEED=7
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

bench-peers: $(STAMP) ## beside LMCache and Mooncake, each in its own environment (made once: minutes, 2.2 GB)
	mkdir -p build
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.peers --json build/peers.json

chaos: $(STAMP) ## two real nodes and their engines under random kills: KILLS=200 SEED=7
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos --kills $(KILLS) $(if $(SEED),--seed $(SEED))

fuzz: $(STAMP) ## noise on every socket of a real node: SECONDS=60 SEED=7
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

check: $(STAMP) ## ruff, mypy --strict and the layout of the repository
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_repository.py

bench: $(STAMP) ## one line a figure; the same as JSON in build/bench.json
	mkdir -p build
	$(BIN)/python -m tests.bench --json build/bench.json

protos: $(STAMP) ## regenerate the code in protos/ from kvmanager.proto
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos --python_out=protos --grpc_python_out=protos --mypy_out=protos protos/kvmanager.proto
	sed -i 's/^import kvmanager_pb2 as/from kvmanager.protos import kvmanager_pb2 as/' protos/kvmanager_pb2_grpc.py

docs: $(STAMP) ## regenerate docs/api.md from kvmanager.proto
	$(BIN)/python -m tests.apidoc > docs/api.md

# What setuptools copied for an earlier wheel (build/lib) would be packed again, also files that are gone since.
dist: $(STAMP) ## a wheel and a source archive in build/dist
	rm -rf build/dist build/lib build/bdist.*
	$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("build/dist")' >/dev/null
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation --no-index -w build/dist build/dist/*.tar.gz
	ls -l build/dist

gpu-test: $(STAMP) ## the tests that need an NVIDIA GPU
	PYTHON=$(BIN)/python tests/gpu.sh test

gpu-bench: $(STAMP) ## the benchmarks that need an NVIDIA GPU
	PYTHON=$(BIN)/python tests/gpu.sh bench

clean: ## remove what was made here, the environment included
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
