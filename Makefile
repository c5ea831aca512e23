# make demo | make test | make quick | make test-gpu | make check | make docs | make format | make clean
# (PYTHON=python3.12 make test picks another Python)
SHELL := bash -o pipefail
PYTHON ?= python3
JOBS ?= 2
VENV := .venv
READY := $(VENV)/.ready
DEV := $(VENV)/.dev
# What pip does on one core, and without the tests of other packages.
COMPILE = $(VENV)/bin/python -m compileall -q -j $(JOBS) -x '/tests?/' $(VENV)/lib >/dev/null || true
# glibc keeps freed memory for the next step of a training: 0.8 of the time on a CPU.
KEEP := MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4000000000
DEMO := runs/demo/nll runs/demo/fl+mdca

.PHONY: demo $(DEMO) test quick test-gpu check docs format clean

# Trains two networks on embedded data, side by side, and compares them: under two minutes on two free cores. What it prints last
# are its own numbers in words. A second time it only evaluates.
demo: $(READY)
	$(MAKE) --no-print-directory --jobs $(JOBS) $(DEMO)
	$(VENV)/bin/python tools/eval_calib.py $(DEMO) --weights last --posthoc none,ts \
		--shift gaussian_noise:3,defocus_blur:3,fog:3,contrast:3

$(DEMO): runs/demo/%: $(READY)
	OMP_NUM_THREADS=1 $(KEEP) $(VENV)/bin/python tools/train_seg.py --config configs/demo.yaml --loss $* --out $@ --resume \
		2>&1 | sed -u 's/^/$*: /'

test: $(DEV)
	$(VENV)/bin/python -m pytest -n $(JOBS)

# What takes less than a few seconds each.
quick: $(DEV)
	$(VENV)/bin/python -m pytest -n $(JOBS) -m "not slow"

# For a machine with CUDA: that the numbers are those of the CPU, and that no step waits.
test-gpu: $(DEV)
	$(VENV)/bin/python -m pytest -m gpu tests/test_gpu.py

check: $(DEV)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# site/index.html and the rest; a broken link, or a page that would fetch something, is an error.
docs: $(DEV)
	$(VENV)/bin/mkdocs build --quiet --strict

format: $(DEV)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Installed again only when pyproject.toml changes.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --no-compile -e ".[train]"
	$(COMPILE)
	touch $@

# With `dev`, which contains every extra but nnunet.
$(DEV): $(READY)
	$(VENV)/bin/python -m pip install --quiet --no-compile -e ".[dev]"
	$(COMPILE)
	touch $@
