# make demo | make test | make check | make format | make clean      (PYTHON=python3.12 make test picks another Python)
PYTHON ?= python3
JOBS ?= 2
VENV := .venv
READY := $(VENV)/.ready

.PHONY: demo test check format clean

# Trains on embedded data, evaluates, and prints the path of the page; a second time only evaluates.
demo: $(READY)
	$(VENV)/bin/python tools/train_seg.py --loss fl+mdca --out runs/demo --resume
	$(VENV)/bin/python tools/eval_calib.py runs/demo --posthoc none,ts

test: $(READY)
	$(VENV)/bin/python -m pytest -n $(JOBS)

check: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(READY)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# With `dev`, which contains every extra. Installed again only when pyproject.toml changes.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -e ".[dev]"
	touch $@
