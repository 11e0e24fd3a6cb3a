# Everything sets itself up in .venv: `make demo` and `make test` need only Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := app,cluster,dev,docs,onnx,plot,timm,train,triton

.PHONY: install browser demo test test-long lint typecheck format clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "selfconv needs Python >= 3.11; got %d.%d (set PYTHON=...)" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $@

# for the tests of `selfconv explore`
browser:
	@command -v chromium >/dev/null || { \
		sudo=$$(test "$$(id -u)" = 0 || echo sudo); \
		$$sudo apt-get update && $$sudo apt-get install -y --no-install-recommends chromium; \
	}

demo: install
	$(BIN)/selfconv demo

test: lint typecheck browser
	$(BIN)/python -m pytest -n 2

test-long: install
	SELFCONV_TEST_EFFORT=15 $(BIN)/python -m pytest -n 2 tests/test_ops.py tests/test_numba.py tests/test_nn.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: install
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
