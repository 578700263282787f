# Two commands on a fresh machine with Python 3.11 or newer: `make serve` and `make test`.
PYTHON ?= $(firstword $(foreach p,python3.13 python3.12 python3.11 python3,$(shell command -v $(p) 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8000

.PHONY: serve test lint install

serve: $(VENV)/.installed
	$(BIN)/onebox serve --port $(PORT)

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

install: $(VENV)/.installed

# A stamp stands for a finished install; a broken one leaves none and is repeated.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "onebox needs Python 3.11 or newer; found $$($(PYTHON) -V 2>&1). Name one: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[prompt,dev]'
	@touch $@
