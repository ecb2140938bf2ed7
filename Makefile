# Tandem. `make` lists what there is; `make run` and `make test` install what they need on their first call.

VENV   := .venv
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# A process a core and one more, since many tests wait; each with files of its own, so that what a module starts is started
# once. They begin in the order of tests/order.py.
SPREAD := --numprocesses $(shell expr $$(nproc) + 1) --maxprocesses 8 --dist loadfile --no-loadscope-reorder
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# A machine that is lent for its GPU has torch in a Python of its own and no network: what runs there needs no setup.
TORCH_PYTHON := $(or $(PYTHON),$(wildcard $(BIN)/python),$(shell command -v python3 python | head -1))

# Further flags for what a target calls, such as make test ARGS="-k transfer".
ARGS   ?=

# The settings given on the command line of make. One that a target does not take stops it, where there is a Python to say so.
GIVEN := $(foreach name,$(.VARIABLES),$(if $(findstring command,$(origin $(name))),$(name)))
ifneq ($(and $(GIVEN),$(MAKECMDGOALS)),)
WRONG := $(shell $(or $(wildcard $(BIN)/python),$(PYTHON),python3) .ci/make_settings.py "$(MAKECMDGOALS)" $(GIVEN) 2>/dev/null)
$(if $(WRONG),$(error $(WRONG)))
endif

# What make run hands to tandem serve, which knows the defaults: the settings that the comment of the target names.
SETTINGS := $(shell sed -n 's/^run:.*settings: //p' $(firstword $(MAKEFILE_LIST)) | grep -o '[A-Z_]*=' | tr -d =)
UP_FLAGS = $(foreach name,$(filter-out DETERMINISTIC,$(filter $(SETTINGS),$(GIVEN))),\
	--$(shell echo $(name) | tr A-Z_ a-z-) "$($(name))") $(if $(filter 1 true yes,$(DETERMINISTIC)),--deterministic)

# Flags of make bench-engine, likewise the settings given on the command line; MODEL is a folder or one of the random-weight shapes 125m and 1b.
BENCH_FLAGS = $(foreach name,MODEL DTYPE OUT,$(if $(findstring command,$(origin $(name))),\
	--$(shell echo $(name) | tr A-Z a-z) "$($(name))"))

# Flags of make eval and make bench-quant, likewise; FORMS is one or several in quotes.
EVAL_FLAGS = $(foreach name,MODEL PLAIN TEXT FORMS DTYPE TOKENS OUT,$(if $(findstring command,$(origin $(name))),\
	--$(shell echo $(name) | tr A-Z a-z) "$($(name))"))

QUANT_FLAGS = $(foreach name,MODEL FORMS OUT,$(if $(findstring command,$(origin $(name))),\
	--$(shell echo $(name) | tr A-Z a-z) "$($(name))"))

# Flags of make bench-kernels, likewise.
KERNEL_FLAGS = $(foreach name,ONLY OUT,$(if $(findstring command,$(origin $(name))),\
	--$(shell echo $(name) | tr A-Z a-z) "$($(name))"))

# The tests of Kubernetes run where its programs are: KUBEBUILDER_ASSETS, or the shared folder beside the checkout.
KUBERNETES := $(if $(KUBEBUILDER_ASSETS),yes,$(if $(wildcard ../shared/kubebuilder/kube-apiserver.xz),yes))

# Flags of make loadtest, likewise; tables, page and windows lie beside OUT.
LOADTEST_FLAGS = $(foreach name,SHAPE MODEL OUT,$(if $(findstring command,$(origin $(name))),\
	--$(shell echo $(name) | tr A-Z a-z) "$($(name))")) $(if $(filter 1 true yes,$(CONTINUE)),--continue)

# Flags of make bench-index, likewise; BLOCKS is one size of the index or several in quotes.
INDEX_FLAGS = $(foreach name,BLOCKS PAIRS,$(if $(findstring command,$(origin $(name))),\
	--$(shell echo $(name) | tr A-Z a-z) $($(name)))) $(if $(findstring command,$(origin OUT)),--out "$(OUT)")

# Flags of make bench-prefix, likewise; WORKERS is one size of a pool or several in quotes.
PREFIX_FLAGS = $(foreach name,TRACE REQUESTS WORKERS PARTS,$(if $(findstring command,$(origin $(name))),\
	--$(shell echo $(name) | tr A-Z a-z) $($(name)))) $(if $(findstring command,$(origin OUT)),--out "$(OUT)")

