# make demo    capture a prompt with the shipped model
# make test    the test suite (CPU only)
PYTHON ?= python3
BIN := .venv/bin
# one thread per test worker: with more, OpenMP teams fight for the cores
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test test-slow check bench
demo: .venv/.installed
	$(BIN)/dsv4dbg capture --prompt "The capital of France is" --decode 4

test: .venv/.tests
	$(TEST)

test-slow: .venv/.tests
	$(TEST) -m slow --timeout 3600

check: .venv/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: .venv/.installed
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dsv4dbg needs Python 3.11 or newer: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cpu]'
	touch $@

.venv/.tests: .venv/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cpu,test]'
	touch $@

.venv/.check: .venv/.tests
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cpu,test,check]'
	touch $@
