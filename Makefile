# The commands: `make demo`, `make test` and `make docs`. Each makes .venv from the pins and runs.
PYTHON ?= python3
BIN := .venv/bin
# One thread per process: these networks are small, and synchronising threads costs more than it gains.
export OMP_NUM_THREADS ?= 1
# As an environment variable, the pins also apply to what builds the package.
PIP := PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo test test-long lint docs bench soak clean

demo: .venv/demo-ready
	$(BIN)/mmlda demo --out demo

# Two test files at a time; the tests of a file stay together, since they share the networks it trains.
test: .venv/test-ready lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Only the tests marked long; `make test` runs the others.
test-long: .venv/test-ready .venv/ray-ready
	$(BIN)/python -m pytest -m long -n 2 --dist loadfile

lint: .venv/test-ready
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site, with warnings as errors. The report takes the place of its placeholder page.
docs: .venv/docs-ready
	rm -rf site
	$(BIN)/python -m sphinx -b html -W --keep-going -q -d build/doctrees docs site
	$(BIN)/mmlda report results -o site/report.html
	@echo "open site/index.html"

# Ours beside other libraries. torchattacks requires another torch, so it is installed without its dependencies.
bench: .venv/bench-ready
	$(BIN)/python benchmarks/imports.py
	$(BIN)/python benchmarks/means.py
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/head.py
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/training.py --device cpu
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/attacks.py --device cpu

# Promises about untrusted input, at scale: minutes to hours. Its figures are committed.
soak: .venv/test-ready
	$(BIN)/python tools/soak.py files --out benchmarks/results/soak/files.json
	$(BIN)/python tools/soak.py kills --out benchmarks/results/soak/kills.json
	$(BIN)/python tools/soak_networks.py

.venv/demo-ready: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'mmlda needs Python 3.11 or newer')"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) -e .
	touch $@

.venv/docs-ready: .venv/demo-ready
	$(PIP) -e .[docs]
	touch $@

.venv/test-ready: .venv/docs-ready
	$(PIP) -e .[test]
	touch $@

.venv/ray-ready: .venv/test-ready
	$(PIP) -e .[ray]
	touch $@

.venv/bench-ready: .venv/test-ready
	$(PIP) --no-deps torchattacks==3.5.1
	touch $@

clean:
	rm -rf .venv build dist demo site src/*.egg-info