# A venv each: they need versions that exclude each other.
CLIENTS := sdks lm-eval guidellm aiperf

# Python compiles what is imported, once, and keeps it; pip would compile thousands of modules that nothing imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup run test test-all test-gpu test-clients test-timing test-neon test-k8s k8s-programs lint format proto lock demo-model demo-draft demo-head eval bench bench-engine bench-peers bench-quant bench-speculation bench-lora bench-kernels gpu-check gpu-kit bench-index bench-prefix bench-router bench-overload bench-long-prompt bench-parallel bench-planner loadtest chaos soak clean test-image always wheel page-browser mutation fuzz

##@ Use
help:  ## list the targets
	@awk -F ':.*## ' '/^##@ / { printf "%s%s\n", sep, substr($$0, 5); sep = "\n" } \
		/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(BIN)/.project shared/rpc/pb/__init__.py $(BIN)/.kernels  ## install everything into .venv (done by the others when needed); WHEEL=path takes its C++ kernels and needs no g++

run: setup  ## serve a model here; settings: MODEL=folder|ORG/NAME PREFILL=n DECODE=n TP=n PP=n PREFILL_TP=n DECODE_TP=n EP=n PREFILL_EP=n DECODE_EP=n ROUTERS=n DTYPE=bf16 QUANTIZATION=int4 KV_DTYPE=bf16 PREFILL_KV_DTYPE=bf16 SPECULATION=auto DRAFT=folder DEVICE=cuda:0,1 GPU_MEMORY=0.9 HTTP=host:port GRPC=host:port MODE=collocated DETERMINISTIC=1 ADAPTERS="name=folder …"
	@exec $(BIN)/tandem serve $(UP_FLAGS) $(ARGS)

clean:  ## remove what was made here, except .venv
	rm -rf .tandem .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist out tandem_llm.egg-info shared/rpc/pb
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

##@ Develop
test: setup page-browser $(if $(KUBERNETES),k8s-programs)  ## what must pass before a change lands, within 10 minutes on two slow cores: each path once, three model families, this processor's own instruction set; no GPU
	$(PYTEST) $(SPREAD) -m "not gpu and not timing and not slow $(if $(KUBERNETES),,and not k8s)" $(ARGS)

test-all: setup page-browser $(if $(KUBERNETES),k8s-programs)  ## every test that needs no GPU, for a night or a release, part by part; a table at the end: ONLY="kernels, e2e" CONTINUE=1 (leaves out what has passed)
	$(BIN)/python -m tests.all $(if $(KUBERNETES),--kubernetes) $(if $(filter 1 true yes,$(CONTINUE)),--continue) $(if $(ONLY),--only "$(ONLY)") $(ARGS)

test-k8s: setup k8s-programs  ## the tests against a real Kubernetes API server: KUBEBUILDER_ASSETS=folder; brings etcd and helm
	$(PYTEST) -m k8s tests/k8s $(ARGS)

page-browser:  ## bring Chromium and its driver, where apt-get may; without them the page's tests are skipped
	@{ command -v chromium && command -v chromedriver; } >/dev/null || { apt-get -qq update && apt-get -qq install --no-install-recommends chromium chromium-driver >/dev/null; } \
		|| echo "no Chromium here: the page's tests are skipped"

k8s-programs: $(BIN)/.packages
	@$(BIN)/python -m tests.k8s.programs

test-gpu:  ## the tests that need a GPU; where there is no .venv, with a Python that has torch, Triton and pytest: PYTHON=path
	$(TORCH_PYTHON) -m pytest -c tests/gpu/pytest.ini -m gpu tests/gpu $(ARGS)

test-image: setup k8s-programs  ## does an image answer a prompt, as no root and on a read-only root? needs podman: IMAGE=tandem:0.1.0-cpu
	$(BIN)/python -m tests.image.smoke "$(IMAGE)" $(ARGS)

test-clients: setup $(CLIENTS:%=.venv-clients/%/.packages) .venv-clients/node/.packages  ## the clients that people have (SDKs, LangChain, LiteLLM, lm-eval, GuideLLM, aiperf, grpcurl, Node) against a cluster; they live in .venv-clients
	$(BIN)/python -m tests.clients $(abspath .venv-clients) $(ARGS)

