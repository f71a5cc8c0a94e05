# Entry point of every check. `make demo` and `make test` create what they need: a virtual environment and the build, both
# in a cache outside the checkout that all checkouts share.

PYTHON ?= python3
CACHE ?= $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/torchobj
export TORCHOBJ_CACHE := $(CACHE)
export CARGO_TARGET_DIR ?= $(CACHE)/target
export MYPY_CACHE_DIR := $(CACHE)/mypy
export RUFF_CACHE_DIR := $(CACHE)/ruff
export UV_CACHE_DIR := $(CACHE)/uv
export PYO3_BUILD_EXTENSION_MODULE := 1
# In a home folder that is read-only, crates that are there are used, and others are downloaded into the cache.
export CARGO_HOME := $(shell home=$${CARGO_HOME:-$(HOME)/.cargo}; [ -w "$$home" ] || [ -d "$$home/registry" ] && echo "$$home" || echo $(CACHE)/cargo)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Also where writing bytecode is turned off: each process of the tests would compile torch's sources again.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CACHE)/bytecode
# The package is used in place: the build puts the extension module beside its sources.
export PYTHONPATH := $(CURDIR)

# The environment is named by its requirements.
RECIPE := $(shell $(PYTHON) -m tests.tools environment 2>/dev/null)
ifeq ($(RECIPE),)
$(error torchobj needs Python 3.11 or newer: PYTHON=$(PYTHON) is not)
endif
VENV := $(CACHE)/venv-$(RECIPE)
PY := $(VENV)/bin/python
export TORCHOBJ_PYTHON := $(PY)

NATIVE := torchobj/_torchobj.abi3.so
LIBRARY := lib_torchobj.$(if $(filter Darwin,$(shell uname)),dylib,so)
RUST_SOURCES := Cargo.toml Cargo.lock $(shell find rust -name '*.rs' -o -name Cargo.toml)
# Our own crates unoptimized, with assertions. rustdoc cannot use make's jobserver.
TESTED := MAKEFLAGS= cargo --config rust/tests.toml
# Processes of pytest: half of what they do is waiting. Each has servers and a process with torch of its own.
PROCESSES ?= $(shell $(PYTHON) -c 'import os; print(min(16, 1 + 2 * len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0))))')
PYTEST := $(PY) -m pytest --numprocesses $(PROCESSES) --dist loadscope

# The build is shared with other checkouts. Both are called around cargo.
define take
@$(PYTHON) -m tests.tools take
endef
define built
@$(PYTHON) -m tests.tools built
endef

define find_cargo
@command -v cargo >/dev/null || { echo 'torchobj is built with Rust: https://rustup.rs'; exit 1; }
endef

# make 3.81, that of macOS, mixes the output of what runs side by side.
TOGETHER := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

.PHONY: help demo check test lint rust py servers unit strict matrix bench plots metrics stub faults soak docs docs-links wheel build venv format hooks clean
help: ## This list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: ## Train from an embedded S3 server, get killed, resume, and end with identical weights
	$(find_cargo)
	@$(MAKE) --no-print-directory -j2 $(VENV)/examples $(NATIVE)
	$(PY) examples/demo.py

check: venv ## Before each commit: formatting, clippy, ruff, mypy, unit tests
	$(find_cargo)
	cargo fmt --all --check
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@$(MAKE) --no-print-directory -j2 $(TOGETHER) clippy mypy
	@$(MAKE) --no-print-directory -j2 $(TOGETHER) unit

test: venv ## Every check
	$(find_cargo)
	@$(MAKE) --no-print-directory -j2 build servers
	@$(MAKE) --no-print-directory -j3 $(TOGETHER) lint rust py

build: $(NATIVE) ## The extension module, where Python finds it

venv: $(VENV)/complete

# `install FILE EXTRA`: installs the requirements of the package and of one extra or all, by uv where there is one for
# this machine. No bytecode is compiled: most of these modules are never imported.
define install
$(PY) -m tests.tools requirements $(2) > $(1)
$(PY) -m uv pip install --quiet --python $(PY) -r $(1) || $(PY) -m pip install --quiet --no-compile -r $(1)
endef

$(VENV)/examples: # What the examples import
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --no-compile uv || echo 'installing without uv'
	$(call install,$(VENV)/requirements-examples.txt,examples)
	touch $@

$(VENV)/complete: $(VENV)/examples # What the tests and benchmarks import
	$(call install,$(VENV)/requirements.txt)
	touch $@

$(NATIVE): $(RUST_SOURCES)
	$(find_cargo)
	$(take)
	cargo build --locked --release -p torchobj-python
	$(built)
	cp $(CARGO_TARGET_DIR)/release/$(LIBRARY) $@.new && mv $@.new $@

