# Entry point of every check. `make demo` and `make test` create what they need: a virtual environment and the build, both
# in a cache outside the checkout that all checkouts share.

PYTHON ?= python3
CACHE ?= $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/torchobj
export TORCHOBJ_CACHE := $(CACHE)
export CARGO_TARGET_DIR ?= $(CACHE)/target
export PYO3_BUILD_EXTENSION_MODULE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The package is used in place: the build puts the extension module beside its sources.
export PYTHONPATH := $(CURDIR)

# The environment is named by its requirements.
RECIPE := $(shell cat pyproject.toml | cksum | cut -d' ' -f1)-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := $(CACHE)/venv-$(RECIPE)
PY := $(VENV)/bin/python
export TORCHOBJ_PYTHON := $(PY)

NATIVE := torchobj/_torchobj.abi3.so
RUST_SOURCES := Cargo.toml Cargo.lock $(shell find rust -name '*.rs' -o -name Cargo.toml)

# The build is shared with other checkouts, and cargo compares modification times only: without this it would reuse what
# another checkout built after these sources were written.
OURS := $(CARGO_TARGET_DIR)/checkout
define take
@mkdir -p $(CARGO_TARGET_DIR)
@[ "$$(cat $(OURS) 2>/dev/null)" = "$(CURDIR)" ] || { find rust -name '*.rs' -exec touch {} + && echo "$(CURDIR)" > $(OURS); }
endef

define find_cargo
@command -v cargo >/dev/null || { echo 'torchobj is built with Rust: https://rustup.rs'; exit 1; }
endef

.PHONY: help demo test lint rust py matrix bench faults wheel build venv clean
help: ## This list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: ## Train from an embedded S3 server, get killed, resume, and end with identical weights
	$(find_cargo)
	@$(MAKE) --no-print-directory -j2 $(VENV)/examples $(NATIVE)
	$(PY) examples/demo.py

test: lint rust py ## Every check

build: $(NATIVE) ## The extension module, where Python finds it

venv: $(VENV)/complete

# `pip_install FILE SELECTED`: installs the requirements of the package and of the selected extras. pip compiles no bytecode:
# most of these modules are never imported.
define pip_install
$(PY) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; extras = p["optional-dependencies"]; print(*p["dependencies"], *(r for e in $(2) for r in extras[e]), sep="\n")' > $(1)
$(PY) -m pip install --quiet --no-compile -r $(1)
endef

$(VENV)/examples: # What the examples import
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(call pip_install,$(VENV)/requirements-examples.txt,["examples"])
	touch $@

$(VENV)/complete: $(VENV)/examples ## The virtual environment of the tests and benchmarks
	$(call pip_install,$(VENV)/requirements.txt,extras)
	touch $@

$(NATIVE): $(RUST_SOURCES)
	$(find_cargo)
	$(take)
	cargo build --locked --release -p torchobj-python
	cp $(CARGO_TARGET_DIR)/release/lib_torchobj.$(if $(filter Darwin,$(shell uname)),dylib,so) $@.new && mv $@.new $@

lint: build venv ## Formatting, clippy, licences, ruff, mypy, pyright, the stub against the binary
	$(take)
	cargo fmt --all --check
	cargo --config rust/tests.toml clippy --locked --release --workspace --all-targets -- -D warnings
	$(PY) -m tests.tools cargo-deny
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy --untyped-calls-exclude torch examples tests/typing
	$(PY) -m tests.tools pyright
	$(PY) -m mypy.stubtest torchobj._torchobj --allowlist tests/stubtest-allowlist.txt --mypy-config-file pyproject.toml

rust: venv ## Tests of the Rust crates, with the servers that they start
	$(PY) -m tests.servers install
	$(take)
	RUST_TEST_THREADS=16 cargo --config rust/tests.toml test --locked --release -p torchobj-core
	RUST_TEST_THREADS=16 cargo --config rust/tests.toml test --locked --release -p torchobj-store -- --include-ignored

py: build venv ## Tests of the Python package
	$(PY) -m tests.servers install
	$(PY) -m pytest -m 'not matrix'

matrix: build venv ## The long tables
	$(PY) -m pytest -m matrix --timeout 3600

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

faults: build venv ## Every operation under every fault: correct bytes or a typed error, and the delay
	$(PY) benchmarks/faults.py

wheel: venv ## A manylinux wheel in dist/
	$(take)
	$(PY) -m tests.tools wheel

clean: ## Remove what was built in the checkout; keep the cache
	rm -rf $(NATIVE) dist
