# make demo: install and run the main job on embedded data; make test: lint and all tests.
# Both create .venv on first use and reuse it while pyproject.toml and constraints.txt are unchanged.
PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Else each process of the tests would compile all sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint compiled format docs bench fuzz kill clean

demo: $(STAMP)
	$(BIN)/dmltool demo

# One thread each: most tests are too small to gain from threads. Three processes, because many wait.
test: $(STAMP)
	$(MAKE) -j2 lint compiled
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The loops and the tests, once: else each process of the tests would compile them.
compiled: $(STAMP)
	$(BIN)/python -m tests.compile

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python -m docs.generate

bench: $(STAMP)
	$(BIN)/python -m benchmarks.ranks
	$(BIN)/python -m benchmarks.evaluate
	$(BIN)/python -m benchmarks.kmeans
	$(BIN)/python -m benchmarks.train
	$(BIN)/python -m benchmarks.losses
	$(BIN)/python -m benchmarks.loader
	$(BIN)/python -m benchmarks.export
	$(BIN)/python -m benchmarks.embed
	$(BIN)/python -m benchmarks.report
	$(BIN)/python -m benchmarks.shards
	$(BIN)/python -m benchmarks.processes
	$(BIN)/python -m benchmarks.size

# Damaged files of every format, and writers killed at random moments: docs/reliability.md
FILES ?= 1000
KILLS ?= 100
SEED ?= 0

fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --files $(FILES) --seed $(SEED)

kill: $(STAMP)
	$(BIN)/python -m tests.fuzz.kill --kills $(KILLS) --seed $(SEED)

# pip takes its ordinary settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, pip.conf): they
# decide whether torch is the large CUDA build or the small one for CPUs.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[cpu,readers,remote,stores,extras,sweep,dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
