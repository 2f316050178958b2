# Everything happens in .venv: a fresh clone, make and a Python >= 3.10 are all it takes.
PYTHON ?= python3 python3.14 python3.13 python3.12 python3.11 python3.10
TORCH  ?=

# Written bytecode spares each worker of pytest, and each process that tests start, five seconds.
unexport PYTHONDONTWRITEBYTECODE

# Where there is a GPU these tests are those of a machine without one; `pytest -m gpu` runs those that need it.
CPU    := CUDA_VISIBLE_DEVICES=
VENV   := .venv
BIN    := $(VENV)/bin
# deepspeed compiles its operators at first use, not while being installed
PIP    := DS_BUILD_OPS=0 $(BIN)/python -m pip -qq --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-versions test-clients test-xla gpu mutants notebooks matrix bench tables exports docs check clean FORCE
.NOTPARALLEL: # two pips must not write to one .venv

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  with PYTHON=python3.12        the Python to make .venv with'
	@echo '  with TORCH="torch==2.13.0"    the torch to install (kept until another is named or make clean)'
	@echo '  a torch for CPU only, without gigabytes of CUDA libraries:'
	@echo '    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test'

demo: $(VENV)/.demo ## train small models with and without the tricks and draw a report
	$(BIN)/lightning-tricks demo

test: $(VENV)/.test check ## lint, check types, run doctests and fast tests
	$(CPU) $(BIN)/python -m pytest -n auto --dist loadfile

test-all: $(VENV)/.test-all check ## the same with the slow tests, Ray, the site and its pages
	$(CPU) $(BIN)/python -m pytest -n auto --dist loadfile -m "not gpu"

mutants: $(VENV)/.test ## plant 48 faults, one after the other, and show that a test finds each; ONLY="average plan"
	$(BIN)/python -m tests.mutants $(ONLY)

notebooks: $(VENV)/.test ## execute the notebooks in full, from the scripts beside them
	$(BIN)/python .ci/notebooks.py

matrix: $(VENV)/.test ## every trick in every regime: writes lightning_tricks_cli/matrix.json and docs/compatibility.md
	$(CPU) $(BIN)/python -m pytest tests/conformance tests/device -n auto --dist loadfile -m "not gpu" --deselect tests/conformance/test_matrix.py \
	    --matrix lightning_tricks_cli/matrix.json
	$(BIN)/python benchmarks/readme.py

bench: $(VENV)/.bench ## try every measurement of costs and gains, reduced; with FULL=1 renew the committed figures
	$(BIN)/python benchmarks/run.py $(if $(FULL),,--reduced)
	$(BIN)/python benchmarks/quality.py $(if $(FULL),,--reduced)
	$(BIN)/python benchmarks/finetune.py $(if $(FULL),,--reduced)
	$(BIN)/python benchmarks/finetune_images.py $(if $(FULL),,--reduced)
	$(BIN)/python benchmarks/language_model.py $(if $(FULL),,--reduced)
	$(BIN)/python benchmarks/gain_scaling.py $(if $(FULL),,--reduced)
	$(if $(FULL),,$(BIN)/python benchmarks/run.py --reduced resnet18 vit_small gpt lora_7b)

tables: $(VENV)/.test ## write the cards, the tables of docs/ and benchmarks/, the picture of gains
	$(BIN)/python benchmarks/readme.py

test-versions: $(VENV)/.made ## the fast tests with each Python, oldest and newest libraries; ONLY="3.12:newest:oldest:newest"
	$(BIN)/python .ci/test_versions.py $(ONLY)

test-clients: $(VENV)/torch.txt ## the tricks in other projects' models, each project in a .venv of its own; ONLY="chemprop timm"
	$(BIN)/python .ci/clients.py $(ONLY)

test-xla: $(VENV)/.made ## the tricks on a device of torch_xla, in a .venv of its own (7 GB); ONLY="-k EMA"
	$(BIN)/python .ci/xla.py $(ONLY)

gpu: ## with a GPU, nine minutes at a time: its tests, then benchmarks; SIMULATE=1 without one; MINUTES=60; ONLY="ema sam"
	$(or $(wildcard $(BIN)/python),$(firstword $(PYTHON))) .ci/gpu.py $(if $(SIMULATE),--simulate) $(if $(MINUTES),--minutes $(MINUTES)) $(ONLY)

exports: $(VENV)/.test ## write the __init__ files, functional.py, the command's names.json and agents' SKILL.md from the source files
	$(BIN)/python .ci/exports.py
	$(BIN)/python .ci/names.py
	$(BIN)/python .ci/agents.py

docs: $(VENV)/.docs ## build the documentation into site/
	$(BIN)/python -m mkdocs build

check: $(VENV)/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	@find lightning_tricks lightning_tricks_cli -name '*.py' | xargs wc -l | awk '$$1 > 500 && $$2 != "total" \
	    { print "warning: " $$2 " has " $$1 " lines: is it one idea?" }'

clean: ## remove .venv, .venv-clients, .venv-xla, caches and build products
	rm -rf $(VENV) .venv-clients .venv-xla build dist site .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

fail = { echo "error: $(1)" >&2; exit 1; }

# Stamps are written last, so that an interrupted step is done again; pyproject.toml renews all but .venv itself.
$(VENV)/.made:
	@for python in $(PYTHON); do \
	    $$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || continue; \
	    $$python -c 'import ensurepip, venv' 2>/dev/null \
	        || $(call fail,$$python has no venv module; on Debian and Ubuntu: apt install python3-venv); \
	    echo "making $(VENV) with $$python"; \
	    $$python -m venv $(VENV) && touch $@; exit; \
	done; $(call fail,no Python >= 3.10 among: $(PYTHON); try make PYTHON=/path/to/python3)

# torch first and on its own, from the machine's own find-links where they have one: asked for together with the rest,
# pip takes the newest torch of the index, gigabytes of CUDA. The stamp is a constraint that keeps what was chosen.
$(VENV)/torch.txt: $(VENV)/.made pyproject.toml $(if $(TORCH),FORCE)
	@$(PIP) download --retries 1 --no-deps --dest $(VENV)/probe "lightning>=2.6" 2>/dev/null \
	    || $(call fail,pip reaches no package index (no network?); to see why: $(BIN)/pip download lightning)
	@echo "installing $(or $(TORCH),torch)"
	@$(if $(TORCH),,$(PIP) install --no-index --no-deps "torch>=2.9" 2>/dev/null ||) \
	    $(PIP) install "$(or $(TORCH),torch>=2.9)" || $(call fail,torch not installed; pip's reason is above)
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@.new
	@mv $@.new $@

$(VENV)/.demo $(VENV)/.test $(VENV)/.test-all $(VENV)/.bench $(VENV)/.docs: $(VENV)/torch.txt
	@echo "installing .[$(extras)] beside $$(cat $<)"
	@$(PIP) install --constraint $< --editable ".[$(extras)]" \
	    || $(call fail,.[$(extras)] not installed; pip's reason is above (no network?))
	@$(if $(findstring test,$(extras)),$(BIN)/python .ci/torchvision_cpu.py)
	@touch $@
$(VENV)/.demo: extras = demo,cli
$(VENV)/.test: extras = test
$(VENV)/.test-all: extras = test,ray,pages
$(VENV)/.bench: extras = test,pretrained
$(VENV)/.docs: extras = docs
