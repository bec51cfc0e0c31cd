# make demo: all the set-up, then the main job.   make test: all the set-up, then the tests.
# make docs: the documentation as a site in site/, in an environment of its own.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# CUDA builds of torch bring their own triton, of this version; a CPU build has none, and the kernel tests need one.
TRITON := triton==3.7.1

export OMP_NUM_THREADS ?= 1
export PYTHONUNBUFFERED := 1
# Hundreds of processes of the tests import the package: with compiled modules kept, .3 of 3.9 s less each.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test lint docs setup clean

demo: setup
	$(BIN)/python launch/demo.py $(DEMO_ARGS)

# What tests import is compiled while mypy has the other core, or each worker of pytest does it.
test: setup
	$(BIN)/ruff check .
	$(BIN)/python -m pytest --collect-only -q >/dev/null & $(BIN)/mypy deberta_ds; status=$$?; wait; exit $$status
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=25

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy deberta_ds

docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.venv-docs/.installed: constraints.txt Makefile
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt \
		mkdocs mkdocs-material
	touch $@

setup: $(STAMP)

# Modules are compiled when they are first imported: all of them at once took 62 of 121 s.
# torch first: installed alone, so that the build you chose (CPU or CUDA) is the one that stays.
$(STAMP): constraints.txt setup.py Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: $(PYTHON) is older than 3.11; call make with PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,archives,languages,mpi,neardup,onnx,pages]'
	$(BIN)/python -c 'import triton' 2>/dev/null \
		|| $(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check '$(TRITON)'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-docs site runs build *.egg-info
