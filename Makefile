# `make` lists the targets. Everything is installed into .venv.

VENV := .venv
PYTHON ?= python3 python3.14 python3.13 python3.12 python3.11
ARGS ?=
# Test processes. Each uses one thread, because threads that wait for each other slow the others down, and each reads
# the compiled tests of the last run, which takes half the time of compiling them.
WORKERS ?= auto
STAMPS := $(VENV)/.runtime $(VENV)/.dev $(VENV)/.docs

.PHONY: help setup demo test check bench gpu results pictures clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@echo "make TARGET, where TARGET is one of"
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  \1\t\2/' | expand -t 10

setup: $(VENV)/.dev  ## install Unspool and the developer tools into .venv

demo: $(VENV)/.runtime  ## extend the shipped model from 256 to 2K tokens, evaluate it, write the report
	@began=$$(date +%s); \
	$(VENV)/bin/unspool run tiny $(ARGS) && echo "demo: $$(( $$(date +%s) - began )) s"

test: $(VENV)/.dev  ## run the tests; ARGS="tests/data -x" for some of them, ARGS="-m slow" for the slow ones
	@OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

check: $(VENV)/.dev  ## lint, formatting, types, import order, age of the GPU result
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest tests/test_imports.py
	@$(VENV)/bin/python benchmarks/gate.py --check

.PHONY: docs
docs: $(VENV)/.docs  ## build the documentation site into site/
	@began=$$(date +%s); \
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict && echo "docs: site/index.html, $$(( $$(date +%s) - began )) s"

bench: $(VENV)/.dev  ## run the benchmarks; those that need a GPU say so where there is none
	@ran=; for file in $(filter-out %/gate.py %/gate_faults.py %/train_columns.py %/simulated_rank.py %/neighbor.py,$(wildcard benchmarks/*.py)); do \
	  [ -f "$$file" ] || continue; \
	  ran=yes; echo "== $$file"; $(VENV)/bin/python "$$file" $(ARGS) || [ $$? -eq 2 ] || exit 1; \
	done; \
	[ -n "$$ran" ] || echo "There are no benchmarks yet: benchmarks/ holds no Python file."

gpu: $(VENV)/.dev  ## run the GPU gate, on a machine with a GPU
	$(VENV)/bin/python benchmarks/gate.py --commit $$(git rev-parse HEAD) $(ARGS)

results: $(VENV)/.dev  ## write the tables and figures of docs/results from the committed answers; ARGS=--check compares
	@$(VENV)/bin/python tools/results.py $(ARGS)

pictures: $(VENV)/.dev  ## draw the pictures of docs/concepts again
	@$(VENV)/bin/python tools/pictures.py $(ARGS)

clean:  ## remove .venv, caches and build output; runs/ stays
	rm -rf $(VENV) dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp per kind of installation; it is remade only when the requirements change. -qq prints only errors.
# A .venv without pip is a failed attempt and is recreated.
$(VENV)/.dev: EXTRA := [dev]
$(VENV)/.docs: EXTRA := [docs]
$(STAMPS): pyproject.toml constraints.txt
	@began=$$(date +%s); \
	if [ ! -x $(VENV)/bin/pip ]; then \
	  for python in $(PYTHON) ""; do \
	    [ -z "$$python" ] || ! $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || break; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo "Unspool needs Python 3.11 or newer; none of these is: $(PYTHON). Set PYTHON=/path/to/python." >&2; \
	    exit 1; \
	  fi; \
	  $$python -m venv --clear $(VENV) || exit 1; \
	fi; \
	echo "setup: installing into $(VENV); the first time takes a minute or more"; \
	$(VENV)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.$(EXTRA)' || exit 1; \
	touch $(VENV)/.runtime $@; \
	echo "setup: $$(( $$(date +%s) - began )) s"
