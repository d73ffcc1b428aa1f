# Needs python3 (3.11 or newer, with venv) and make. `make demo` and `make test` set up by themselves.
#   ENGINE=cpu|gpu   which build of vLLM; default: gpu where nvidia-smi finds one
#   PYTHON=...       the Python that makes .venv
#   TESTS=...        what `make test` runs; default: everything

SHELL := bash
.DEFAULT_GOAL := help
PYTHON ?= python3
TESTS ?= tests
BIN := .venv/bin

ifndef ENGINE
ENGINE := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
endif
ifeq ($(filter $(ENGINE),cpu gpu),)
$(error ENGINE=$(ENGINE) is unknown; use ENGINE=cpu or ENGINE=gpu)
endif
# Written last: an interrupted set-up does not count as done.
READY := .venv/.ready-$(ENGINE)

.PHONY: help setup demo test lint format docs bench clean

help:
	@echo "make setup   install into .venv what is needed (ENGINE=$(ENGINE))"
	@echo "make demo    train a tiny model while a fleet of two engines evaluates it"
	@echo "make test    run the tests, with real vLLM (TESTS=tests/unit for a part)"
	@echo "make lint    ruff, mypy, shellcheck, and whether docs/reference.md is up to date"
	@echo "make format  let ruff mend what it can"
	@echo "make docs    write docs/reference.md anew from --help"
	@echo "make bench   measure start-up and more"
	@echo "make clean   remove .venv and what tools left"

setup: $(READY)

$(READY): requirements/$(ENGINE).txt requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "evalkit needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1); name one with PYTHON=python3.11" >&2; \
	  exit 1; }
	@rm -f .venv/.ready-*
	@# Both builds of vLLM have the same files: never one over the other.
	$(PYTHON) -m venv $$([ "$$(cat .venv/.engine 2>/dev/null)" = $(ENGINE) ] || echo --clear) .venv
	@echo $(ENGINE) >.venv/.engine
	@echo "installing vLLM for the $(ENGINE) and the rest: a few minutes, a few GB"
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps -r requirements/$(ENGINE).txt -r requirements/dev.txt || { \
	  echo "set-up failed; where pip does not find PyTorch, set PIP_EXTRA_INDEX_URL (see CONTRIBUTING.md, Set-up)" >&2; \
	  exit 1; }
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@# Commands start sooner, also where Python may not write bytecode by itself.
	$(BIN)/python -m compileall -q evalkit
	@touch $@

demo: $(READY)
	scripts/demo.sh

test: $(READY)
	$(BIN)/python -m pytest -p tests.vllm_required --numprocesses 3 --dist loadgroup $(TESTS)

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/shellcheck scripts/*.sh .ci/run
	$(BIN)/python scripts/make_reference.py --check

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(READY)
	$(BIN)/python scripts/make_reference.py

bench: $(READY)
	@for bench in benchmarks/bench_*.py; do echo "== $$bench"; $(BIN)/python $$bench || exit 1; done

clean:
	rm -rf .venv build dist demo-run evalkit.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
