# Two commands on a fresh machine with Python 3.11 or newer: `make serve` and `make test`.
# the first that runs and is new enough (a version manager's shim may be there and not run)
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8000

.PHONY: serve test test-browser test-all docs dist install

serve: $(VENV)/.installed
	$(BIN)/onebox serve --port $(PORT)

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

test-browser: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m browser

test-all: test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[clients]'
	$(BIN)/python -m pytest -m 'slow and not gpu and not browser' --timeout=900

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "site/index.html"

# a wheel and an sdist of what is committed, and the tests of both
dist: $(VENV)/.installed-dev
	@test -z "$$(git status --porcelain)" || { echo "uncommitted changes: a release is made of a commit"; exit 1; }
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m pytest -m "slow or not slow" tests/test_release.py --timeout=900

install: $(VENV)/.installed

# A stamp stands for a finished install; a broken one leaves none and is repeated.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "onebox needs Python 3.11 or newer with venv (on Debian: python3-venv). Name one: make PYTHON=/path/to/python3"; exit 1; }
	@echo "installing into $(VENV): torch is the largest part, a few minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[prompt]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the test tools into $(VENV)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[prompt,dev]'
	@touch $@
