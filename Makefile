# What can be done with this repository. Needs nothing but Python (3.11 or 3.12), pip and make.
#   make quickstart   train a small Llama with EDiT on this machine's CPU, on real text
#   make test         all tests of CI             make test-full   everything, the long tests too
#   make lint         ruff, mypy, import-linter   make bench       benchmarks, one after another
#   make bench-checkpoint  seconds and bytes of a save, against torch.save
#   make docs         write docs/flags.md anew from the config schema
#   make clean        remove the environment and what runs have written
# Variables: PYTHON (interpreter that makes the environment), VENV (its folder), PYTEST_ARGS.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
export OMP_NUM_THREADS ?= 1

INSTALLED := $(VENV)/.installed
RUN := $(VENV)/bin/python

.PHONY: quickstart test test-full lint bench bench-checkpoint docs clean

quickstart: $(INSTALLED)
	$(RUN) tools/quickstart.py

test: $(INSTALLED)
	$(RUN) -m pytest $(PYTEST_ARGS)

test-full: $(INSTALLED)
	$(RUN) -m pytest --full $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: $(INSTALLED)
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; $(RUN) $$script; done

bench-checkpoint: $(INSTALLED)
	$(RUN) benchmarks/checkpoint.py

docs: $(INSTALLED)
	$(RUN) tools/document_flags.py

clean:
	rm -rf $(VENV) runs build dist *.egg-info

# Made anew whenever the dependencies change; a stopped install leaves no stamp and is taken up again.
$(INSTALLED): setup.py constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 13) else \
	  "Python 3.11 or 3.12 is needed, $(PYTHON) is %d.%d: make PYTHON=/path/to/python3.11" % v)'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check -c constraints.txt -e ".[test,dev,hf]"
	@touch $@
