# A Python of at least 3.11, found by running it: a name on the path may be a shim with nothing behind it.
# 3.11 comes first because every dependency has wheels for it. To choose another: make test PYTHON=python3.13
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$name && break; done)
# nproc counts what OMP_NUM_THREADS leaves of the cores.
WORKERS ?= $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
ARGS ?=
SUITE ?= round
TOOL ?= memcheck
KERNELS := rows linear rotary attention metadata kv tree drafting topk penalties summaries filters draw sampling verify \
	synthetic extend

BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: help demo test newest engines engines-table soak bench sanitize lint types compile map format notebooks papers docs docs-links dist clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(INSTALLED) ## speculate with the shipped pair, round by round
	$(BIN)/specsim demo

# One thread a worker: two threads that share a busy core wait for each other.
test: export OMP_NUM_THREADS := 1
test: export MKL_NUM_THREADS := 1
# Empty is unset: tests start some hundred processes, and without bytecode each would compile torch and the package.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(INSTALLED) ## every test, on every core; make test ARGS="-k tree" for some of them
	$(BIN)/pytest -n $(WORKERS) --dist worksteal $(ARGS)

# constraints.txt does not apply: the newest of all that pyproject.toml allows. Several gigabytes.
newest: export OMP_NUM_THREADS := 1
newest: export MKL_NUM_THREADS := 1
newest: ## every test with the newest dependencies, in .venv-newest
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --upgrade --upgrade-strategy eager --editable '.[test,notebooks,data,grammar,serve,cluster,docs]'
	.venv-newest/bin/pytest -n $(WORKERS) --dist worksteal $(ARGS)

# Engines have their own environment, of some four gigabytes. Three of their requirements are built for CUDA, and
# transformers cannot import them beside PyTorch for a CPU.
.venv-engines/.installed: tests/engines/requirements.txt
	test -x .venv-engines/bin/python || $(PYTHON) -m venv .venv-engines
	.venv-engines/bin/python -m pip install --requirement tests/engines/requirements.txt
	.venv-engines/bin/python -m pip install --no-deps $$(grep --only-matching 'sglang==[0-9.]*[0-9]' tests/engines/requirements.txt)
	.venv-engines/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	touch $@

engines: $(INSTALLED) .venv-engines/.installed ## real engines, SGLang's server kits and clients with the shipped pair
	ENGINES=.venv-engines/bin/python $(BIN)/pytest tests/engines $(ARGS)

engines-table: $(INSTALLED) .venv-engines/.installed ## the tables of notebooks/guide/engines.md, from runs
	$(BIN)/python -m tests.engines.vllm_cases .venv-engines/bin/python --keep
	$(BIN)/python -m tests.engines.kits_cases .venv-engines/bin/python --keep
	$(BIN)/python -m tests.engines.clients_cases .venv-engines/bin/python --keep

soak: $(INSTALLED) ## 10,000 requests served in random ways, each compared with the same request alone
	$(BIN)/specsim soak --jobs $(WORKERS) $(ARGS)

bench: $(INSTALLED) ## time the fast column on a GPU; make bench SUITE=kernels for another suite
	$(BIN)/specsim bench --suite $(SUITE) $(ARGS)

# Every process of the run leaves a summary; memory is not cached, so that what lies beyond a tensor is nobody's. Graphs
# are left out: what is allocated while one is recorded has to come from the cache.
sanitize: export PYTORCH_NO_CUDA_MEMORY_CACHING := 1
sanitize: $(INSTALLED) ## the kernels' tests under compute-sanitizer, on a GPU; make sanitize TOOL=racecheck for races
	rm -rf build/sanitize && mkdir -p build/sanitize
	compute-sanitizer --tool $(TOOL) --log-file build/sanitize/%p.txt \
		$(BIN)/python -m pytest -q -n $(WORKERS) $(wildcard $(patsubst %,tests/*/test_%.py,$(KERNELS))) \
		-k "not every_graph_mode" $(ARGS)
	@grep -h SUMMARY build/sanitize/*.txt | sort | uniq -c
	@! grep -h SUMMARY build/sanitize/*.txt | grep -v "SUMMARY: 0 "

lint: $(INSTALLED) ## ruff's rules and its format, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(INSTALLED) ## pyright over the package
	$(BIN)/pyright

compile: $(INSTALLED) ## compile every kernel for an H100 that is not here; make compile ARGS="--capability 100" for a B200
	$(BIN)/python tests/tools/compile_kernels.py $(ARGS)

map: $(INSTALLED) ## folders of the package, what each imports, and their levels
	$(BIN)/python tests/tools/import_map.py

format: $(INSTALLED) ## apply ruff's rules and its format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: $(INSTALLED) ## run the notebooks again
	$(BIN)/python notebooks/execute.py $(ARGS)

papers: $(INSTALLED) ## published figures and ours, in papers/ledger.md
	$(BIN)/python -m papers.reproduction

# All pages, every time: a page may link to a heading of another that has changed.
docs: $(INSTALLED) ## the documentation, in build/docs/index.html
	@mkdir -p build/docs-source
	$(BIN)/python -m sphinx -q -E -a -W --keep-going -c notebooks/guide -d build/docs-doctrees build/docs-source build/docs

docs-links: $(INSTALLED) ## ask the network whether the documentation's links to other sites lead somewhere
	@mkdir -p build/docs-source
	$(BIN)/python -m sphinx -q -b linkcheck -c notebooks/guide -d build/docs-doctrees build/docs-source build/docs-links

dist: ## sdist and wheel in dist/, and the wheel used in an environment of its own
	.ci/dist $(PYTHON)

clean: ## remove what make and the tests made, the virtual environment included
	rm -rf .venv .venv-newest build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

# Python compiles what is imported. To compile everything here would take 40 s more.
$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/python || test -n "$(PYTHON)" || { echo "specsim needs Python 3.11 or later; none was found. Name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing specsim and what it depends on into .venv: a few minutes, once."
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt --editable '.[test,notebooks,data,grammar,serve,cluster,docs]'
	@touch $@
