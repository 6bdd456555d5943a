# Everything is set up by itself in .venv (`make .venv/installed`): `make chat`, `make quickstart MINUTES=4`, `make test`,
# `make lint`.
PYTHON ?= python3
TORCH ?= torch==2.13.0
MINUTES ?= 4
# Of `make quickstart`, from the command line alone: a name that the environment happens to hold (NAME, DATA) is not meant.
DATA =
STEPS =
NAME =
RUNS = runs
VENV := .venv
BIN := $(VENV)/bin
quoted = '$(subst ','\'',$(1))'
option = $(if $(2),$(1) $(call quoted,$(2)))

.PHONY: test quickstart chat lint flips FORCE
.DELETE_ON_ERROR:

test: $(VENV)/installed
	$(BIN)/python -m pytest -q -n 2

quickstart: $(VENV)/installed
	$(BIN)/trivium quickstart --minutes $(call quoted,$(MINUTES)) --out $(call quoted,$(RUNS)) \
		$(call option,--data,$(DATA)) $(call option,--steps,$(STEPS)) $(call option,--name,$(NAME))

chat: $(VENV)/installed
	@$(BIN)/trivium chat

# Puts every wrong line of tests/flips.toml into a copy of the package and sees the named test fail: ten minutes.
flips: $(VENV)/installed
	$(BIN)/python -m pytest -q -n 2 -m slow tests/test_flips.py

lint: $(VENV)/installed
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

# Done once, and again when pyproject.toml, the wanted torch, the CPU kernels or the compiler change.
$(VENV)/installed: pyproject.toml setup.py $(VENV)/torch $(VENV)/kernels
	@$(PYTHON) -c 'import sys' 2>/dev/null || \
		{ echo "make: cannot run '$(PYTHON)': name a Python 3.11 to 3.13, as in 'make PYTHON=python3.12 ...'" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo "make: trivium needs Python 3.11 to 3.13, '$(PYTHON)' is $$($(PYTHON) -V 2>&1 | cut -d' ' -f2):" \
		"name another, as in 'make PYTHON=python3.12 ...'" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "make: '$(PYTHON)' cannot make a virtual environment, it lacks venv or ensurepip:" \
		"install them (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet -e '.[data,dev]'
	@touch $@

$(VENV)/torch: FORCE
	@mkdir -p $(VENV)
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

$(VENV)/kernels: FORCE
	@mkdir -p $(VENV)
	@{ $(PYTHON) trivium/ops/cpu/sources.py; command -v $${CXX:-c++}; } > $@.now 2>/dev/null; \
		cmp -s $@.now $@ || cp $@.now $@

FORCE:
