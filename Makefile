# What can be done with this repository. Needs nothing but Python (3.11 or 3.12), pip and make.
#   make quickstart   train a small Llama with EDiT on this machine's CPU, on real text
#   make test         all tests of CI             make test-full   everything, the long tests too
#   make smoke        a minute of tests of what depends on megatron-core's release
#   make lint         ruff, mypy, import-linter   make bench       benchmarks, one after another
#   make bench-checkpoint  seconds and bytes of a save, against torch.save
#   make docs         write docs/flags.md anew from the config schema
#   make clean        remove the environment and what runs have written
# Variables: PYTHON (interpreter that makes the environment), VENV (its folder), PYTEST_ARGS. Python 3.11 takes the
# versions of constraints.txt (megatron-core 0.16.1), a newer Python those of constraints-mcore-0.19.txt; an environment
# that is there stays as it is: `make PYTHON=python3.12 VENV=.venv-0.19 test` makes a second one.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
# What a release of megatron-core breaks first: its groups, the step against the reference, checkpoints of other releases
SMOKE := tests/unit/test_megatron_core.py tests/unit/test_model.py tests/dist/test_mesh_groups.py \
  "tests/dist/test_methods_against_reference.py::test_equals_the_reference[R2-slowmo]" \
  "tests/dist/test_methods_against_reference.py::test_equals_the_reference[R2xTP2-slowmo]" \
  "tests/dist/test_saved_checkpoints.py::test_a_checkpoint_of_an_older_version_is_taken_up[edit]" \
  "tests/dist/test_saved_checkpoints.py::test_a_checkpoint_of_an_older_version_is_taken_up[streaming-delayed-pp2]"
export OMP_NUM_THREADS ?= 1

INSTALLED := $(VENV)/.installed
RUN := $(VENV)/bin/python

.PHONY: quickstart test test-full smoke lint bench bench-checkpoint docs clean

quickstart: $(INSTALLED)
	$(RUN) tools/quickstart.py

test: $(INSTALLED)
	$(RUN) -m pytest $(PYTEST_ARGS)

test-full: $(INSTALLED)
	$(RUN) -m pytest --full $(PYTEST_ARGS)

smoke: $(INSTALLED)
	$(RUN) -m pytest $(SMOKE) $(PYTEST_ARGS)

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
$(INSTALLED): setup.py constraints.txt constraints-mcore-0.19.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 13) else \
	  "Python 3.11 or 3.12 is needed, $(PYTHON) is %d.%d: make PYTHON=/path/to/python3.12" % v)'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check -e ".[test,dev,hf]" -c "$$($(RUN) -c \
	  'import sys; print("constraints.txt" if sys.version_info < (3, 12) else "constraints-mcore-0.19.txt")')"
	@touch $@
