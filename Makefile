# Every target builds .venv first if it has to, from nothing but python3 and pip.
# A CPU build of PyTorch instead of the CUDA one: make demo PIP_FLAGS="--extra-index-url URL", with the
# URL of PyTorch's CPU index from pytorch.org, "Get started".
PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
# One more than two cores have work for: tests that wait for a time-out or a kill leave theirs idle.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest --dist worksteal --numprocesses

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast lint format check mutations docs lessons clean

help:  ## what there is to make
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 11

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --constraint constraints.txt --editable '.[test]'
	@touch $@

demo: $(READY)  ## one experiment, every engine: a verdict, a table and a report, in about a minute
	$(BIN)/shardpair run demo

test: $(READY)  ## every test
	$(PYTEST) $(WORKERS)

test-fast: $(READY)  ## tests that start no engine and import no framework: 30 s on 2 cores
	$(PYTEST) 2 -m "not slow" --ignore tests/jaxpar --ignore tests/torchpar

lint: $(READY)  ## ruff and ty
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check --python $(VENV)

format: $(READY)  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: $(READY)  ## every layout on every engine against one device; docs/generated/parity.md
	$(BIN)/shardpair check --presets all --variants all --output docs/generated/parity.md

mutations: $(READY)  ## plant each known mistake in the code; the tests must turn red: nightly
	$(BIN)/python tests/mutations.py

docs: $(READY)  ## tables, outputs and pictures of the documentation, from the code and real runs
	$(BIN)/python docs/make_docs.py
	$(BIN)/python docs/console.py
	$(BIN)/python docs/pictures.py

LESSONS := data_parallel fully_sharded tensor_parallel context_parallel expert_parallel pipeline_parallel

lessons: $(READY)  ## the lessons, from the tree and from real runs: docs/lessons/*.html
	mkdir -p docs/lessons
	for strategy in $(LESSONS); do \
		$(BIN)/shardpair lesson $$strategy --output docs/lessons/$$strategy.html || exit; \
	done

clean:  ## remove the environment and the results
	rm -rf $(VENV) runs
