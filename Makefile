# make run    the first sweep, in a fresh environment            make check   format, lint, types, layout
# make test   the test suite                                     make test-slow   the tests that take minutes
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test test-slow check install

run: $(STAMP)
	$(BIN)/python -m experiments run sweeps/heads.yaml

test: $(STAMP)
	$(BIN)/python -m pytest -n 2

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m 'slow and not timed' -n 2
	$(BIN)/python -m pytest -m timed

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layout.py

install: $(STAMP)

# torch first: under the constraint it is one exact version, and what depends on it then asks for no other.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "needs Python 3.11 or newer, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[all]'
	touch $@
