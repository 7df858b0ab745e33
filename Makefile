# `make` alone lists the targets. Needs Python >= 3.11, git and make; everything else goes into .venv.
PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))) python3)
VENV := .venv
IN_VENV := $(VENV)/bin/python
REQUIREMENTS := requirements/cpu.txt
SOURCES := $(wildcard megatron benchmarks pretrain_gpt.py model_provider.py gpt_builders.py)
DATA ?=
KEY ?=
MINUTES ?=
BASE ?=
OUT ?=
CALL ?=
VERSION ?=
ORDER ?=
TEST_OPTIONS ?=
# Three workers, each with one test file at a time: tests wait for ranks and files so often that two leave a core idle.
PYTEST = $(IN_VENV) -m pytest --numprocesses=3 --dist=loadfile --no-loadscope-reorder $(if $(ORDER),--order-seed=$(ORDER)) $(TEST_OPTIONS)

.DEFAULT_GOAL := help
.PHONY: help env lock train test test-fast test-torch check check-types check-structure structure soak same-losses same-losses-faults gpu docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(VENV)/.installed  ## make .venv and install what is pinned

$(VENV)/.installed: $(REQUIREMENTS) pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'This project needs Python >= 3.11: make PYTHON=/path/to/python3.11'; exit 1; }
	@echo 'Installing what $(REQUIREMENTS) pins into $(VENV) (once, 1 GB or more)'
	@$(PYTHON) -m venv $(VENV)
	@$(IN_VENV) -m pip install -qq --requirement $(REQUIREMENTS)
	@$(IN_VENV) -m pip install -qq --no-deps --no-build-isolation --editable .
	@touch $@

lock:  ## rewrite requirements/cpu.txt from what .venv holds
	@grep '^#' requirements/cpu.txt > $(VENV)/lock.txt
	@$(IN_VENV) -m pip freeze --all --exclude pip --exclude-editable | sed 's/+cpu$$//' >> $(VENV)/lock.txt
	@mv $(VENV)/lock.txt requirements/cpu.txt

train: env  ## pretrain a small mixture-of-experts GPT on real text (DATA=file or folder: on yours; KEY=column; MINUTES=2)
	$(IN_VENV) tools/quickstart.py $(if $(DATA),--data "$(DATA)") $(if $(KEY),--json-key "$(KEY)") $(if $(MINUTES),--minutes $(MINUTES))

test: env  ## run every test except soak-only ones (ORDER=7: in the random order of that seed)
	$(PYTEST)

test-fast: env  ## run the tests that are not slow
	$(PYTEST) -m "not slow and not soak"

test-torch:  ## run test-fast on another torch, in an environment of its own: VERSION=2.14.1 makes .venv-torch-2.14.1
	@$(PYTHON) tests/torch_requirements.py "$(VERSION)" ".venv-torch-$(VERSION)/requirements.txt"
	@$(MAKE) --no-print-directory VENV=.venv-torch-$(VERSION) REQUIREMENTS=.venv-torch-$(VERSION)/requirements.txt test-fast

check: env  ## format, lint, types and structure, without changing anything
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target check-types check-structure

check-types:
	$(IN_VENV) -m mypy $(SOURCES) tests/harness.py tests/structure

check-structure:
	$(IN_VENV) -m ruff format --check .
	$(IN_VENV) -m ruff check .
	$(IN_VENV) -m pytest --quiet tests/structure

structure: env  ## print what breaks a structure rule, and measures of the code next to those of other code bases
	@$(IN_VENV) -m tests.structure

soak: env  ## run every test, with long counts (hours)
	SOAK=1 $(PYTEST)

same-losses: env  ## train small runs with BASE=commit and with the working tree: every logged number must be the same
	@test -n "$(BASE)" || { echo 'Which commit to compare with: make same-losses BASE=main'; exit 1; }
	$(IN_VENV) tools/same_losses.py $(BASE)

same-losses-faults: env  ## put faults into copies of the committed HEAD; same-losses must notice each
	$(IN_VENV) tools/seeded_faults.py

# Without `env`: a machine with a GPU brings its own torch, and may have no network.
gpu:  ## on a machine with a GPU: measure (call A, 480 s), then test (call B, 170 s) (CALL=A or B; OUT=folder of the results)
	$(or $(wildcard $(IN_VENV)),$(PYTHON)) benchmarks/gpu/run_all.py --resume $(if $(CALL),--call $(CALL)) $(if $(OUT),--out "$(OUT)")

docs: env  ## build the documentation as a site into site/
	@NO_MKDOCS_2_WARNING=1 $(IN_VENV) -m mkdocs build --strict --quiet
	@echo 'To read it: $(IN_VENV) -m http.server --directory site, then http://localhost:8000'

clean:  ## remove the environment, caches and build output; keeps runs/ and data/
	rm -rf $(VENV) .venv-torch-* build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