# Pinned with all that they need, so that nothing is resolved; GuideLLM's torch is the one of the lock.
.venv-clients/%/.packages: tests/clients/requirements/%.txt $(BIN)/.packages
	$(BIN)/python -m venv --without-pip --clear .venv-clients/$*
	$(BIN)/uv pip install --quiet --no-deps --python .venv-clients/$*/bin/python -r $<
	$(if $(filter guidellm,$*),$(PIP) --python .venv-clients/$*/bin/python install --quiet --no-compile "$$($(TORCH))")
	@touch $@

.venv-clients/node/.packages: docs/examples/package.json
	@mkdir -p .venv-clients/node && cp $< .venv-clients/node/
	@if command -v npm >/dev/null; then npm install --prefix .venv-clients/node --silent --no-audit --no-fund; \
		else echo "npm is not installed: the Node examples are left out"; fi
	@touch $@

test-timing: setup  ## the tests that hold on a quiet machine only
	$(PYTEST) -m timing $(ARGS)

test-neon: setup  ## the C++ kernels as aarch64 computes them, emulated: needs Debian, root and an hour
	$(BIN)/python -m tests.neon $(ARGS)

lint: setup  ## formatting, lint, types, lock, made pages, proto/ against its baseline
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python .ci/lock.py --check
	$(BIN)/python .ci/reference.py --check
	$(BIN)/python .ci/api_reference.py --check
	$(BIN)/python .ci/chart_schema.py --check
	$(BIN)/python .ci/proto_check.py --check
	$(BIN)/python -m services.monitoring --check

format: setup  ## format, and fix what ruff can fix
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

wheel: setup  ## a wheel with the C++ kernels of every instruction set, the stubs and the demo model: OUT=folder
	$(BIN)/python .ci/build_wheel.py --out "$(or $(OUT),dist)" $(ARGS)

proto: shared/rpc/pb/__init__.py  ## generate the gRPC stubs from proto/

lock: $(BIN)/.project  ## resolve pyproject.toml into requirements.lock; newest versions: ARGS=--upgrade
	$(BIN)/python .ci/lock.py $(ARGS)

demo-model: setup  ## train models/demo from nothing
	$(BIN)/python models/recipe/train.py $(ARGS)

demo-draft: setup  ## train models/demo-draft, which guesses for the demo model
	$(BIN)/python models/recipe/draft.py $(ARGS)

demo-head: setup  ## train models/demo-head, the demo model with a head that guesses for it
	$(BIN)/python models/recipe/head.py $(ARGS)

eval: setup  ## what fewer bits cost a model in quality: perplexity, KL, equal choices: MODEL=path PLAIN=path TEXT=path FORMS="stored int8 int4 fp8 w8a8 w4a8 kv-bf16" DTYPE=fp32|bf16 TOKENS=4096 OUT=file
	$(BIN)/python -m loadtest.bench eval $(EVAL_FLAGS) $(ARGS)

bench: bench-engine bench-index bench-router  ## the benchmarks that need neither peers nor a GPU: MODEL=125m|1b|path DTYPE=bf16|fp32 BLOCKS="100000 1000000" PAIRS=2000

bench-engine: setup  ## prefill and decode beside the limits of the hardware: MODEL=125m|1b|path DTYPE=bf16|fp32 OUT=file DEVICE=cpu|cuda
	$(BIN)/python -m $(if $(filter cuda,$(DEVICE)),loadtest.bench engine-cuda $(if $(OUT),--out "$(OUT)"),loadtest.bench engine $(BENCH_FLAGS)) $(ARGS)

bench-kernels: setup  ## the Triton kernels beside the limits of a GPU, which it needs: ONLY=op OUT=file
	$(BIN)/python -m loadtest.bench kernels $(KERNEL_FLAGS) $(ARGS)

gpu-check:  ## all that first minutes on a GPU should tell, with a Python that has torch where there is no .venv; another call with the same OUT continues: OUT=file MINUTES=9.5 ONLY="engine mixed" PYTHON=path
	$(TORCH_PYTHON) -m loadtest.bench.gpu_check --out "$(or $(OUT),out/gpu-check.json)" $(if $(MINUTES),--minutes $(MINUTES)) $(if $(ONLY),--only $(ONLY)) $(ARGS)

