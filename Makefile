# The two commands: `make demo` and `make test`. Each makes .venv from the pins and runs.
PYTHON ?= python3
BIN := .venv/bin
# One thread a process: these networks are small, and threads that wait for each other cost more than they bring.
export OMP_NUM_THREADS ?= 1
# In the environment the pins also hold for what builds the package.
PIP := PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo test test-long lint bench clean

demo: .venv/demo-ready
	$(BIN)/mmlda demo --out demo

# Two files of tests at a time; a file's tests stay together, since they share the networks it trains.
test: .venv/test-ready lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

# The long-marked tests alone: the short ones are `make test`'s.
test-long: .venv/test-ready .venv/ray-ready
	$(BIN)/python -m pytest -m long -n 2 --dist loadfile

lint: .venv/test-ready
	$(BIN)/ruff check .
	$(BIN)/mypy

# The peers the benchmarks run beside us. torchattacks asks for another torch, so it comes without its dependencies.
bench: .venv/bench-ready
	$(BIN)/python benchmarks/imports.py
	$(BIN)/python benchmarks/means.py
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/head.py
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/training.py --device cpu
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/attacks.py --device cpu

.venv/demo-ready: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'mmlda needs Python 3.11 or newer')"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) -e .
	touch $@

.venv/test-ready: .venv/demo-ready
	$(PIP) -e .[test]
	touch $@

.venv/ray-ready: .venv/test-ready
	$(PIP) -e .[ray]
	touch $@

.venv/bench-ready: .venv/test-ready
	$(PIP) --no-deps torchattacks==3.5.1
	touch $@

clean:
	rm -rf .venv build dist demo src/*.egg-info
