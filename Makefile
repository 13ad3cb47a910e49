# `make serve` and `make test` do everything, set-up included; docs/operations.md explains the steps.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PORT ?= 30000
ALGORITHM ?= GRAFT
# Folder of the draft; empty: the one that ships for the embedded model.
DRAFT ?=
# Extra arguments: of the server (`make serve ARGS="--context-length 2048"`) or of pytest (`make test ARGS="-k bench"`).
ARGS ?=

export SGLGRAFT_HOME ?= $(HOME)/.cache/sgl_graft
export UV_LINK_MODE ?= hardlink
export UV_PYTHON_DOWNLOADS := never
# A variable, because `pip download` of older releases does not know the flag.
export PIP_ROOT_USER_ACTION := ignore
# Set on some build machines; with it every start of a server would compile SGLang anew.
unexport PYTHONDONTWRITEBYTECODE
unexport VIRTUAL_ENV

# First interpreter of a supported version; asked only when something is to be set up.
PYTHON ?= $(shell for name in python3.11 python3.12 python3 python; do \
	"$$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null \
	&& command -v "$$name" && break; done)

UV := .tools/uv/bin/uv
BIN := .venv/bin
MODEL := smollm2-135m-instruct
MODEL_FILE := $(SGLGRAFT_HOME)/models/$(MODEL)/config.json
DOWNLOADS := $(SGLGRAFT_HOME)/downloads

.PHONY: help setup serve test soak lint lock gpu-check clean prerequisites

help:
	@echo "make serve      set up, then serve the embedded model on port $(PORT) (PORT=...)"
	@echo "make test       set up, then run the tests (ARGS=... goes to pytest)"
	@echo "make setup      only set up: environment from the lock file, model"
	@echo "make soak       the long tests"
	@echo "make lint       ruff and mypy"
	@echo "make gpu-check  the GPU kernels against their references; needs torch and Triton only"
	@echo "make lock       resolve requirements.lock anew"
	@echo "make clean      remove what the set-up put into this folder"

serve: setup
	@exec $(BIN)/sgl-graft serve --algorithm $(ALGORITHM) --port $(PORT) $(if $(DRAFT),--draft $(DRAFT)) $(if $(ARGS),-- $(ARGS))

test: setup
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder $(ARGS)

soak: setup
	@$(BIN)/python -m pytest -m soak --timeout 7200 $(ARGS)

lint: .venv/.project
	@$(BIN)/ruff check sgl_graft cuda_graph patches tests deploy
	@$(BIN)/ruff format --check sgl_graft cuda_graph patches tests deploy
	@$(BIN)/mypy

gpu-check:
	@"$$([ -x $(BIN)/python ] && echo $(BIN)/python || echo python3)" -m cuda_graph.check $(ARGS)

lock: $(UV)
	$(UV) pip compile -q --python-version 3.11 --python-platform x86_64-manylinux_2_35 --extra dev \
		--generate-hashes pyproject.toml -o requirements.lock

clean:
	rm -rf .venv .tools build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

# ---- set-up: each step leaves a file, and is skipped while that file is newer than what it was made from ----

setup: .venv/.project $(MODEL_FILE)

prerequisites:
	@missing=(); \
	[ "$$(uname -sm)" = "Linux x86_64" ] || missing+=("Linux on x86_64 (this is $$(uname -sm))"); \
	if [ -z "$(PYTHON)" ]; then \
		missing+=("Python 3.11: apt-get install python3.11 python3.11-venv"); \
	elif ! "$(PYTHON)" -c 'import pip' 2>/dev/null && ! "$(PYTHON)" -c 'import ensurepip' 2>/dev/null; then \
		missing+=("pip or venv of $(PYTHON): apt-get install python3-venv"); \
	fi; \
	command -v "$${CXX:-g++}" >/dev/null || missing+=("a C++ compiler: apt-get install g++"); \
	if [ $${#missing[@]} -gt 0 ]; then \
		echo "sgl_graft needs what this machine lacks:" >&2; printf '  %s\n' "$${missing[@]}" >&2; exit 1; \
	fi

# The wheel is kept beside the models, so that a fresh clone needs no network.
$(UV): requirements-uv.lock | prerequisites
	@echo "sgl_graft: installing uv into .tools/"
	@set -e; pip=("$(PYTHON)" -m pip); \
	if ! "$(PYTHON)" -c 'import pip' 2>/dev/null; then \
		"$(PYTHON)" -m venv .tools/pip; pip=(.tools/pip/bin/python -m pip); \
	fi; \
	options=(--quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: -r requirements-uv.lock); \
	rm -rf .tools/uv; mkdir -p "$(DOWNLOADS)"; \
	"$${pip[@]}" install "$${options[@]}" --no-index --find-links "$(DOWNLOADS)" --target .tools/uv 2>/dev/null || { \
		"$${pip[@]}" download "$${options[@]}" --dest "$(DOWNLOADS)"; \
		"$${pip[@]}" install "$${options[@]}" --no-index --find-links "$(DOWNLOADS)" --target .tools/uv; \
	}; touch $(UV)

# Everything in the cache: no network is used. Otherwise uv fetches what is missing.
.venv/.lock: requirements.lock | prerequisites $(UV)
	@echo "sgl_graft: building .venv from requirements.lock"
	@set -e; [ -x $(BIN)/python ] || $(UV) venv --quiet --python "$(PYTHON)" .venv; \
	install=($(UV) pip install --python $(BIN)/python --require-hashes -r requirements.lock); offline=; \
	if "$${install[@]}" --offline --dry-run >/dev/null 2>&1; then offline="--offline --quiet"; fi; \
	"$${install[@]}" $$offline || "$${install[@]}"; touch $@

.venv/.project: .venv/.lock pyproject.toml
	@$(UV) pip install --quiet --python $(BIN)/python --offline --no-deps --no-build-isolation -e . && touch $@

$(MODEL_FILE): | .venv/.project
	@$(BIN)/sgl-graft models get $(MODEL)
