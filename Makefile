# Two commands on a fresh machine: `make demo` and `make test`. Both set up what they need in .venv.
PYTHON ?= python3
# The CPU build that the tests run against; the package itself accepts a range (see pyproject.toml).
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow gpu-check lint docs docs-serve pictures clean

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[runtime,playground,dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/zbsolve demo --out demo_out

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: lint
	$(BIN)/python -m pytest

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow --timeout 3600

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: $(STAMP)
	$(BIN)/python -m mkdocs serve

# Every picture of the documentation anew; needs a Chromium.
pictures: $(STAMP)
	$(BIN)/python docs/make_pictures.py

# Every test that needs a GPU; without one they are skipped, and gpu-results.xml says so.
gpu-check: $(STAMP)
	$(BIN)/python -m pytest tests/gpu -m gpu --timeout 1200 --junitxml=gpu-results.xml

clean:
	rm -rf $(VENV) build dist demo_out site *.egg-info
