# make demo   the whole method on embedded data, in minutes
# make test   formatting, types and all tests
# make docs   the documentation as a site: open site/index.html
# make soak   the long tests of reliability; SOAK_SCALE=0.1 tries a tenth
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One torch thread: on a busy machine two can be ten times slower.
THREADS := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: demo test docs soak check format types pytest install figures clean

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Media, training, search and the report; tests, benchmarks and figures need the test tools too.
install: $(VENV)/.test-tools

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e ".[audio,image,video,train,report,search]"
	touch $@

$(VENV)/.test-tools: $(VENV)/.installed
	$(PIP) -e ".[test]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/bridle demo

check: format types

format: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# Types are checked while tests run. Work stealing, because the long tests come last and would wait in one queue.
test: format
	$(MAKE) --no-print-directory -j 2 types pytest

pytest: install
	$(THREADS) $(BIN)/python -m pytest -n 2 --dist worksteal --durations 10

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "wrote site/index.html"

soak: install
	$(THREADS) $(BIN)/python tests/soak --out soak

figures: install
	$(BIN)/python benchmarks/demo_figure.py
	$(BIN)/python benchmarks/first_figure.py
	$(BIN)/python benchmarks/long_run_figure.py

clean:
	rm -rf $(VENV) demo runs site soak build dist *.egg-info