gpu-kit: setup  ## what such a machine lacks to run a whole cluster without network, into out/gpu-kit.tar.xz, from where gpu-check takes it: FOR=3.12 (its Python)
	$(BIN)/python .ci/gpu_kit.py $(if $(FOR),--python $(FOR)) $(ARGS)

loadtest: setup  ## mode auto, two pools and collocated by goodput under the same requests, 15 minutes: OUT=file CONTINUE=1 SHAPE=xs|s|b MODEL=path
	$(BIN)/python -m loadtest baseline $(LOADTEST_FLAGS) $(ARGS)

bench-index: setup  ## match, publish and memory of the block index by its size: BLOCKS="100000 1000000" PAIRS=2000 OUT=file
	$(BIN)/python -m loadtest.bench index $(INDEX_FLAGS) $(ARGS)

bench-peers: setup  ## our engine and its peers in turns on the same weights: MODEL=125m|1b|qwen3-next-small OUT=file
	$(BIN)/python -m loadtest.bench peers $(BENCH_FLAGS) $(ARGS)

bench-quant: setup  ## int8, int4, fp8, w8a8 and w4a8 beside our plain weights, OpenVINO GenAI and llama.cpp, in turns: MODEL=1b|4b|125m FORMS="int8 int4 fp8 w8a8 w4a8" OUT=file
	$(BIN)/python -m loadtest.bench quant $(QUANT_FLAGS) $(ARGS)

bench-speculation: setup  ## answers with guesses of what comes next beside the same without, in turns; with PEERS="openvino_genai llama_cpp_python" beside theirs: MODEL=1b|125m|folder DRAFT=125m|folder HEADS=folder OUT=file
	$(BIN)/python -m loadtest.bench $(if $(PEERS),speculation-peers --peers "$(PEERS)",speculation) $(foreach name,MODEL DRAFT HEADS OUT,$(if $(findstring command,$(origin $(name))),--$(shell echo $(name) | tr A-Z a-z) "$($(name))")) $(ARGS)

bench-lora: setup  ## steps with adapters beside those of the base model alone, in turns: MODEL=1b|125m|path DTYPE=bf16|fp32 OUT=file
	$(BIN)/python -m loadtest.bench lora $(BENCH_FLAGS) $(ARGS)

bench-router: setup  ## what a router adds to a request, and how many tokens it passes on: OUT=file
	$(BIN)/python -m loadtest.bench router $(if $(findstring command,$(origin OUT)),--out "$(OUT)") $(ARGS)

bench-overload: setup  ## a router at three times its workers' capacity: OUT=file
	$(BIN)/python -m loadtest.bench overload $(if $(findstring command,$(origin OUT)),--out "$(OUT)") $(ARGS)

bench-parallel: setup  ## sums over ranks beside gloo, messages between two hosts, steps at tp 2 beside one process with two threads: MODEL=125m|1b|qwen3-moe DTYPE=bf16|fp32 OUT=file
	$(BIN)/python -m loadtest.bench parallel $(BENCH_FLAGS) $(ARGS)

bench-long-prompt: setup  ## what long prompts do to running answers, disaggregated and collocated: OUT=file
	$(BIN)/python -m loadtest.bench long-prompt $(if $(findstring command,$(origin OUT)),--out "$(OUT)") $(ARGS)

bench-prefix: setup  ## prefix hits of a fleet beside one ideal cache, and TTFT with the store: TRACE=path REQUESTS=n WORKERS="1 2 4" PARTS="index no-index store ttft" OUT=file
	$(BIN)/python -m loadtest.bench prefix $(PREFIX_FLAGS) $(ARGS)

bench-planner: setup  ## the planner in the simulator, on a compressed day or a trace, beside a clairvoyant schedule: TRACE=path OUT=file
	$(BIN)/python -m loadtest.simulator.planning $(if $(TRACE),--trace "$(TRACE)" --begin "6 1",--day) $(if $(findstring command,$(origin OUT)),--out "$(OUT)") $(ARGS)

