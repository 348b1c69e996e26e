# The two commands that matter: `make demo` and `make test`. All work is done by the scripts in
# scripts/; each target sets up what it needs first and skips what is up to date.

PYTHON ?= python3
setup := $(PYTHON) scripts/setup_environment.py
inside := scripts/in_environment

.PHONY: help setup demo test try soak coverage lint parameters api clean python

help:   ## list the targets and variables
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)
	@echo "Variables: ROS_WHEELS=kilted|jazzy  TORCH_INDEX_URL=...  PYTHON=python3  NUMPY=..."

setup: python   ## prepare .venv/ and install/
	@$(setup)

demo: setup   ## start the node, ask it something, show the answer and what the drafts did
	@$(inside) python -m memspec_ros.demo

test: lint   ## lint, then run the whole test suite
	@$(inside) python -m pytest

try: python   ## lint and test what is committed on another ROS 2, Python or numpy, in a clone
	@scripts/try_distribution

soak: setup   ## 10,000 goals, 100 lifecycle cycles, faults and signals: an hour and more
	@$(inside) python test/ros/soak.py --output soak.json

# Measuring takes a third more time, so continuous integration measures where decisions are made.
# All of it: make coverage COVERED=src TESTS=test (what runs in the node's process is not seen).
COVERED ?= src/memspec_core/residency src/memspec_core/strategies
TESTS ?= $(addprefix test/core/test_,cache.py ledger.py loader.py pressure.py available.py planning.py \
	memspec.py bandit.py utility.py)

coverage: python   ## measure how much of the policies their tests run
	@$(setup) --dev
	@$(inside) python -m pytest -q $(addprefix --cov=,$(COVERED)) --cov-branch $(TESTS)

lint: python   ## ruff and mypy
	@$(setup) --dev
	@$(inside) ruff check .
	@$(inside) ruff format --check .
	@$(inside) mypy

parameters: setup   ## write docs/parameters.md from the declarations
	@$(inside) python scripts/document_parameters.py

api: python   ## build the API reference in build/api
	@$(setup) --dev
	@$(inside) python -W error::UserWarning scripts/document_api.py

clean:   ## remove all that was made here
	rm -rf .venv build install log .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -rf src/*.egg-info
	find src test launch scripts -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

python:
	@command -v $(PYTHON) >/dev/null || { echo "missing: python3. Install with:" \
	  "sudo apt-get install -y python3 python3-venv python3-dev g++" >&2; exit 1; }
