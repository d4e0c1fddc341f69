# Everything sets itself up: `make demo` and `make test` need only Python >= 3.11 and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check unit engines bench install clean

demo: install  ## measure a real engine on a real model and write runs/demo/report.html
	$(BIN)/specbench demo

test: install check unit  ## lint, types and tests

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: install
	$(BIN)/python -m pytest

engines: install  ## the other engines that run without a GPU, each in an environment of its own (about 5 GB)
	for name in openvino transformers vllm; do $(BIN)/specbench engines install $$name || exit; done

bench: install  ## timings; never part of `make test`
	$(BIN)/python -m tests.benchmarks.client_ceiling
	$(BIN)/python -m tests.benchmarks.roofline_grid

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "specbench needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[llamacpp,dev]'
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info
