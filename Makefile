# `make demo` and `make test` need Python 3.11 or newer and nothing else.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test tables data docs lint clean

demo: .venv/.demo
	$(BIN)/python run.py $(ARGS)

test: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m "not gpu" $(ARGS)

tables: .venv/.demo
	$(BIN)/python -m experiments.tables $(ARGS)
	$(BIN)/python -m experiments.figures $(ARGS)

data: .venv/.dev
	$(BIN)/python -m experiments.prefetch $(ARGS)

docs: .venv/.dev
	$(BIN)/pdoc wide experiments wide_kernels -o site

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed (python3 --version)"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.demo: .venv/bin/python pyproject.toml constraints.txt requirements-demo.txt
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e ".[demo]"
	$(PIP) --no-deps -r requirements-demo.txt
	@touch $@

.venv/.dev: .venv/.demo
	$(PIP) -c constraints.txt -e ".[demo,eval,dev]"
	@touch $@

clean:
	rm -rf .venv
