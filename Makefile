# `make` alone lists the targets. Needs Python >= 3.11, git and make; everything else goes into .venv.
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))) python3)
VENV := .venv
IN_VENV := $(VENV)/bin/python
SOURCES := $(wildcard megatron tools benchmarks pretrain_gpt.py)
DATA ?=
MINUTES ?=
BASE ?=
OUT ?=
# The tests in these folders start ranks; the others need one core, and print what they print when they end.
OF_RANKS := tests/distributed tests/functional_tests
TWO_AT_ONCE := --no-print-directory --jobs=2 --keep-going test-ranks test-others
SELECTED ?=

.DEFAULT_GOAL := help
.PHONY: help env lock train test test-fast test-ranks test-others check structure soak same-losses gpu clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(VENV)/.installed  ## make .venv and install what is pinned

$(VENV)/.installed: requirements/cpu.txt pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'This project needs Python >= 3.11: make PYTHON=/path/to/python3.11'; exit 1; }
	@echo 'Installing what requirements/cpu.txt pins into $(VENV) (once, 1 GB or more)'
	@$(PYTHON) -m venv $(VENV)
	@$(IN_VENV) -m pip install -qq --requirement requirements/cpu.txt
	@$(IN_VENV) -m pip install -qq --no-deps --no-build-isolation --editable .
	@touch $@

lock:  ## rewrite requirements/cpu.txt from what .venv holds
	@grep '^#' requirements/cpu.txt > $(VENV)/lock.txt
	@$(IN_VENV) -m pip freeze --all --exclude pip --exclude-editable | sed 's/+cpu$$//' >> $(VENV)/lock.txt
	@mv $(VENV)/lock.txt requirements/cpu.txt

train: env  ## pretrain a small mixture-of-experts GPT on real text (DATA=file.txt or file.jsonl: on yours; MINUTES=2)
	$(IN_VENV) tools/quickstart.py $(if $(DATA),--data "$(DATA)") $(if $(MINUTES),--minutes $(MINUTES))

test: env  ## run every test
	@$(MAKE) $(TWO_AT_ONCE)

test-fast: env  ## run the tests that are not slow
	@$(MAKE) $(TWO_AT_ONCE) SELECTED='-m "not slow"'

test-ranks:
	$(IN_VENV) -m pytest $(OF_RANKS) $(SELECTED)

test-others:
	output=$$(mktemp); $(IN_VENV) -m pytest tests $(OF_RANKS:%=--ignore=%) $(SELECTED) > $$output 2>&1; status=$$?; \
		cat $$output; rm $$output; exit $$status

check: env  ## format, lint, types and structure, without changing anything
	$(IN_VENV) -m ruff format --check .
	$(IN_VENV) -m ruff check .
	$(IN_VENV) -m mypy $(SOURCES) tests/harness.py tests/structure
	$(IN_VENV) -m pytest --quiet tests/structure

structure:  ## print every place that breaks a limit of the house style (seconds; for use while working)
	@$(IN_VENV) -m tests.structure

soak: env  ## run every test with its long counts
	@SOAK=1 $(MAKE) $(TWO_AT_ONCE)

same-losses: env  ## train small runs with BASE=commit and with these files: every logged number must be the same
	@test -n "$(BASE)" || { echo 'Which commit to compare with: make same-losses BASE=main'; exit 1; }
	$(IN_VENV) tools/same_losses.py $(BASE)

# Without `env`: a machine with a GPU brings its own torch, and may have no network.
gpu:  ## on a machine with a GPU: its tests and benchmarks, 12 minutes (OUT=folder: results go there)
	$(or $(wildcard $(IN_VENV)),$(PYTHON)) benchmarks/gpu/run_all.py $(if $(OUT),--out "$(OUT)")

clean:  ## remove the environment, caches and build output; keeps runs/ and data/
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
