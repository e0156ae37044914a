# Two commands matter: `make verify` (the main job) and `make test` (everything a change must pass).
# Both create .venv on first use and are safe to run again; nothing outside this folder is written.
#   PYTHON=python3.12     another interpreter (3.10 or newer)
#   TORCH='torch==2.12.0' another torch; an empty value keeps the one that .venv already has
#   PYTEST='tests/unit'   only these tests
SHELL := /bin/bash
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
PYTEST ?=
BIN := $(VENV)/bin
NATIVE := $(wildcard CMakeLists.txt) $(shell find csrc -type f 2>/dev/null)
export PYTHON TORCH VENV
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# the theme prints an advertisement about its own future otherwise
export NO_MKDOCS_2_WARNING := 1

.PHONY: help verify test lint types docs unit coverage simd sanitize mi50 gpu changelog clean
.DELETE_ON_ERROR:

help:
	@sed -n '/^[a-z0-9]*:.*##/s/:.*##/\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

$(VENV)/.ready-%: pyproject.toml tools/environment.sh $(NATIVE)
	tools/environment.sh $*
	touch $@

verify: $(VENV)/.ready-run ## environment, install, the named cases and the real model; says where the report is
	$(BIN)/attnproof verify --quick
	$(BIN)/attnproof verify --real

test: lint types docs unit ## environment, install, linters, types, documentation, all tests

lint: $(VENV)/.ready-test ## ruff, codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

types: $(VENV)/.ready-test ## pyright, strict on host code
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.ready-test ## the documentation site, every warning an error
	$(BIN)/mkdocs build --strict --quiet --site-dir site

unit: $(VENV)/.ready-test ## pytest, all of it or what PYTEST selects
	$(BIN)/python -m pytest $(PYTEST)

coverage: $(VENV)/.ready-test ## all tests under coverage, and the bar of 95% of lines
	$(BIN)/python -m pytest --cov --cov-report=json:.coverage.json
	$(BIN)/python tools/coverage_bar.py .coverage.json

simd: $(VENV)/.ready-test ## tests of the native backend on the SIMD targets that `unit` did not choose, each forced in turn
	set -e; for simd in $$($(BIN)/python -c "from attnproof.backends.native import loader; now = loader.describe(); print(*(t for t in now['usable'] if t != now['simd']))"); do \
	  echo "ATTNPROOF_SIMD=$$simd"; \
	  ATTNPROOF_SIMD=$$simd $(BIN)/python -m pytest -q tests/unit/test_native.py tests/parity -k native; \
	done

sanitize: $(VENV)/.ready-test ## the same under the address and undefined-behaviour sanitizers
	PYTHON=$(abspath $(BIN)/python) tools/sanitize_native.sh

mi50: $(VENV)/.ready-test ## backend dot2 without an AMD GPU: compile records, compiled gfx906 code on the interpreter, planted mistakes
	$(BIN)/python -m pytest tests/mi50 -rs

gpu: ## on a machine with CUDA or ROCm and torch installed: device tests and measurements, records under results/
	$(PYTHON) tools/gpu.py

changelog: $(VENV)/.ready-test ## what the next release's notes would say
	$(BIN)/towncrier build --draft --version next

clean: ## remove what these commands made
	rm -rf $(VENV) build site .coverage .coverage.json .pytest_cache .ruff_cache .hypothesis
