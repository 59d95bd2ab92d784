PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
TORCH ?=
SEED ?= 0
THREADS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
PINS := $(wildcard $(CONSTRAINTS))
DEMO := demo$(if $(filter-out 0,$(SEED)),-seed$(SEED))

.DEFAULT_GOAL := help
.PHONY: help env test test-fast lint demo recipes bench clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST))

env: $(STAMP)  ## .venv with the package and its tools (PYTHON=, TORCH="torch==...", CONSTRAINTS= choose others)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# A torch that is already in .venv, or named in TORCH, wins over the pinned one.
$(STAMP): pyproject.toml $(PINS) | $(BIN)/python
	$(if $(TORCH),$(PIP) install $(TORCH))
	if $(PIP) show --quiet torch 2>/dev/null; then drop='/^torch/d'; else drop=; fi; \
	  sed "$$drop" $(PINS) /dev/null > $(VENV)/constraints.txt
	$(PIP) install --quiet --constraint $(VENV)/constraints.txt --editable '.[dev]'
	touch $@

test: $(STAMP)  ## every test
	$(BIN)/pytest -n 2

test-fast: $(STAMP)  ## the tests that take no more than a few seconds each
	$(BIN)/pytest -n 2 -m "not slow"

lint: $(STAMP)  ## style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

demo: $(STAMP)  ## train and evaluate the embedded model on the CPU; SEED=1 writes runs/demo-seed1
	@if [ -e runs/$(DEMO) ]; then \
	  echo "runs/$(DEMO) is kept as runs/$(DEMO).previous"; \
	  rm -rf runs/$(DEMO).previous; mv runs/$(DEMO) runs/$(DEMO).previous; \
	fi
	$(BIN)/accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
	  --num_cpu_threads_per_process $(THREADS) scripts/train.py configs/shapes/demo.yaml run=$(DEMO) seed=$(SEED)
	$(BIN)/flowrl eval runs/$(DEMO)

recipes: $(STAMP)  ## train and evaluate every recipe of configs/shapes at three seeds (hours)
	$(BIN)/python scripts/recipes.py

bench: $(STAMP)  ## time one training step
	$(BIN)/flowrl bench step shapes/flow_grpo

clean:  ## build products and caches; .venv and runs stay
	rm -rf build dist *.egg-info .ruff_cache .pytest_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
