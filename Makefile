# `make test` and `make demo` are all that a fresh checkout needs: Python >= 3.10 and a C++ compiler.

PY ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := OMP_NUM_THREADS=1 $(BIN)/python

TORCH := torch==2.13.0
# From the index, because a fresh machine may have neither.
BUILD_TOOLS := scikit-build-core cmake ninja

TOOLS := $(VENV)/.tools
INSTALLED := $(VENV)/.installed
NATIVE := pyproject.toml $(wildcard fddp/csrc/*)

.PHONY: test demo lint bench clean

test: lint
	$(RUN) -m pytest

demo: $(INSTALLED)
	$(BIN)/python -m fddp demo

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(RUN) -m fddp.bench
	$(RUN) -m fddp.bench.alone
	$(RUN) -m fddp.bench.simulated

clean:
	rm -rf $(VENV) build dist

$(TOOLS): Makefile
	$(PY) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)" $(BUILD_TOOLS)
	touch $@

# An editable installation takes Python files as they are; C++ has to be built again.
$(INSTALLED): $(TOOLS) $(NATIVE)
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[dev]"
	touch $@
