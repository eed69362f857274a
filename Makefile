# make install Mosaic and PyTorch into .venv
# make demo    plan LLaDA-8B at 128K for an RTX 3090, then load a small checkpoint and run a step in exactly the planned bytes
# make test    install the test extras and run the tests
# make soak    the slow tests, every kernel for every card, and ten minutes of fuzzing
# make lint    style and types
# make bench   CPU benchmarks of a committed tree; records go to benchmarks/results and into the docs
# make report  tables and plots of the recorded GPU results, into the docs

VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: install demo test soak lint bench report clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e '.[torch]'
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e '.[solve,torch,viz,serve,dev]'
	@touch $@

install: $(VENV)/.demo

demo: $(VENV)/.demo
	$(BIN)/mosaic plan --model llada-8b --ctx 128k --device rtx-3090
	$(BIN)/python examples/run_step.py

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu and not soak"

soak: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "soak and not gpu"
	$(BIN)/python -m tests.fuzz --minutes 10

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.planning
	$(BIN)/python -m benchmarks.search
	$(BIN)/python -m benchmarks.offsets
	$(BIN)/python -m benchmarks.offset_families
	$(BIN)/python -m benchmarks.report

report: $(VENV)/.dev
	$(BIN)/python -m benchmarks.report

clean:
	rm -rf $(VENV) build dist *.egg-info
