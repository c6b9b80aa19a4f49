# Every target does its own set-up from a fresh clone. `make help` lists them.
.DEFAULT_GOAL := help
VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch
BUILD ?= build
JOBS ?= $(shell nproc)
PEERS ?= .venv-peers
# What users of the patch layer have; `make test` without them skips the tests that build models.
# Not transformers[kernels]: the newest release may want a `kernels` that is not published yet.
MODELS ?= transformers kernels peft accelerate safetensors
RESULTS ?= bench/results/zen5-2-cores.json
RELEASES := 5.2.0 5.9.0 5.14.1 5.15.0 5.20.2 5.22.2 newest
PY := $(VENV)/bin/python

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

system:
	@./scripts/system_packages.sh cmake g++ make python3-venv libgtest-dev libbenchmark-dev ninja-build

# The environment is made once and made again when what it must hold changes.
$(VENV)/.ready: pyproject.toml scripts/venv.sh | system
	@./scripts/venv.sh $(VENV) $(PYTHON) '$(TORCH)' $(MODELS)

core: | system
	@cmake -S . -B $(BUILD) -G Ninja -DTIDEGATE_BENCH=OFF > $(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; }
	@cmake --build $(BUILD) -j $(JOBS) --target tidegate_static

# Plain `pip install .` does the same in one go; here the core that the C++ tests link is not compiled a second time.
# A folder of its own: CMake would remember the core there, and a later `pip install .` must not take it.
install: $(VENV)/.ready core  ## build the wheel and install it into $(VENV)
	@$(PY) -m pip install --quiet --no-deps -C build-dir=$(BUILD)/wheel \
	  -C cmake.define.TIDEGATE_CORE=$(abspath $(BUILD))/libtidegate.a . \
	  && echo "installed into $(VENV)"

cpp: core  ## build the C++ library and its tests in $(BUILD)
	@cmake --build $(BUILD) -j $(JOBS)

# The environment is downloaded while the compiler works.
test:  ## run all tests: CTest (GoogleTest) and pytest
	@$(MAKE) --no-print-directory -j 2 cpp $(VENV)/.ready
	@$(MAKE) --no-print-directory install
	@./scripts/run_tests.sh $(BUILD) $(PY)

demo: install  ## train, prefill and decode a small model with and without Tidegate: curves, text, speed, differences
	@$(PY) -m pip install --quiet matplotlib
	@$(PY) examples/demo.py

demo-operators: install  ## operators on a real layer shape: time, error and ratio to stock PyTorch
	@$(PY) examples/operators.py

bench: install  ## Tidegate and the peers installed in $(VENV), side by side
	@cmake -S . -B $(BUILD)-bench -G Ninja -DTIDEGATE_TESTS=OFF > /dev/null
	@cmake --build $(BUILD)-bench --target tidegate_limits
	@$(PY) bench/run.py --limits $(BUILD)-bench/bench/tidegate_limits

numbers: | system  ## measure beside all peers on this (quiet) machine, about 30 minutes; store bench/results, write README's and docs' tables
	@./bench/peers.sh $(PEERS) --setup
	@$(PEERS)/bin/python -m pip install --quiet matplotlib
	@$(PEERS)/bin/python -m tidegate bench --limits $(PEERS)/limits/bench/tidegate_limits --conditions 'memory kept' --reps 5 \
	  --growth --json $(RESULTS) --plots docs/plots
	@$(PEERS)/bin/python bench/tables.py --results $(RESULTS)

bench-ep: install  ## expert parallelism beside MPI_Alltoallv and Transformers' all_to_all over gloo
	@./scripts/system_packages.sh openmpi-bin libopenmpi-dev
	@cmake -S . -B $(BUILD)-bench -G Ninja -DTIDEGATE_TESTS=OFF > /dev/null
	@cmake --build $(BUILD)-bench --target tidegate_ep_bench
	@$(PY) bench/ep/run.py --program $(BUILD)-bench/bench/tidegate_ep_bench

bench-peers: | system  ## the same with every pip-installable peer, in an environment of its own
	@./bench/peers.sh $(PEERS)

test-matrix: core | system  ## one build in torch 2.10, 2.12 and the newest; models in releases of Transformers, with and without FLA
	@./scripts/test_matrix.sh $(PYTHON) $(BUILD)/libtidegate.a 2.10.0 2.12.1 newest
	@.venv-torch-newest/bin/python -m pip install --quiet $(MODELS)
	@./scripts/test_transformers.sh .venv-torch-newest/bin/python $(foreach r,$(RELEASES),$(r) $(r)+fla)

test-emulated: | system  ## the AVX-512 kernels on any AVX2 CPU, through a translation of their intrinsics
	@./scripts/system_packages.sh libsimde-dev
	@cmake -S . -B $(BUILD)-emulated -G Ninja -DTIDEGATE_BENCH=OFF -DTIDEGATE_EMULATE_AVX512=ON > /dev/null
	@cmake --build $(BUILD)-emulated -j $(JOBS)
	@ctest --test-dir $(BUILD)-emulated --output-on-failure -j $(JOBS)

asan: | system  ## C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@./scripts/sanitize.sh $(BUILD)-asan address,undefined $(JOBS)

tsan: | system  ## C++ tests under ThreadSanitizer
	@./scripts/sanitize.sh $(BUILD)-tsan thread $(JOBS)

coverage: | system  ## lines and branches of the C++ core that its tests run
	@./scripts/system_packages.sh clang-16 llvm-16
	@./scripts/coverage.sh $(BUILD) $(BUILD)-coverage $(JOBS)

lint: $(VENV)/.ready  ## clang-format, clang-tidy, ruff
	@./scripts/lint.sh $(PY) $(BUILD)-lint

clean:  ## remove everything that was built
	@rm -rf build build-* .venv .venv-* dist *.log

.PHONY: help system core install cpp test demo demo-operators bench numbers bench-ep bench-peers test-matrix test-emulated asan tsan coverage lint clean
