# make train [CONFIG=configs/ppo/cartpole.yaml]   make test   make lint   make accept   make bench
PYTHON ?= python3
CONFIG ?= configs/ppo/cartpole.yaml
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt
EXTRAS ?= dev,atari,mujoco,dm-control,box2d,minari,onnx,ray,tune,video
DEV := $(VENV)/.installed-$(EXTRAS)

.PHONY: train test lint format accept bench docs clean
.DELETE_ON_ERROR:

train: $(VENV)/.core
	$(BIN)/rl-training train --config $(CONFIG)

# A process for each core, each with whole files: tests of a file share what they have trained. Within a process, small
# networks lose time to a second thread; see num_threads in docs/config.md.
test: export OMP_NUM_THREADS := 1
test: $(DEV)
	$(BIN)/python -m pytest -n auto --dist loadfile

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

accept: export OMP_NUM_THREADS := 1
accept: $(DEV)
	$(BIN)/python benchmarks/accept.py

bench: export OMP_NUM_THREADS := 1
bench: $(DEV)
	$(BIN)/python benchmarks/ppo_cartpole.py
	$(BIN)/python benchmarks/dqn_cartpole.py
	$(BIN)/python benchmarks/sac_pendulum.py
	$(BIN)/python benchmarks/trpo_cartpole.py
	$(BIN)/python benchmarks/dreamer.py
	$(BIN)/python benchmarks/search_speed.py

docs: $(DEV)
	$(BIN)/rl-training config reference > docs/config.md

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable ".[plot]"
	@touch $@

$(DEV): $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable ".[$(EXTRAS)]"
	@touch $(VENV)/.core $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build src/*.egg-info
