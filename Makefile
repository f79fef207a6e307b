# Everything from a bare clone with only Python and make: `make demo`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: install demo test test-slow test-slow-again test-matrix late combination soak elastic faults clients lint bench clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $(READY)

install: $(READY)

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/python -m pytest -m "not slow and not matrix"

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

# All combinations of traits, and all examples with all configs; `make test` and `make test-slow` run a part of them.
test-matrix: $(READY)
	$(BIN)/python -m pytest -m matrix

# What NCCL does differently (tests/late_group.py, tests/backward_thread.py): the contract and the hooks on a late process
# group, and fails if a branch of the collectives has run neither there nor on Gloo.
ON_BOTH := $(addprefix tests/test_,contract.py collectives.py quantised.py allreduce.py powersgd.py post_localsgd.py zero_overlap.py \
	wire.py steps.py topology.py consistency.py)
late: export COVERAGE_PROCESS_START := $(CURDIR)/pyproject.toml
late: export COVERAGE_FILE := $(CURDIR)/.coverage
late: $(READY)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -m "not slow and not matrix" --backend late --backward-thread $(ON_BOTH) tests/test_verify.py
	$(BIN)/coverage run -m pytest -m "not slow and not matrix" $(ON_BOTH)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --show-missing --fail-under=100 --include='*/comm/collectives.py,*/comm/pieces.py,*/comm/means.py,*/comm/chains.py'

# Only the slow tests that failed last time.
test-slow-again: $(READY)
	$(BIN)/python -m pytest -m slow --last-failed --last-failed-no-failures none

# One case of tests/combinations again, or all cases of another seed: `make combination SEED=0 CASE=17`.
SEED ?= 0
combination: $(READY)
	cd tests && ../$(BIN)/python -m combinations --seed $(SEED) $(if $(CASE),--case $(CASE))

# Ten thousand steps with every hook, in processes that live on; and scripts whose ranks are killed again and again.
STEPS ?= 10000
soak: $(READY)
	$(BIN)/python -m tests.soak --seed $(SEED) --steps $(STEPS)

KILLS ?= 20
elastic: $(READY)
	$(BIN)/python -m tests.elastic --seed $(SEED) --kills $(KILLS)

# A thousand faults: ranks killed, stopped and slow, disks full, files damaged, ranks that differ; links cut, as root.
FAULTS ?= 1000
faults: $(READY)
	cd tests && ../$(BIN)/python -m faults --count $(FAULTS) --seed $(SEED)

# Other people's training loops with every hook; writes the table in docs/compatibility.md.
clients: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[clients]"
	cd tests && ../$(BIN)/python -m clients ../docs/compatibility.md

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/run_all.py

clean:
	rm -rf $(VENV) build dist *.egg-info out
