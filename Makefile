# make report and make test do everything on a fresh machine: set-up, then the job.
.DEFAULT_GOAL := help
SHELL := /bin/sh
RUN := .venv/bin/
SYNCED := .venv/.labkit-synced
# A .venv's programs name the folder that it was made in: where the clone has been moved since, it is made anew.
MOVED := $(shell [ ! -s $(SYNCED) ] || [ "$$(cat $(SYNCED))" = "$$(pwd -P)" ] || echo moved)
# What runs the kernels on an NVIDIA GPU: any Python with MLX's CUDA build, pytest and hypothesis.
CUDA_PYTHON ?= $(RUN)python

# Jupyter refuses root unless told; in many containers there is nobody else.
AS_ROOT = $(if $(filter 0,$(shell id -u)),--allow-root)

# Where Python may not keep what it compiled, as in many container images, each process compiles all its packages anew:
# seconds for every kernel of a notebook and every command that a test starts.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help report test lab book lint notebooks test-nightly test-cuda sanitize-cuda clean clean-venv moved

help: ## List the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(SYNCED): uv.lock pyproject.toml scripts/setup.sh $(MOVED)
	@PYTHON="$(PYTHON)" LABKIT_MLX="$(LABKIT_MLX)" sh scripts/setup.sh

report: $(SYNCED) ## Set up, run every notebook, build the book from them
	@$(RUN)labkit report --output reports
	@$(RUN)labkit book --from reports

test: $(SYNCED) ## Set up, then run every check and test
	@$(RUN)ruff check . && $(RUN)ruff format --check . && $(RUN)lint-imports --no-logo
	@$(RUN)python -m pytest -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder --max-worker-restart 3 --durations 20

lab: $(SYNCED) ## Open JupyterLab on the notebooks
	@$(RUN)jupyter lab --notebook-dir notebooks $(AS_ROOT)

book: $(SYNCED) ## Build the book from the last report's notebooks
	@$(RUN)labkit book --from reports

lint: $(SYNCED) ## Format and lint
	@$(RUN)ruff format . && $(RUN)ruff check --fix . && $(RUN)lint-imports --no-logo

notebooks: $(SYNCED) ## Execute the committed notebooks anew and write them back
	@$(RUN)labkit notebooks refresh

test-nightly: $(SYNCED) ## The tests that are too long for every run
	@HYPOTHESIS_PROFILE=new $(RUN)python -m pytest -m nightly

test-cuda: ## Every kernel on an NVIDIA GPU (CUDA_PYTHON names another Python than .venv's)
	@$(CUDA_PYTHON) -m pytest -m cuda tests/kernels

sanitize-cuda: ## The same under compute-sanitizer: bad memory accesses, then races; several processes at once
	@$(CUDA_PYTHON) -m recipes.measured.sanitize --out build --seconds 1200

clean: ## Remove what the commands made, but not .venv
	rm -rf reports book/_build build dist

clean-venv: ## Remove .venv, so that the next command sets up anew
	rm -rf .venv
