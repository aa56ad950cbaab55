# Thin: each target shows the plain commands behind it.
VENV   ?= .venv
PYTHON ?= python3
RUN    := $(VENV)/bin/python
# Where test-lowest gets torch from: by default the lowest declared version, from torch's index of CPU builds.
# With another one: make test-lowest TORCH="--find-links wheels --override torch.txt", where torch.txt has a version.
TORCH  ?= --torch-backend cpu
# A new environment's pip may be years old, and take twice as long to read what versions there are.
ENVIRONMENT = test -x $(RUN) || { $(PYTHON) -m venv $(VENV) && $(RUN) -m pip install -q --upgrade pip; }
# Compiles what was installed and this code, on all cores, as pip does on one; not large packages of which next to
# nothing is imported.
# Some packages have files for newer Pythons, which fail.
COMPILE = $(RUN) -m compileall -qq -j 0 -x '/(tests?|testing|transformers/models|fontTools|mypyc?|nltk|openai|pip|selenium|sklearn|sqlalchemy)/' $(VENV)/lib lit_ft callbacks benchmarks || true
# Processes that run tests beside each other; 0 is the one that collects them. On two cores the third and the fourth
# compute where others wait: for servers, pages and processes that are to stop.
WORKERS ?= 4

.PHONY: quickstart test types tests test-lowest test-cuda tiny-qwen2 clean

$(VENV)/.installed: pyproject.toml callbacks/pyproject.toml
	@echo "Installing lit_ft and what it needs into $(VENV): 1.8 GB with torch for CPUs, several times that with torch for CUDA."
	$(ENVIRONMENT)
	$(RUN) -m pip install --no-compile -e . -e ./callbacks
	$(COMPILE)
	touch $@

# The same with the tools of CONTRIBUTING.md, in one installation: a second one would resolve all versions again.
$(VENV)/.installed-dev: pyproject.toml callbacks/pyproject.toml
	$(ENVIRONMENT)
	$(RUN) -m pip install --no-compile -e ".[dev]" -e ./callbacks
	$(COMPILE)
	touch $(VENV)/.installed $@

# Install, then fine-tune the embedded model on the bundled data.
quickstart: $(VENV)/.installed
	$(RUN) -m lit_ft fit --config recipes/quickstart.yaml

# Everything that .ci/run checks: lint, types, layers, unit and multi-process tests, recipes, quickstart.
# Types are checked while the tests start, which takes one core.
test: $(VENV)/.installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(VENV)/bin/lint-imports
	$(MAKE) --jobs=2 types tests

types: $(VENV)/.installed-dev
	$(RUN) -m mypy

tests: $(VENV)/.installed-dev
	$(RUN) -m pytest -q -n $(WORKERS) --dist loadgroup --durations=10

# The quick tests with the lowest declared version of each dependency, and imports of every module.
test-lowest: .venv-lowest/.installed
	.venv-lowest/bin/python tests/import_all.py
	.venv-lowest/bin/python -m pytest -q -m "not processes and not slow"

.venv-lowest/.installed: pyproject.toml callbacks/pyproject.toml
	test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install -q uv
	.venv-lowest/bin/uv pip install --python .venv-lowest/bin/python --resolution lowest-direct $(TORCH) -e ./callbacks -e ".[test]"
	touch $@

# What needs a GPU (docs/gpu.md), from a plain checkout: PYTHON is one with the dependencies.
test-cuda:
	PYTHONPATH=.:callbacks $(PYTHON) -m pytest -q -m cuda tests/cuda

# Pretrain checkpoints/tiny-qwen2 anew: generate the text, train, replace the weights in git.
tiny-qwen2: $(VENV)/.installed
	$(RUN) recipes/data/generate.py pretrain --out checkpoints/pretrain-tiny
	rm -rf checkpoints/runs/pretrain_tiny
	$(RUN) -m lit_ft fit --config recipes/pretrain_tiny.yaml --run_dir checkpoints/runs/pretrain_tiny
	$(RUN) -m lit_ft export --run checkpoints/runs/pretrain_tiny --merge --dtype bfloat16 --out checkpoints/tiny-qwen2

clean:
	rm -rf $(VENV) .venv-lowest
