# The same commands for a newcomer, for CI and for us. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PORT ?= 3000

.PHONY: help setup serve test lint types imports unit proto bench docs test-models clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(STAMP) ## create .venv and install Legato with its development tools

# constraints.txt pins torch, and pip must meet the pin first: asked for torch through a range it would fetch the
# newest CUDA build before it looks at anything else.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

serve: setup ## serve the default model on port 3000
	$(BIN)/text-generation-launcher --port $(PORT)

test: lint types imports unit ## everything CI runs

lint: setup
	$(BIN)/ruff check legato tests examples
	$(BIN)/ruff format --check legato tests examples

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

unit: setup
	$(BIN)/pytest

proto: setup ## regenerate legato/pb from proto/
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=legato/pb --pyi_out=legato/pb --grpc_python_out=legato/pb proto/generate.proto
	sed -i 's/^import generate_pb2 as/from legato.pb import generate_pb2 as/' legato/pb/generate_pb2_grpc.py

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
