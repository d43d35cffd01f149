# The project's commands. Owns the order of steps; what a step does lies in scripts/.
# The stamps under .venv/.stamps are written last, so that a broken install is tried again.

SHELL := /bin/bash
PYTHON ?= python3
ARGS ?=
VENV := .venv
STAMPS := $(VENV)/.stamps
SOURCES := src tests benchmarks
INSTALLED_FROM := pyproject.toml $(wildcard setup.py src/holdfast/execution/native/*.[ch])

.DEFAULT_GOAL := help
.PHONY: help install serve test test-all test-clients test-tools lint format clean bench

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install: $(STAMPS)/dev ## create the environment .venv with the development tools
	@echo "the environment at $(VENV) is ready"

serve: $(STAMPS)/runtime ## install what is needed and serve on 127.0.0.1:8000 (make serve ARGS="--port 9000")
	@exec $(VENV)/bin/holdfast serve $(ARGS)

test: $(STAMPS)/dev test-tools ## linters and the test suite, about 14 minutes on 2 cores (ARGS go to pytest)
	@scripts/check.sh quick $(ARGS)

test-all: $(STAMPS)/dev test-tools ## the same with the long tests: an hour or more
	@scripts/check.sh all $(ARGS)

test-clients: $(STAMPS)/dev ## real clients (docs/clients.md), and the page in a real Chromium; part of test-all
	@$(VENV)/bin/python -m pytest tests/clients $(ARGS)

test-tools: # nginx and curl, for the tests that need a real proxy and a real client
	@scripts/install-test-tools.sh

lint: $(STAMPS)/dev ## ruff, mypy --strict and the import order
	@scripts/lint.sh

format: $(STAMPS)/dev ## format and fix the code with ruff
	$(VENV)/bin/ruff format $(SOURCES)
	$(VENV)/bin/ruff check --fix $(SOURCES)

bench: $(STAMPS)/dev ## compare Holdfast with other engines on this machine's CPU (docs/benchmarks.md)
	@$(VENV)/bin/python benchmarks/cpu_peers.py $(ARGS)

clean: ## remove caches and build leftovers (rm -rf .venv removes the environment)
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# What is installed follows from these files alone: a second run installs nothing.
$(STAMPS)/dev: $(INSTALLED_FROM)
	@PYTHON="$(PYTHON)" scripts/install.sh dev

$(STAMPS)/runtime: $(INSTALLED_FROM)
	@PYTHON="$(PYTHON)" scripts/install.sh runtime
