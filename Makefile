# Everything sets itself up in .venv: `make demo` and `make test` need only Python >= 3.11 and make. But the tests of
# `selfconv explore` need Chromium: if it is not installed, `make test` installs Debian's by `sudo apt-get`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := app,cluster,dev,docs,onnx,parquet,plot,timm,train,triton

# what is imported is compiled when it is first used, and then kept, whatever the environment says
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install browser demo test test-long test-oldest docs dist lint typecheck format clean

install: $(VENV)/.installed

# by uv, in a third of pip's time; by pip where uv does not find all that it needs
$(VENV)/.installed: export PIP_CONSTRAINT = constraints.txt
$(VENV)/.installed: export PIP_DISABLE_PIP_VERSION_CHECK = 1
$(VENV)/.installed: export UV_CONSTRAINT = constraints.txt
$(VENV)/.installed: export UV_BUILD_CONSTRAINT = constraints.txt
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "selfconv needs Python >= 3.11; got %d.%d (set PYTHON=...)" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv && \
		$(BIN)/uv pip install --quiet --python $(BIN)/python $$($(BIN)/python scripts/uv_options.py) -e '.[$(EXTRAS)]' || \
		$(BIN)/python -m pip install --quiet --no-compile -e '.[$(EXTRAS)]'
	@touch $@

browser:
	@command -v chromium >/dev/null || { \
		sudo=$$(test "$$(id -u)" = 0 || echo sudo); \
		$$sudo apt-get update && $$sudo apt-get install -y --no-install-recommends chromium; \
	}

demo: install
	$(BIN)/selfconv demo

# mypy is one of the tests. Files stay whole, because their tests share fixtures, and start in the order of
# tests/conftest.py, slow ones first. Three workers keep two cores busy while tests wait for processes and timeouts
test: lint browser
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# every property test on many more cases, new ones each time, and exports and compilations of more networks; says how
# many random calls there were (2,000 and more)
LONG := tests/ops/test_fuzz.py tests/test_groups.py tests/data/test_archives.py tests/test_hostile_runs.py \
	tests/trained/test_trained.py tests/models/test_compile.py tests/models/test_deploy.py tests/nn/test_new_architectures.py
test-long: install
	SELFCONV_TEST_EFFORT=15 $(BIN)/python -m pytest -n 2 $(LONG)

# the tests of the core with the oldest versions that pyproject.toml allows, in an environment of its own; downloads
# some gigabytes, for old builds of torch come with CUDA. Python 3.11 or 3.12: for 3.13 the oldest have no wheels
CORE := tests/data tests/models tests/nn tests/ops tests/test_groups.py tests/testing tests/train/test_training.py tests/trained \
	--ignore tests/models/test_timm.py --ignore tests/ops/test_fuzz.py
test-oldest: install
	$(BIN)/uv venv --quiet --clear --python $(PYTHON) $(VENV)-oldest
	$(BIN)/uv pip install --quiet --python $(VENV)-oldest/bin/python --resolution lowest-direct \
		$$($(BIN)/python scripts/uv_options.py) -e '.[onnx,plot,train,triton]' \
		$$(grep -E '^(hypothesis|pytest|pytest-xdist)==' constraints.txt)
	$(VENV)-oldest/bin/python -m pytest -n 2 --dist loadfile $(CORE)

docs: install
	$(BIN)/python -m sphinx --fresh-env --write-all --fail-on-warning --keep-going --nitpicky docs docs/_build/html

dist: install
	$(BIN)/python -m build --no-isolation

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: install
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV)-oldest build dist docs/_build .mypy_cache .pytest_cache .ruff_cache