chaos: setup  ## kill, stop, hang, drain and cut off each part under streams, about 2 hours: ONLY="decode SIGKILL, router" OUT=file CONTINUE=1 (keeps the rows in OUT)
	$(BIN)/python -m loadtest.chaos $(if $(filter 1 true yes,$(CONTINUE)),--continue) $(if $(ONLY),--only "$(ONLY)") $(if $(findstring command,$(origin OUT)),--out "$(OUT)") $(ARGS)

soak: setup  ## kill a part every 10 s under streams, 10 minutes: DURATION=seconds SPARE="router, kvstore" OUT=file
	$(BIN)/python -m loadtest.chaos.soak $(if $(findstring command,$(origin DURATION)),--duration "$(DURATION)") $(if $(findstring command,$(origin SPARE)),--spare "$(SPARE)") $(if $(findstring command,$(origin OUT)),--out "$(OUT)") $(ARGS)

mutation: setup  ## sow small faults into the core's parts, one at a time; does a test notice? COUNT=mutants SEED=n ONLY=pool,tiers OUT=path CONTINUE=1 (keeps the results in OUT)
	OMP_NUM_THREADS=1 TEST_EXAMPLES=all nice $(BIN)/python -m tests.mutation $(if $(filter 1 true yes,$(CONTINUE)),--continue) $(foreach name,COUNT SEED ONLY OUT,$(if $(findstring command,$(origin $(name))),\
		--$(shell echo $(name) | tr A-Z a-z) "$($(name))")) $(ARGS)

fuzz: setup  ## hostile and random input against the HTTP and gRPC edge, sessions and block messages: CASES=100000 OUT=file
	$(BIN)/python -m tests.fuzz $(foreach name,CASES OUT,$(if $(findstring command,$(origin $(name))),\
		--$(shell echo $(name) | tr A-Z a-z) "$($(name))")) $(ARGS)

# --- what setup is made of: each step leaves a file, and is done again when what it depends on changes ---

$(VENV)/pyvenv.cfg:
	@found=; for python in $${PYTHON:-python3.11 python3 python3.12 python3.13 python3.14 python}; do \
		if "$$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then \
			found="$$python"; break; \
		fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "Tandem needs Python 3.11 to 3.14 with its venv module (Debian: apt-get install python3-venv)." >&2; \
		echo "$${PYTHON:-python3 and python3.11 to python3.14}: none found; name yours: make PYTHON=/path/to/python3" >&2; \
		exit 1; \
	fi; \
	echo "== $(VENV) with $$("$$found" --version)"; \
	rm -rf $(VENV) && "$$found" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# torch first and with its own dependencies (a CUDA build brings its libraries), all else without any: nothing replaces torch.
# Triton is such a library: a torch build that asks for one gets the very version it names; beside any other build stands the lock's.
TORCH  = grep '^torch==' requirements.lock
TRITON = grep '^triton==' requirements.lock
$(BIN)/.packages: requirements.lock $(VENV)/pyvenv.cfg
	@grep -v '^triton==' requirements.lock >$(BIN)/.constraints
	@echo "== $$($(TORCH)), by far the largest package"
	@$(PIP) install --no-compile --constraint $(BIN)/.constraints "$$($(TORCH))"
	@echo "== the other packages of requirements.lock"
	@$(PIP) install --quiet --no-compile --no-deps --requirement $(BIN)/.constraints
	@grep -qs '^Requires-Dist: triton' $(VENV)/lib/python3.*/site-packages/torch-*.dist-info/METADATA \
		|| $(PIP) install --quiet --no-compile --no-deps "$$($(TRITON))"
	@touch $@

$(BIN)/.project: pyproject.toml $(BIN)/.packages
	@echo "== tandem itself"
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

shared/rpc/pb/__init__.py: $(wildcard proto/tandem/v1/*.proto) shared/rpc/generate.py $(BIN)/.packages
	@echo "== gRPC stubs"
	@$(BIN)/python shared/rpc/generate.py >/dev/null

# A wheel's are preferred where one is given. Where they cannot be compiled, the reason is printed and torch's own ops
# serve.
$(BIN)/.kernels: $(wildcard shared/kernels/cpu/source/*) shared/kernels/cpu/build.py $(BIN)/.project $(if $(WHEEL),always)
	@echo "== C++ kernels"
	@$(if $(WHEEL),$(BIN)/python -m shared.kernels.cpu.from_wheel "$(WHEEL)")
	@$(BIN)/python -m shared.kernels.cpu.build
	@touch $@
