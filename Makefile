# `make demo` and `make test` work on a machine that has python3.11 (or newer), make and git; both build `.venv` themselves.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ROUTERS := .venv-routers
ROUTERS_READY := $(ROUTERS)/.ready
UV_VENV := build/uv

.PHONY: all demo test check format bench swarm conformance routers compat lock clean
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

# Tests of one file share a worker: they may share a server.
WORKERS ?= 2
test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

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

# What they do with our workers, against docs/compat. `make compat WRITE=--write` writes those pages.
compat: $(READY) $(ROUTERS_READY)
	$(BIN)/python -m tests.compat $(WRITE)

# One lock for every Python from 3.11 on; run it after a change of dependencies in pyproject.toml or requirements-routers.in.
COMPILE := $(UV_VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
  --no-emit-find-links --custom-compile-command "make lock"
lock:
	@$(find_python); $$python -m venv --clear $(UV_VENV)
	@$(UV_VENV)/bin/python $(PIP_INSTALL) uv
	$(COMPILE) --extra dev --output-file requirements.lock pyproject.toml
	$(COMPILE) --output-file requirements-routers.lock requirements-routers.in

clean:
	rm -rf $(VENV) $(ROUTERS) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
