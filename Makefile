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
.PHONY: help demo test test-fast test-guards durations lint format check faults matrix ledger mirror measure links type-errors inserted constraints performance studies plans gpu-bench gpu-day lessons docs clean

help:  ## what there is to make
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 11

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --constraint constraints.txt --editable '.[test]'
	@touch $@

demo: $(READY)  ## one experiment, every engine: a verdict, a table and a report, in about a minute
	$(BIN)/shardpair run demo

test: $(READY)  ## every test, in about 14 minutes on two cores
	$(PYTEST) $(WORKERS)

test-fast: $(READY)  ## the quick tests, which start no engine, compile no step and run no ranks: a minute
	$(PYTEST) 2 -m "not slow"

test-guards: $(READY)  ## the guards of torchpar: wrappers around modules and loops that no engine has
	$(PYTEST) 2 tests/torchpar/guards

durations: $(READY)  ## every test, and how long each took: tests/durations.json, which says what test-fast leaves out
	$(PYTEST) $(WORKERS) --record_durations

lint: $(READY)  ## ruff and ty
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check --python $(VENV)

format: $(READY)  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: $(READY)  ## every engine and gradient synchronisation against one unsharded device, in float64
	$(BIN)/shardpair check

faults: $(READY)  ## plant every known mistake; the ladder must catch each at its rung
	$(BIN)/shardpair faults

matrix: $(READY)  ## every layout on every engine against one device; docs/generated/parity.md
	$(BIN)/shardpair matrix --output docs/generated/parity.md

ledger: $(READY)  ## what every engine sends under every layout, beside the closed form; docs/generated/ledger.md
	$(BIN)/shardpair ledger check --presets all --fail_on_unexpected --output docs/generated/ledger.md

mirror: $(READY)  ## lines of code of each strategy in each engine, alone and with its helpers
	$(BIN)/shardpair mirror

measure: $(READY)  ## check, golden and faults anew, and their errors into docs/data
	$(BIN)/python docs/studies.py proofs

links: $(READY)  ## strategies over a slow link between two hosts, as root on an idle machine: half an hour
	$(BIN)/python docs/links.py
	$(BIN)/python docs/link_collectives.py
	$(BIN)/python docs/make_docs.py

type-errors: $(READY)  ## planted mistakes of sharding, and who says something; docs/data/type_errors.json
	$(BIN)/python docs/type_errors.py
	$(BIN)/python docs/make_docs.py

inserted: $(READY)  ## what each compiler inserts, beside what is written by hand; docs/data/inserted.json
	$(BIN)/python docs/inserted.py
	$(BIN)/python docs/make_docs.py

constraints: $(READY)  ## what one constraint more or less costs under XLA; docs/data/constraints.json
	$(BIN)/python docs/constraints.py
	$(BIN)/python docs/make_docs.py

performance: $(READY)  ## the benches of docs/performance.md anew, on an idle machine: hours; docs/data/*.json
	$(BIN)/python docs/studies.py benches
	$(BIN)/shardpair collectives --ranks 2 4 --max_size 16M --picture docs/collectives.png
	$(BIN)/shardpair buckets baby-gpt --model.block_size 128 --train.batch_size 4 --bucket_mb 1 2.5 10 25 --picture docs/buckets.png
	$(BIN)/python docs/make_docs.py

studies: $(READY)  ## the studies that the docs show, or those of NAMES; docs/data/*.json
	$(BIN)/python docs/studies.py $(NAMES)
	$(BIN)/python docs/make_docs.py

plans: $(READY)  ## the plans that docs/plan.md shows, in two minutes, without an accelerator; docs/data/plans.json
	$(BIN)/python docs/plans.py
	$(BIN)/python docs/make_docs.py

LESSONS := data_parallel fully_sharded tensor_parallel pipeline_parallel

lessons: $(READY)  ## the four lessons, from the tree and from real runs: docs/lessons/*.html
	mkdir -p docs/lessons
	for strategy in $(LESSONS); do \
		$(BIN)/shardpair lesson $$strategy --output docs/lessons/$$strategy.html --no_open || exit; \
	done

docs: $(READY)  ## write the generated numbers and tables into README.md and docs/*.md
	$(BIN)/python docs/make_docs.py

GPUS ?= $(shell nvidia-smi --list-gpus 2>/dev/null | wc -l | sed s/^0$$/1/)
GPU_CASES := $(if $(filter 1,$(GPUS)),single --baseline nanogpt-loop --engines nanogpt-loop \
	nanogpt-loop-compiled torch-manual plain-jit jax-compiler jax-manual,ddp zero1 fsdp)
GPU_BENCH := --platform gpu --data.source synthetic --train.gradient_accumulation_steps 1 \
	--devices $(GPUS) --presets $(GPU_CASES)

gpu-bench: $(READY)  ## GPT-2 124M and 350M in bfloat16 on every GPU, timed; on one beside nanoGPT's loop (GPUS=1)
	$(BIN)/shardpair bench gpt2-124m $(GPU_BENCH) --train.batch_size $$((12 * $(GPUS)))
	$(BIN)/shardpair bench gpt2-350m $(GPU_BENCH) --train.batch_size $$((6 * $(GPUS)))

gpu-day: $(READY)  ## all that wants a GPU, in one go, resumable: proofs, ledger, profile, memory, benches (STEPS=--dry_run)
	$(BIN)/python docs/gpu_day.py $(STEPS)
	$(BIN)/python docs/gpu_attention.py

clean:  ## remove the environment and the results
	rm -rf $(VENV) runs
