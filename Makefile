# `make demo` and `make test` work on a machine that has python3.11 (or newer), make and git; both build `.venv` themselves.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ROUTERS := .venv-routers
ROUTERS_READY := $(ROUTERS)/.ready
LITELLM := .venv-litellm
LITELLM_READY := $(LITELLM)/.ready
BENCHMARKS := .venv-benchmarks
BENCHMARKS_READY := $(BENCHMARKS)/.ready
TORCH ?= torch==2.13.0
UV_VENV := build/uv

.PHONY: all demo test check format bench swarm conformance routers clients compat compat-routers compat-clients compat-scrapers lock clean
all: $(READY)

# The interpreter is tried, not only found: a version manager's shim may exist without a Python behind it.
define find_python
python=; for candidate in "$(PYTHON)" python3.11 python3.12 python3.13 python3.14 python3; do \
  if [ -n "$$candidate" ] && $$candidate -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
    python=$$candidate; break; fi; done; \
if [ -z "$$python" ]; then echo "windtunnel needs Python 3.11 or newer with venv; set PYTHON=/path/to/python3.11" >&2; exit 2; fi
endef

PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

$(READY): requirements.lock pyproject.toml
	@$(find_python); echo "building $(VENV) with $$python"; $$python -m venv --clear $(VENV)
	@$(BIN)/python $(PIP_INSTALL) --require-hashes -r requirements.lock
	@$(BIN)/python $(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(READY)
	$(BIN)/windtunnel demo

# Tests of one file share a worker: they may share a server. Most wait more than they compute, so four fit two cores.
# Files begin in the order of tests/conftest.py, the longest first. Hundreds of processes start: each reads what is compiled here.
WORKERS ?= 4
test: $(READY)
	@$(BIN)/python -m compileall -q src
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_functions.py src tools tests $(wildcard bench)
	$(BIN)/python tools/check_ownership.py src
	$(BIN)/python tools/check_docs.py .

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python -m bench

# Whole clusters under random faults, for so many seconds.
SECONDS ?= 60
swarm: $(READY)
	$(BIN)/python -m windtunnel.sim.swarm --seconds $(SECONDS)

conformance: $(READY)
	$(BIN)/python -m tests.conformance

# The real routers, in an environment of their own. sglang-router installs a program called smg, too: the real one goes over it.
routers: $(ROUTERS_READY)
$(ROUTERS_READY): requirements-routers.lock
	@$(find_python); echo "building $(ROUTERS) with $$python"; $$python -m venv --clear $(ROUTERS)
	@$(ROUTERS)/bin/python $(PIP_INSTALL) --require-hashes -r requirements-routers.lock
	@sed -n '/^smg==/,/# via/p' requirements-routers.lock >$(ROUTERS)/smg.lock
	@$(ROUTERS)/bin/python $(PIP_INSTALL) --force-reinstall --no-deps --require-hashes -r $(ROUTERS)/smg.lock
	@touch $@

# A large proxy (756 MB) and benchmark clients (2.5 GB), whose dependencies exclude each other; no test needs them.
clients: $(LITELLM_READY) $(BENCHMARKS_READY)
$(LITELLM_READY): requirements-litellm.lock
	@$(find_python); echo "building $(LITELLM) with $$python"; $$python -m venv --clear $(LITELLM)
	@$(LITELLM)/bin/python $(PIP_INSTALL) --require-hashes -r requirements-litellm.lock
	@touch $@
$(BENCHMARKS_READY): requirements-benchmarks.lock
	@$(find_python); echo "building $(BENCHMARKS) with $$python"; $$python -m venv --clear $(BENCHMARKS)
	@$(BENCHMARKS)/bin/python $(PIP_INSTALL) --no-deps --require-hashes -r requirements-benchmarks.lock
	@$(BENCHMARKS)/bin/python $(PIP_INSTALL) "$(TORCH)"
	@touch $@

# What they do with our workers, against docs/compat. `make compat WRITE=--write` writes those pages.
compat: compat-routers compat-clients compat-scrapers
compat-routers: $(READY) $(ROUTERS_READY)
	$(BIN)/python -m tests.compat $(WRITE) --peer sglang-router --peer smg --peer vllm-router
compat-clients: $(READY) $(LITELLM_READY) $(BENCHMARKS_READY)
	$(BIN)/python -m tests.compat $(WRITE) --peer litellm --peer guidellm --peer aiperf
compat-scrapers: $(READY)
	$(BIN)/python -m tests.compat $(WRITE) --if-installed --peer prometheus

# One lock for every Python from 3.11 on; run it after a change of dependencies in pyproject.toml or a requirements-*.in.
COMPILE := $(UV_VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
  --no-emit-find-links --custom-compile-command "make lock"
lock:
	@$(find_python); $$python -m venv --clear $(UV_VENV)
	@$(UV_VENV)/bin/python $(PIP_INSTALL) uv
	$(COMPILE) --extra dev --output-file requirements.lock pyproject.toml
	$(COMPILE) --output-file requirements-routers.lock requirements-routers.in
	$(COMPILE) --output-file requirements-litellm.lock requirements-litellm.in
	$(COMPILE) --override requirements-no-torch.txt --output-file requirements-benchmarks.lock requirements-benchmarks.in

clean:
	rm -rf $(VENV) $(ROUTERS) $(LITELLM) $(BENCHMARKS) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
