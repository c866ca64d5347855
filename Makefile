# A new user needs only two commands: `make demo` and `make test`. `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
# Further arguments for pip, such as the address of a mirror.
PIP_ARGS ?=
# Installed first, by itself, because plain torch on Linux brings several GB of CUDA, which a machine without a GPU does
# not need: there, `make demo TORCH_INSTALL="torch --extra-index-url $index"`, with the index of torch's CPU builds.
TORCH_INSTALL ?= torch
# Arguments for the program behind a target: `make serve ARGS="--device cpu"`, `make test ARGS="-k wire"`.
ARGS ?=

BIN := $(VENV)/bin
PEERS := triton mosec
PIP := $(BIN)/python -m pip install --quiet $(PIP_ARGS) --constraint constraints.txt
NODE := examples/node
NATIVE := server/attnserve_server/native
INGREDIENTS := pyproject.toml constraints.txt hatch_build.py $(NATIVE)/sources.py $(wildcard $(NATIVE)/*.[ch])
# pip shows no output of a build, nor what was missing for it.
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

# By two processes, each of which runs one file of tests at a time, since tests of a file share servers. Each takes up to
# 3 GB, and starts servers of its own. `ARGS="-n 0"` runs all in one process, as a debugger (`--pdb`) needs it; with many
# processors, `ARGS="-n 4"` is faster still. A process that dies is not replaced: the run ends after the files that are
# begun, with the name of the test, which xdist's next process would only begin again, and then wait for ever.
test: $(VENV)/.dev ## run the tests
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --max-worker-restart 0 $(ARGS)

check: $(VENV)/.dev ## check format, lint, types, protos, and that generated code and documents are up to date: seconds, a minute the first time
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/protos.py check
	$(BIN)/python -m pytest --quiet tests/project/test_architecture.py tests/project/test_documents.py \
	  tests/settings/test_config.py \
	  tests/observability/test_metrics_document.py::test_the_document_shows_the_metrics_as_they_are \
	  -k 'architecture or document'

format: $(VENV)/.dev ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.dev ## write the tables of settings and metrics into the documents, and the Prometheus rules for Kubernetes
	$(BIN)/python -m scripts.settings_table
	$(BIN)/python -m scripts.metrics_table
	$(BIN)/python scripts/prometheus_rule.py

bench: $(VENV)/.dev ## compare the service with torch in process, with transport alone, and with installed peers
	$(BIN)/python -m benchmarks $(ARGS)

bench-peers: $(VENV)/.dev $(PEERS:%=.venv-peers/%/.installed) ## the same, after setting up Triton and Mosec
	$(BIN)/python -m benchmarks --peers triton,mosec $(ARGS)

bench-tune: $(VENV)/.dev $(PEERS:%=.venv-peers/%/.installed) ## find the fastest settings of Triton and Mosec on this machine
	$(BIN)/python -m benchmarks.peers.tune $(ARGS)

gpu: $(VENV)/.dev ## on a machine with a GPU: the tests and figures that need one, written as they come
	$(BIN)/python scripts/gpu.py $(ARGS)

chaos: $(VENV)/.dev ## inject faults, check what is promised under them, and write docs/reliability.md
	$(BIN)/python -m benchmarks.chaos --document docs/reliability.md $(ARGS)

fuzz: $(VENV)/.fuzz ## send random bytes to the codec and every RPC, two million inputs: ten minutes on two cores
	$(BIN)/python tests/fuzz/fuzz.py codec --inputs 1000000
	$(BIN)/python tests/fuzz/fuzz.py server --inputs 100000
	$(BIN)/python tests/fuzz/fuzz.py guided-codec --inputs 1000000
	$(BIN)/python tests/fuzz/fuzz.py guided-server --inputs 100000

sbom: $(VENV)/.dev ## write a software bill of materials of the server to build/sbom.json (CycloneDX)
	$(BIN)/python scripts/sbom.py build/sbom.json

audit: $(VENV)/.dev ## look up the pinned packages in the OSV database of vulnerabilities
	$(BIN)/python scripts/audit.py $(ARGS)

protos: $(VENV)/.dev ## generate code from the protos
	$(BIN)/python scripts/protos.py generate

protos-baseline: $(VENV)/.dev ## make the current protocol the compatibility baseline, if it breaks nothing
	$(BIN)/python scripts/protos.py baseline

descriptors: $(VENV)/.dev ## write the protocol and its imports to build/attnserve.binpb, for tools that load it
	$(BIN)/python scripts/protos.py descriptors build/attnserve.binpb

node: descriptors $(NODE)/node_modules/.installed ## set up the client for Node in examples/node

clean: ## remove the virtual environment and all caches
	rm -rf $(VENV) .venv-peers $(NODE)/node_modules build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis $(NATIVE)/attention.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The virtual environment, in three steps: empty, for the demo and the service, for tests and checks.

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

# Other servers to compare with, each in an environment of its own, with the same torch.
.venv-peers/%/.installed: benchmarks/peers/%.txt | $(BIN)/python
	@echo "installing $*, once, which takes minutes"
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet $(PIP_ARGS) --constraint $< $(TORCH_INSTALL)
	$(@D)/bin/python -m pip install --quiet $(PIP_ARGS) --requirement $<
	@touch $@
