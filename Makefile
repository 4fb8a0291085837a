# make setup        create .venv and install what users need (seconds when done; PYTHON=python3.12 chooses the interpreter)
# make setup-dev    the same, and what tests and linters need
# make quickstart   train a small GPT on 8 processes, from text to generated text
# make test         lint, types, tests          (ARGS="-k name" goes to pytest, WORKERS=4 runs four files at a time)
# make test-slow    the tests that take minutes (PIECE=parity runs one folder of them, docs/explain/design.md)
# make golden       hold this tree's numbers, words and files against those of BASE=REVISION, and name what differs
# make peers        install DeepSpeed and Megatron-Core (PEERS) into .venv-peers, for benchmarks/compare.py
# make gpu-check    measure everything that only a GPU can show, in 9 minutes (docs/reports/measured.md); uses PYTHON as it is
# make gpu-wheels   fill WHEELS=DIR with what `make gpu-check` may lack on a machine without a network
# make docs         build the documentation as a site: build/site/index.html
# make help | lint | format | docs-check | build | clean | distclean

VENV := .venv
# Test files that run side by side: many leave a second core idle, and what several files share is made in each.
WORKERS ?= 2
RUN := PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(VENV)/bin/python
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
DOCS_STAMP := $(VENV)/.installed-docs
PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check
PEERS ?= deepspeed megatron-core
PEERS_VENV := .venv-peers
PEERS_PIP := $(PEERS_VENV)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt -c benchmarks/peers.txt
AT_LEAST := import sys; sys.exit(sys.version_info < (3, 11))

# The first interpreter that is new enough; a PYTHON that is given is taken as it is, and refused if it is too old.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(AT_LEAST)' 2>/dev/null && { echo $$p; break; }; done)

# Nothing of the caller's environment may reach ours: neither other packages, nor options, nor another job's ranks.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONSAFEPATH PYTEST_ADDOPTS PYTEST_PLUGINS MYPYPATH
# Every process of the tests would compile all modules that it imports.
unexport PYTHONDONTWRITEBYTECODE
unexport PIP_TARGET PIP_PREFIX PIP_USER PIP_REQUIRE_VIRTUALENV
unexport RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
export PYTHONNOUSERSITE := 1

# An environment that was moved, that lost its interpreter, or that is not the PYTHON asked for is made anew.
VERSION := import sys; print(*sys.version_info[:2], sep=".")
ANEW := $(shell [ "$$(cat $(STAMP) 2>/dev/null)" = "$(CURDIR)" ] && $(VENV)/bin/python -c '' 2>/dev/null || echo anew)
# `make gpu-check` leaves the environment alone.
ifeq ($(origin PYTHON)$(filter gpu-check,$(MAKECMDGOALS)),command line)
ANEW += $(shell [ "$$($(PYTHON) -c '$(VERSION)')" = "$$($(VENV)/bin/python -c '$(VERSION)' 2>/dev/null)" ] || echo anew)
endif

.PHONY: help anew setup setup-dev docs quickstart test pytest test-slow golden peers gpu-check gpu-wheels lint format docs-check build clean distclean
.DEFAULT_GOAL := setup

help:
	@sed -n 's/^# make/make/p' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)

setup-dev: $(DEV_STAMP)

# Through a link, `venv --clear` would empty the environment of another directory.
$(STAMP): setup.cfg pyproject.toml constraints.txt $(if $(strip $(ANEW)),anew)
	@[ -z "$(strip $(ANEW))" ] || [ ! -L $(VENV) ] || { \
		echo "$(VENV) is a link to $$(readlink $(VENV)), which is not of this directory: remove the link (rm $(VENV)), or run the tools without make." >&2; exit 2; }
	@$(or $(PYTHON),python3) -c '$(AT_LEAST)' || { \
		echo "megacore needs Python 3.11 or newer; '$(or $(PYTHON),python3)' is $$($(or $(PYTHON),python3) --version 2>&1)." >&2; \
		echo "Install one and name it: make setup PYTHON=/path/to/python3.12" >&2; exit 2; }
	@[ -z "$(strip $(ANEW))" ] || $(PYTHON) -m venv --clear $(VENV) || { \
		echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu it needs the package python3-venv." >&2; exit 2; }
	$(PIP) -q -c constraints.txt setuptools
	$(PIP) -c constraints.txt --no-build-isolation -e '.[convert,preprocess]'
	@printf '%s' "$(CURDIR)" > $@

$(DEV_STAMP): $(STAMP)
	$(PIP) -c constraints.txt --no-build-isolation -e '.[test]'
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(PIP) -c constraints.txt --no-build-isolation -e '.[docs]'
	@touch $@

docs: $(DOCS_STAMP)
	@$(RUN) tools/build_docs.py

quickstart: setup
	@$(RUN) tools/quickstart.py

# Side by side: the type checker keeps one core busy, and many tests wait.
test: setup-dev
	@$(MAKE) --no-print-directory -j2 lint pytest || { \
		echo "The linters or the tests failed; 'make lint' runs the linters only." >&2; exit 2; }

# In the order of tests/conftest.py, which puts the longest files first.
pytest: setup-dev
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=20 --durations-min=1 $(ARGS)

test-slow: setup-dev $(DOCS_STAMP)
	$(RUN) -m pytest -m slow -n $(WORKERS) --dist worksteal tests/$(PIECE) $(ARGS)

# Runs both trees on this machine. ARGS="--only runs:zero" takes the runs with this word in their names.
golden: setup-dev
	@$(RUN) -m tests.golden.make --base $(or $(BASE),HEAD) $(ARGS)

# With the torch of .venv; a framework that does not install is named, and the others are.
peers: setup-dev
	@[ -x $(PEERS_VENV)/bin/python ] || $(VENV)/bin/python -m venv --clear $(PEERS_VENV)
	$(PEERS_PIP) setuptools wheel torch==$$($(RUN) -c 'from importlib.metadata import version; print(version("torch"))')
	@failed=; for name in $(PEERS); do \
		DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(PEERS_PIP) --no-build-isolation $$name || failed="$$failed $$name"; done; \
		[ -z "$$failed" ] || { echo "not installed, see pip's message above:$$failed" >&2; exit 1; }

# The caller's interpreter and packages, which have the torch that fits the GPU: no .venv, no network.
gpu-check: export PYTHONPATH := $(PYTHONPATH)
gpu-check:
	@env -u PYTHONNOUSERSITE $(or $(PYTHON),python3) benchmarks/gpu.py $(if $(WHEELS),--wheels "$(WHEELS)") $(ARGS)

gpu-wheels: setup
	@$(RUN) -m benchmarks.gpu_check.download --wheels "$(or $(WHEELS),wheels)"

lint: setup-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: setup-dev
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

docs-check: setup-dev
	$(RUN) -m pytest tests/e2e/test_readme.py

build: setup-dev
	$(RUN) -m build --no-isolation

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(PEERS_VENV) quickstart
