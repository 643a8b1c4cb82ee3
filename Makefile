# Two commands do everything on a fresh machine:  make demo  and  make test.
# Both make the virtual environment in $(VENV) on first use and install castiron again when its sources change.

PYTHON ?= python3
VENV   ?= .venv
DEMO   ?= demo
JOBS   ?= 2
BIN    := $(VENV)/bin
# Tests that wait (servers, processes that start) leave cores idle: one worker more than cores.
TEST_JOBS ?= 3
TEST_FOLDERS := tests/virtual_cuda/ $(filter-out tests/virtual_cuda/,$(wildcard tests/*/))
# Only building engines needs torch. This release has a CPU build and is the one the tests run with.
TORCH  ?= torch==2.13.0

SOURCES := pyproject.toml $(shell find CMakeLists.txt cpp web castiron graph calibration plugins build engines runtime \
             -type f -not -path '*/node_modules/*' -not -path '*/page_files/*' -not -name '*.pyc' -not -name '*.so' 2>/dev/null)

.PHONY: demo test lint cpp-test asan-test tsan-test python-test page page-test ray-test system-packages clean

demo: $(VENV)/installed-build
	$(BIN)/python examples/demo.py --dir $(DEMO)

# Two at a time: linters, and tests whose compilers have finished, keep one core busy.
test:
	$(MAKE) -j2 lint asan-test tsan-test
	$(MAKE) python-test

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd $(VENV) && bin/mypy --config-file ../pyproject.toml -p castiron
	find cpp -name '*.h' -o -name '*.cc' -o -name '*.inl' | xargs $(BIN)/clang-format --dry-run --Werror
	if command -v npm >/dev/null; then cd web && npm ci && npm run check; fi

# The C++ tests run under AddressSanitizer and UBSan, those of the engine loop under ThreadSanitizer as well.
SANITIZED := -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1" -DCASTIRON_TESTS=ON -DCASTIRON_WERROR=ON
cpp-test: asan-test tsan-test

asan-test: $(VENV)/installed-dev
	cmake -S . -B _build_asan $(SANITIZED) -DCASTIRON_SANITIZE=address,undefined
	cmake --build _build_asan -j $(JOBS) --target host_tests runtime_tests
	ctest --test-dir _build_asan -j $(JOBS) --output-on-failure --no-tests=error

tsan-test: $(VENV)/installed-dev
	cmake -S . -B _build_tsan $(SANITIZED) -DCASTIRON_SANITIZE=thread
	cmake --build _build_tsan -j $(JOBS) --target runtime_tests
	ctest --test-dir _build_tsan --output-on-failure --no-tests=error -R runtime

# A file's tests stay in one process: they share engines that took seconds to build. The few files of the virtual
# device take minutes each and come first, or they would end alone on one core.
python-test: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(TEST_FOLDERS)

# The server's page for a checkout that is run in place; an installed castiron has it where npm was found.
page:
	cd web && npm ci && npm run check && node build.mjs ../runtime/server/page_files

# The page in headless Chromium, which Debian has as a package.
page-test: $(VENV)/installed-dev page
	$(BIN)/pip install -q "playwright>=1.50,<2"
	command -v chromium >/dev/null || apt-get install -y -qq chromium
	$(BIN)/python -m pytest -n 0 tests/runtime/test_page_in_browser.py

# Two replicas on Ray, which is larger than everything else together: in an environment of its own.
ray-test:
	$(PYTHON) -m venv $(VENV)-ray
	$(VENV)-ray/bin/pip install -q ".[ray,dev]"
	$(VENV)-ray/bin/python -m pytest -n 0 tests/runtime/test_replicas_on_ray.py

# Compilers and headers, where they are missing and this user may install them.
system-packages:
	@missing=""; \
	for pair in g++:g++ cmake:cmake ninja:ninja-build; do \
	  command -v $${pair%%:*} >/dev/null || missing="$$missing $${pair##*:}"; done; \
	test -e /usr/include/doctest/doctest.h || missing="$$missing doctest-dev"; \
	$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' || missing="$$missing python3-dev"; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing python3-venv"; \
	[ -z "$$missing" ] && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing; \
	else echo "install these packages first:$$missing" >&2; exit 1; fi

$(VENV)/python: | system-packages
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(TORCH)
	touch $@

$(VENV)/installed-build: $(VENV)/python $(SOURCES)
	$(BIN)/pip install -q ".[build]"
	touch $@

$(VENV)/installed-dev: $(VENV)/python $(SOURCES)
	$(BIN)/pip install -q ".[build,dev]"
	touch $@ $(VENV)/installed-build

clean:
	rm -rf $(VENV) $(VENV)-ray $(DEMO) _build* web/node_modules runtime/server/page_files