servers: venv # What the tests start and pip cannot install
	@$(PY) -m tests.servers install

lint: build clippy mypy ## Formatting, clippy, licences, ruff, mypy, pyright, the stub against the binary
	cargo fmt --all --check
	$(PY) -m tests.tools cargo-deny
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m tests.tools pyright
	$(PY) -m mypy.stubtest torchobj._torchobj --allowlist tests/stubtest-allowlist.txt --mypy-config-file tests/stubtest.ini

.PHONY: clippy mypy
clippy:
	$(find_cargo)
	$(take)
	$(TESTED) clippy --locked --release --workspace --all-targets -- -D warnings
	$(built)

mypy: venv
	$(PY) -m mypy

rust: servers ## Tests of the Rust crates, with the servers that they start
	$(take)
	$(TESTED) test --locked --release -p torchobj-core
	$(TESTED) test --locked --release -p torchobj-store -- --include-ignored --skip emulator::
	$(built)

# `+`: the progress is shown at once.
py: build servers ## Tests of the Python package
	+$(PYTEST) -m 'not matrix'

# The checkout with an unoptimized extension module, which compiles in a fifth of the time: what is in place stays.
UNOPTIMIZED := $(CURDIR)/dist/unoptimized
unit: unit-rust unit-py ## Tests of both languages that start no server
.PHONY: unit-rust unit-py
unit-rust:
	$(find_cargo)
	$(take)
	$(TESTED) test --locked --release -p torchobj-core
	$(TESTED) test --locked --release -p torchobj-store --lib
unit-py: venv
	$(find_cargo)
	$(take)
	$(TESTED) build --locked --release -p torchobj-python
	@rm -rf $(UNOPTIMIZED) && mkdir -p $(UNOPTIMIZED)
	@cp -R $(filter-out %/dist %/build %/target,$(wildcard $(CURDIR)/*)) .cargo .ci .github $(UNOPTIMIZED)
	@cp $(CARGO_TARGET_DIR)/release/$(LIBRARY) $(UNOPTIMIZED)/$(NATIVE)
	+cd $(UNOPTIMIZED) && PYTHONPATH=$(UNOPTIMIZED) $(PYTEST) -m unit

strict: build servers ## The tests of the strict servers themselves, with their long tables
	$(PYTEST) tests/strict

matrix: build servers ## The long tables, the properties with new examples, and emulators of other programs
	$(TESTED) test --locked --release -p torchobj-store --test servers --no-run
	$(PYTEST) -m 'matrix or hypothesis' --hypothesis-profile random --timeout 3600 --durations 0 --durations-min 1

bench: build venv ## The benchmarks, with their tables
	$(take)
	$(PY) benchmarks/get.py
	$(PY) benchmarks/loader.py
	$(PY) benchmarks/mlperf.py
	$(PY) benchmarks/manifest.py
	$(PY) benchmarks/checkpoint.py
	$(PY) benchmarks/gcs.py
	$(PY) benchmarks/list.py
	$(PY) benchmarks/scan.py
	$(PY) benchmarks/files.py
	$(PY) benchmarks/shards.py

plots: venv ## Pictures of what the benchmarks measured, for the documentation
	$(PY) docs/plots.py

metrics: build venv ## The tables of docs/metrics.md
	$(PY) docs/metrics.py

stub: build venv ## The docstrings of torchobj/_torchobj.pyi, from those of the binary
	$(PY) docs/stub.py

faults: build venv ## Every operation under every fault: correct bytes or a typed error, and the delay
	$(PY) benchmarks/faults.py

DURATION ?= 600
soak: build venv ## A process under faults for DURATION seconds: memory, descriptors, threads and sockets
	$(PY) benchmarks/soak.py --duration $(DURATION)

docs: build venv ## The documentation in build/docs: HTML, Markdown and llms.txt; warnings are errors
	$(PY) -m sphinx -q -W --keep-going -b html -d build/doctrees docs build/docs

docs-links: build venv # The external links of the documentation, which needs the network
	$(PY) -m sphinx -q -b linkcheck -d build/doctrees docs build/links

wheel: venv ## A manylinux wheel in dist/
	$(take)
	$(PY) -m tests.tools wheel

format: venv ## Format the sources of both languages
	$(find_cargo)
	cargo fmt --all
	$(PY) -m ruff check --quiet --fix-only .
	$(PY) -m ruff format --quiet .

hooks: ## Let git format the sources before each commit
	git config core.hooksPath .githooks

clean: ## Remove what was built in the checkout; keep the cache
	rm -rf $(NATIVE) build dist
