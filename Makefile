# `make serve` and `make test` are all a newcomer needs: each sets up .venv first, and nothing has to be activated.
#
#   PYTHON=python3.12      the interpreter to build .venv with (found by itself otherwise)
#   PIP_ARGS='...'         passed to every `pip install`, as --index-url or --find-links
#   ARGS='...'             passed to `distspec serve`, `distspec bench` and to pytest
#   REQUIRE='curl model'   what tests must not skip for want of (see CONTRIBUTING.md)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOCK := requirements.lock
PYTHON ?=
PIP_ARGS ?=
ARGS ?=
REQUIRE ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(PIP_ARGS) -c $(LOCK)
export REQUIRE

.DEFAULT_GOAL := help
.PHONY: help setup serve test lint bench clean

help:
	@echo 'make setup   create .venv with everything, pinned'
	@echo 'make serve   serve SmolLM2-135M on http://127.0.0.1:8000 from four pools on this machine'
	@echo 'make test    lint, types, import contracts, and every test this machine can run'
	@echo 'make lint    the first three of these'
	@echo 'make bench   compare decoding with transformers, on this machine'
	@echo 'make clean   remove .venv and what tools left behind'

setup: $(STAMP)

# torch goes first, so that no other package's resolver picks another build of it. The build needs only
# setuptools, which is pinned too: no isolated environment, so nothing unpinned is fetched.
$(STAMP): pyproject.toml $(LOCK)
	@sh .ci/make-venv '$(VENV)' $(PYTHON)
	$(PIP) torch setuptools
	$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@

serve: $(STAMP)
	$(BIN)/distspec serve $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# One process begins with the tests of real actors, the other with the rest (tests/conftest.py).
test: lint
ifeq ($(strip $(ARGS)),)
	$(BIN)/pytest --numprocesses=2
else
	$(BIN)/pytest $(ARGS)
endif

bench: $(STAMP)
	$(BIN)/distspec bench offline --against transformers $(ARGS)

clean:
	rm -rf $(VENV) build dist bench-out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find distspec tests -name __pycache__ -type d -prune -exec rm -rf {} +
