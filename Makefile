# Each target sets up .venv on first use. Needs Python 3.11+ and make, nothing else.
PYTHON ?= python3
MODULE ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# They look at processes, memory and clocks of their own: nothing else runs beside them.
ALONE := tests/test_ranks.py tests/test_ledger.py tests/test_live.py

.PHONY: check test lectures release bench
.DEFAULT_GOAL := check

check: $(READY)
	$(BIN)/autograder check $(MODULE)

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/autograder release --check
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(ALONE:%=--ignore %)
	$(BIN)/python -m pytest $(ALONE)

lectures: $(READY)
	$(BIN)/python -m autograder.grading.notebooks

release: $(READY)
	$(BIN)/autograder release

bench: $(READY)
	$(BIN)/python tests/bench.py $(MODULE)

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "The course needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt -e .
	touch $@
