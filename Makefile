# Two commands do everything: `make run` and `make test`. Each makes the environment it needs.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: env run test bench lint clean

env: $(STAMP)

# Renewed when the dependencies change; the environment itself is kept.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

run: env
	$(BIN)/python -m paxlike.main --experiment=quickstart --mode=train --workdir=runs/quickstart

test: env
	$(BIN)/python -m pytest -n 2 --dist=loadgroup tests --ignore=tests/benchmarks

bench: env
	$(BIN)/python -m pytest tests/benchmarks -s

lint: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

clean:
	rm -rf .venv .venv-* .cache dist
