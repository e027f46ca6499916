# Each target does its own set-up in .venv; `make` alone lists them.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
JOBS ?= 2
TORCH ?= torch==2.13.0
READY := $(VENV)/.ready
# As a path, not a finder: else a folder of this name where Python starts, such as a clone's, hides the package.
EDITABLE := --config-settings editable_mode=compat --editable

# Modules are compiled once, and not again by each process that a test starts, whatever the machine says.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help gains sized hazards alarms exactness demo test test-all fuzz lint types conformance conformance-coreai round-trips-coreai conformance-mac equivalence bench bench-decode bench-large placement latency citations residency \
	matrix matrix-real caches notebooks gallery docs dist clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet $(EDITABLE) '.[dev]'
	@touch $@

demo: $(READY)  ## see, fix and prove a small GPT-2 for an iPhone 13
	$(BIN)/python notebooks/demo.py

test: lint types  ## what CI runs: lint, types, tests
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow"

test-all: lint types  ## the slow tests too; every night
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

lint: $(READY)  ## ruff: format and rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)  ## mypy, strict
	$(BIN)/mypy

fuzz: $(READY)  ## models of wrong structure: only errors in words. OPTIONS="--seed 1 --cases 2000", or --case 17
	$(BIN)/python tests/fuzz/structural.py $(OPTIONS)

conformance: $(READY)  ## coremltools' own tests on the interpreter, with the numbers of a Mac
	$(BIN)/python tests/conformance/run.py --both-sources --mutations $(OPTIONS)

conformance-coreai: $(READY)  ## the same tests and random programs on Apple's Core AI runtime: docs/core-ai-agreement.md
	rm -rf build/conformance-coreai
	$(BIN)/python tests/conformance/core_ai_judge.py --page docs/core-ai-agreement.md $(OPTIONS)

round-trips-coreai: $(READY)  ## published, example and random-weight models to Core AI and back. OPTIONS="bert --architectures 9"
	$(BIN)/python tests/conformance/core_ai_whole_models.py $(OPTIONS)

conformance-mac: $(READY)  ## on a Mac: Core ML beside the interpreter, the largest difference for each op
	$(BIN)/python tests/conformance/coreml_difference.py $(OPTIONS)

equivalence: $(READY)  ## every pass on every program that those tests build, compared
	$(BIN)/python tests/conformance/run.py --passes all --suites ops,torch,ml_program,neural_network,network_ops,network_torch --out build/equivalence $(OPTIONS)

bench: $(READY)  ## ratios of time and memory, measured on this machine
	$(BIN)/python tests/benchmarks/recipe.py
	$(BIN)/python tests/benchmarks/interpreter.py

bench-decode: $(READY)  ## tokens of a Llama of 1.1 billion weights with a cache, against torch eager
	$(BIN)/python tests/benchmarks/decoding.py
	$(BIN)/python tests/benchmarks/decoding.py --half

bench-large: $(READY)  ## cutting and merging a model of 3 GB, against cp -r and coremltools
	$(BIN)/python tests/benchmarks/large.py --peers

placement: $(READY)  ## how often inspect is right, against placements measured on Macs: docs/accuracy.md
	$(BIN)/python tests/benchmarks/placement/accuracy.py --page docs/accuracy.md

latency: $(READY)  ## fit times on the Neural Engine to published measurements: docs/latency.md
	$(BIN)/python tests/benchmarks/latency.py --page docs/latency.md $(OPTIONS)

citations: $(READY)  ## what each rule of placement rests on, sentence by sentence
	$(BIN)/python tests/benchmarks/placement/citations.py $(OPTIONS)

residency: $(READY)  ## what `auto` gains on the corpus and on small models of each family, and whether outputs agree
	$(BIN)/python tests/benchmarks/residency.py

matrix: $(READY)  ## which architectures convert, how exact, and their share on the ANE: docs/architectures.md
	$(BIN)/python -m pip install --quiet $(TORCH) $(EDITABLE) '.[dev,matrix]'
	$(BIN)/python tests/benchmarks/matrix.py --page docs/architectures.md

matrix-real: $(READY)  ## the same of two layers of real width, in less than 4 GB each
	$(BIN)/python -m pip install --quiet $(TORCH) $(EDITABLE) '.[dev,matrix]'
	$(BIN)/python tests/benchmarks/matrix.py --real --page docs/architectures.md

caches: $(READY)  ## which families of decoders take a cache: docs/decoder-families.md
	$(BIN)/python tests/benchmarks/caches.py --page docs/decoder-families.md

notebooks: $(READY)  ## run the notebooks and the demonstration, and store what they show
	$(BIN)/jupyter-execute --inplace notebooks/*.ipynb
	$(BIN)/python notebooks/demo.py --svg notebooks/report.svg

gallery: $(READY)  ## each recipe on one small model, before and after: docs/gallery.md
	$(BIN)/python tests/benchmarks/gallery.py --page docs/gallery.md

sized: $(READY)  ## models of many families and published ones at six sizes, and the time: docs/sized-models.md
	$(BIN)/python tests/benchmarks/sized.py --page docs/sized-models.md $(OPTIONS)

hazards: $(READY)  ## what goes wrong in numbers, and what repairs it: docs/hazards.md
	$(BIN)/python tests/support/hazard_page.py --page docs/hazards.md

alarms: $(READY)  ## which numeric findings an input triggers, over all models that there are: docs/alarms.md
	$(BIN)/python tests/benchmarks/alarms.py --page docs/alarms.md

exactness: $(READY)  ## whether `safe_numbers` and `auto` leave the corpus at least as exact
	$(BIN)/python tests/benchmarks/as_exact.py

gains: $(READY)  ## which runs of `auto` and family recipes edit a model for nothing. OPTIONS="--only gpt2 --limit 3"
	$(BIN)/python -m pip install --quiet $(TORCH) $(EDITABLE) '.[dev,matrix]'
	$(BIN)/python tests/benchmarks/for_nothing.py $(OPTIONS)

docs: $(READY)  ## the pages of docs/ with a reference, as HTML in build/docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs

dist: $(READY)  ## wheel and sdist in build/dist, tried in a fresh environment (PYTHON=python3.13 for another)
	rm -rf build/dist
	$(BIN)/python -m build --quiet --outdir build/dist .
	$(BIN)/python tests/support/fresh_environment.py build/dist/*.whl --torch "$(TORCH)" --python $(PYTHON)

clean:  ## remove what the targets made
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
