# One list of commands for the laptop, the commit hook and CI.
# Needs Python 3.11 or later and cargo; installs everything else into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python
STAMP := $(shell date -u +%Y%m%d-%H%M%S)
export HF_HUB_OFFLINE := 1
# By default a build of torch for this machine's GPU, or for the CPU; only the first install asks for it.
TORCH_BACKEND := $(or $(UV_TORCH_BACKEND),auto)
unexport UV_TORCH_BACKEND
# Each test process and subprocess imports torch: 1.4 s from bytecode, 3 s without.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/target/pycache
# One core per test process: the models are too small for more.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo service test nightly quantities mutants lint bench figures plots load loom vllm sglang cuda fake-cuda release workflow docs build format clean rivals

help: ## List the targets
	@awk -F ':.*## ' '/^##@ / { print "\n" substr($$0, 5) } /^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

##@ Try

demo: build $(VENV)/models $(VENV)/show ## A logit lens of SmolLM2, one of two threads steered, and the model restored bit for bit
	$(BIN)/python examples/quickstart.py

service: build $(VENV)/models $(VENV)/service ## Serve MiniLM to requests that capture and steer
	$(BIN)/python -m examples.service

docs: build $(VENV)/docs $(VENV)/service $(VENV)/test ## The documentation, without warnings, into site/
	$(BIN)/python script/llms.py
	RUSTDOCFLAGS="-D warnings" cargo doc --quiet --no-deps --package ferrohook-core --package ferrohook-statistics
	@# Not --quiet, which hides warnings from --strict.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest --quiet tests/docs/test_site.py

##@ Check

lint: build $(VENV)/test $(VENV)/models $(VENV)/lint $(VENV)/show $(VENV)/service $(VENV)/inspect $(VENV)/ray ## Formatting, lints and types
	cargo fmt --check
	cargo clippy --quiet --all-targets -- -D warnings
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo clippy --quiet --package ferrohook-core --test loom -- -D warnings
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest ferrohook._core
	$(BIN)/pyright --pythonpath $(BIN)/python

# Dependency groups beside test and models that the tests of a folder need.
NEEDS_analysis := show
NEEDS_attach := oracle
NEEDS_captures := show
NEEDS_cli := show
NEEDS_client := inspect service
NEEDS_compat := oracle
NEEDS_data := oracle
NEEDS_demos := notebook ray service
NEEDS_docs := notebook service
NEEDS_engines := service
NEEDS_plans := oracle service
NEEDS_plot := show
NEEDS_project := mutants
NEEDS_quantity := oracle
NEEDS_registration := service
NEEDS_service := service
NEEDS_show := show
folders = $(if $(T),$(foreach each,$(T),$(word 2,$(subst /, ,$(each)))),$(notdir $(wildcard tests/*)))
needs = $(addprefix $(VENV)/,test models $(sort $(foreach each,$(folders),$(NEEDS_$(each)))))

test: build $(needs) ## All tests that need no special interpreter; T=tests/rows for a part, WHOLE=1 for all cases
ifndef T
	cargo test --quiet --package ferrohook-core --package ferrohook-statistics
	script/embedded
endif
	$(PYTEST) $(if $(WHOLE),--whole) $(T)

fake-cuda: build $(VENV)/test $(VENV)/models ## The tests marked cuda on an emulated GPU, under each of its schedules
	$(PYTEST) --fake-cuda --no-fold-skipped -m cuda $$(grep -rl --include='test_*.py' 'mark\.cuda' tests)

cuda: ## The tests marked cuda and the benchmarks on a GPU, by the python3 and from the wheel that are there
	script/cuda

loom: ## Every interleaving of the core's threads, within loom's model
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --release --package ferrohook-core --test loom

mutants: build $(needs) $(VENV)/mutants ## Share of mutants that the tests catch, of a sample; ONLY=rust/py/src/rows, PART=1/20, MINUTES=60
	command -v cargo-mutants > /dev/null || cargo install --quiet --locked cargo-mutants
	$(BIN)/python script/mutants.py $(if $(ONLY),--only $(ONLY)) $(if $(PART),--part $(PART)) \
		$(if $(MINUTES),--minutes $(MINUTES)) $(if $(COMMIT),--commit $(COMMIT)) \
		$(if $(ROOM),--room) $(if $(RECORD),--record)

##@ Lanes

nightly: build $(VENV)/test $(VENV)/release ## Every lane whole, one table for the commit; LANES="vllm sglang" for some
	$(BIN)/python script/nightly.py $(LANES)

vllm: $(BIN)/maturin ## The tests of the engine vLLM, on a CPU; RUNNER=v2, RELEASE=0.33.0
	RUNNER=$(RUNNER) RELEASE=$(RELEASE) script/vllm

sglang: $(BIN)/maturin ## The tests of the engine SGLang, on a CPU
	RELEASE=$(RELEASE) script/sglang

quantities: build $(VENV)/test $(VENV)/models ## Quantities of all language models of transformers, against their golden file
	$(PYTEST) --whole tests/quantity/test_zoo.py

workflow: $(VENV)/test ## The steps of the public CI's workflow, run here
	$(BIN)/python script/workflow.py

##@ Measure

bench: build $(VENV)/models $(VENV)/show $(VENV)/rivals ## The speed table: ratios side by side in one run
	@mkdir -p bench-results
	$(BIN)/python -m benches --json bench-results/$(STAMP).json --plot bench-results/$(STAMP).svg

load: build $(VENV)/models $(VENV)/show $(VENV)/service ## Concurrent clients of the service, against PyTorch's hooks behind a lock
	$(BIN)/python -m benches.load

rivals: build $(VENV)/models ## Wrong answers of hooking, ferrohook's and others': docs/rivals.md, made anew
	$(BIN)/python -m benches.rivals

figures: build $(VENV)/models $(VENV)/show $(VENV)/rivals ## The table and the chart of docs/, measured anew
	$(BIN)/python -m benches --json docs/benchmarks.json
	$(BIN)/python -m benches.figures

plots: build $(VENV)/models $(VENV)/notebook $(VENV)/service ## The pictures of docs/ and the notebook's outputs, drawn by their code
	$(BIN)/python script/plots.py
	$(BIN)/python script/notebook.py

##@ Publish

release: $(BIN)/maturin $(VENV)/release ## Wheels for each CPython found, sdist, SBOM and checksums in dist/, installed and run; ONLY=3.12
	script/release $(ONLY)

build: $(BIN)/maturin $(VENV)/torch
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin develop --release --uv --quiet

format: build $(VENV)/lint
	cargo fmt
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf target $(VENV) .venv-* dist site

$(BIN)/uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv

$(BIN)/maturin: $(BIN)/uv
	$(UV) maturin

$(VENV)/torch: | $(BIN)/uv
	@UV_HTTP_RETRIES=0 $(UV) --torch-backend $(TORCH_BACKEND) torch 2> $@.log || { \
		echo "No torch for '$(TORCH_BACKEND)' at PyTorch's own index ($@.log has the reason): installing the default build" && \
		$(UV) torch; }
	@touch $@

# Stamp file of an installed dependency group.
$(VENV)/test $(VENV)/models $(VENV)/show $(VENV)/notebook $(VENV)/service $(VENV)/inspect $(VENV)/oracle $(VENV)/ray $(VENV)/rivals $(VENV)/mutants $(VENV)/lint $(VENV)/docs $(VENV)/release: $(VENV)/%: pyproject.toml $(VENV)/torch | $(BIN)/uv
	$(UV) --group $*
	@touch $@
