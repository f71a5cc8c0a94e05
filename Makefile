# One door to every check. `make demo` and `make test` set up all they need: a virtual environment and the build, both
# in a cache outside the checkout, so that a second checkout is warm.

PYTHON ?= python3
CACHE ?= $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/torchobj
export TORCHOBJ_CACHE := $(CACHE)
export CARGO_TARGET_DIR ?= $(CACHE)/target
export PYO3_BUILD_EXTENSION_MODULE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The package is used where it lies: building puts the extension module beside its sources.
export PYTHONPATH := $(CURDIR)

# The environment is named by what it is made of.
RECIPE := $(shell cat pyproject.toml | cksum | cut -d' ' -f1)-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := $(CACHE)/venv-$(RECIPE)
PY := $(VENV)/bin/python
export TORCHOBJ_PYTHON := $(PY)

NATIVE := torchobj/_torchobj.abi3.so
RUST_SOURCES := Cargo.toml Cargo.lock $(shell find rust -name '*.rs' -o -name Cargo.toml)

# What is built is shared with other checkouts, and cargo goes by times alone: it would take for ours what another built
# since our sources were written.
OURS := $(CARGO_TARGET_DIR)/checkout
define take
@mkdir -p $(CARGO_TARGET_DIR)
@[ "$$(cat $(OURS) 2>/dev/null)" = "$(CURDIR)" ] || { find rust -name '*.rs' -exec touch {} + && echo "$(CURDIR)" > $(OURS); }
endef

.PHONY: help demo test lint rust py matrix bench faults wheel build venv clean
help: ## This list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: build ## Train from an embedded S3, be killed, resume, and end with the very same weights
	$(PY) examples/demo.py

test: lint rust py ## Every check

build: $(NATIVE) ## The extension module, where Python finds it

venv: $(VENV)/complete
$(VENV)/complete: ## The virtual environment
	@command -v cargo >/dev/null || { echo 'torchobj is built with Rust: https://rustup.rs'; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(*p["dependencies"], *(r for e in p["optional-dependencies"].values() for r in e), sep="\n")' > $(VENV)/requirements.txt
	$(PY) -m pip install --quiet -r $(VENV)/requirements.txt
	touch $@

$(NATIVE): $(RUST_SOURCES) | $(VENV)/complete
	$(take)
	cargo build --locked --release -p torchobj-python
	cp $(CARGO_TARGET_DIR)/release/lib_torchobj.$(if $(filter Darwin,$(shell uname)),dylib,so) $@.new && mv $@.new $@

lint: build ## Formatting, clippy, licences, ruff, mypy, the stub against the binary
	$(take)
	cargo fmt --all --check
	cargo clippy --locked --release --workspace --all-targets --features torchobj-core/conformance -- -D warnings
	$(PY) -m tests.tools cargo-deny
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy.stubtest torchobj._torchobj --allowlist tests/stubtest-allowlist.txt --mypy-config-file pyproject.toml

rust: venv ## Tests of the Rust crates, with the servers that they start
	$(PY) -m tests.servers install
	$(take)
	cargo test --locked --release -p torchobj-core --features conformance
	cargo test --locked --release -p torchobj-store -- --include-ignored

py: build ## Tests of the Python package
	$(PY) -m tests.servers install
	$(PY) -m pytest -m 'not matrix'

matrix: build ## The long tables
	$(PY) -m pytest -m matrix --timeout 3600

bench: build ## The benchmarks, with their tables
	$(take)
	$(PY) benchmarks/get.py
	$(PY) benchmarks/loader.py
	$(PY) benchmarks/mlperf.py
	$(PY) benchmarks/checkpoint.py

faults: build ## Every operation under every fault: right bytes or a typed error, and how much later
	$(PY) benchmarks/faults.py

wheel: venv ## A manylinux wheel in dist/
	$(take)
	$(PY) -m tests.tools wheel

clean: ## Removes what was built in the checkout; the cache stays
	rm -rf $(NATIVE) dist
