# Two commands are all that a new user needs: `make demo` and `make test`. `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
# More arguments for pip, such as the address of a mirror.
PIP_ARGS ?=
# What pip installs first. By itself, because plain torch on Linux brings several GB of CUDA, which a machine without
# a GPU can do without: give the index of the CPU builds here, as `torch --extra-index-url ...`, for a small install.
TORCH_INSTALL ?= torch
# Arguments for the program behind a target: `make serve ARGS="--device cpu"`, `make test ARGS="-k wire"`.
ARGS ?=

BIN := $(VENV)/bin
PEERS := triton mosec
PIP := $(BIN)/python -m pip install --quiet $(PIP_ARGS) --constraint constraints.txt
NODE := examples/node
NATIVE := server/attnserve_server/native
INGREDIENTS := pyproject.toml constraints.txt hatch_build.py $(NATIVE)/sources.py $(wildcard $(NATIVE)/*.[ch])
# Of what pip builds it shows nothing, and of what it lacked for that as little.
CHECK_NATIVE = @test -e $(NATIVE)/attention.so || \
  echo "without a C compiler, or not on Linux on x86-64: attention on the processor is torch's alone" >&2

.DELETE_ON_ERROR:
.PHONY: help demo serve test check format docs bench bench-peers bench-tune gpu chaos fuzz sbom audit protos protos-baseline descriptors node clean

help: ## list the targets
	@awk -F ':.*## ' '/^[-a-z]+:.*## / { printf "%-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## start the service and embed sentences through it with a real model
	$(BIN)/python examples/embed_sentences.py $(ARGS)

serve: $(VENV)/.demo ## run the service until interrupted
	$(BIN)/attnserve-server $(ARGS)

test: $(VENV)/.dev ## run the tests
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.dev ## format, lint, types, protos, generated code and documents in step: seconds
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/protos.py check
	$(BIN)/python -m pytest --quiet tests/project/test_architecture.py tests/project/test_documents.py \
	  tests/settings/test_config.py -k 'architecture or document'

format: $(VENV)/.dev ## rewrite the code in the one format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.dev ## write the table of settings into the documents, and the rules of Prometheus for Kubernetes
	$(BIN)/python scripts/settings_table.py
	$(BIN)/python scripts/prometheus_rule.py

bench: $(VENV)/.dev ## compare the service with torch in process, with transport alone, and with peers that are there
	$(BIN)/python -m benchmarks $(ARGS)

bench-peers: $(VENV)/.dev $(PEERS:%=.venv-peers/%/.installed) ## the same, and set up Triton and Mosec first
	$(BIN)/python -m benchmarks --peers triton,mosec $(ARGS)

bench-tune: $(VENV)/.dev $(PEERS:%=.venv-peers/%/.installed) ## find the fastest settings of Triton and Mosec on this machine
	$(BIN)/python -m benchmarks.peers.tune $(ARGS)

gpu: $(VENV)/.dev ## on a machine with a GPU: the tests and figures that need one, each written as it comes
	$(BIN)/python scripts/gpu.py $(ARGS)

chaos: $(VENV)/.dev ## try to break what is promised of a bad day, and write docs/reliability.md
	$(BIN)/python -m benchmarks.chaos --document docs/reliability.md $(ARGS)

fuzz: $(VENV)/.fuzz ## bad bytes into the codec and every RPC, two million of them: ten minutes on two cores
	$(BIN)/python tests/fuzz/fuzz.py codec --inputs 1000000
	$(BIN)/python tests/fuzz/fuzz.py server --inputs 100000
	$(BIN)/python tests/fuzz/fuzz.py guided-codec --inputs 1000000
	$(BIN)/python tests/fuzz/fuzz.py guided-server --inputs 100000

sbom: $(VENV)/.dev ## write what a server consists of to build/sbom.json (CycloneDX)
	$(BIN)/python scripts/sbom.py build/sbom.json

audit: $(VENV)/.dev ## look up what is pinned in the OSV database of vulnerabilities
	$(BIN)/python scripts/audit.py $(ARGS)

protos: $(VENV)/.dev ## generate the code of the protos
	$(BIN)/python scripts/protos.py generate

protos-baseline: $(VENV)/.dev ## make today's protocol the baseline, if it breaks nothing
	$(BIN)/python scripts/protos.py baseline

descriptors: $(VENV)/.dev ## write the protocol and all it imports to build/attnserve.binpb, for languages that load it
	$(BIN)/python scripts/protos.py descriptors build/attnserve.binpb

node: descriptors $(NODE)/node_modules/.installed ## make the client for Node ready, in examples/node

clean: ## remove the virtual environment and all caches
	rm -rf $(VENV) .venv-peers $(NODE)/node_modules build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis $(NATIVE)/attention.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The virtual environment, in three steps: empty, what runs the demo and the service, what tests and checks need.

$(BIN)/python:
	@found=; for candidate in $(PYTHON) python3.14 python3.13 python3.12 python3.11; do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "attnserve needs Python 3.11 or newer; $(PYTHON) is not. Name one: make PYTHON=/path/to/python3" >&2; exit 1; \
	fi; \
	if ! "$$found" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "$$found lacks the venv module (on Debian and Ubuntu: the package python3-venv)" >&2; exit 1; \
	fi; \
	echo "setting up $(VENV) with $$found"; "$$found" -m venv $(VENV)

$(VENV)/.demo: $(INGREDIENTS) | $(BIN)/python
	@echo "installing, once, which takes a few minutes"
	$(PIP) $(TORCH_INSTALL)
	$(PIP) --editable '.[demo]'
	$(CHECK_NATIVE)
	@touch $@

$(VENV)/.dev: $(INGREDIENTS) | $(BIN)/python
	@echo "installing, once, which takes a few minutes"
	$(PIP) $(TORCH_INSTALL)
	$(PIP) --editable '.[dev]'
	$(CHECK_NATIVE)
	@touch $(VENV)/.demo $@

$(VENV)/.fuzz: $(VENV)/.dev
	$(PIP) --editable '.[fuzz]'
	@touch $@

$(NODE)/node_modules/.installed: $(NODE)/package.json $(NODE)/package-lock.json
	npm ci --prefix $(NODE) --no-audit --no-fund --ignore-scripts
	@touch $@

# Servers of others, each in an environment of its own, with the same torch.
.venv-peers/%/.installed: benchmarks/peers/%.txt | $(BIN)/python
	@echo "installing $*, once, which takes minutes"
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet $(PIP_ARGS) --constraint $< $(TORCH_INSTALL)
	$(@D)/bin/python -m pip install --quiet $(PIP_ARGS) --requirement $<
	@touch $@
