# make setup      install everything into .venv
# make train      train IDP on PushT with the small preset, evaluate it, show where everything is
# make test       install and run the test suite
# make test-fast  run the unit tests only, in under three minutes
# make test-lerobot  IDP inside LeRobot, its data, and the unit tests, in .venv-lerobot (Python 3.12, several GB)
# make lint       ruff (rules and format) and mypy
# make format     let ruff rewrite the files
# make docs       build the documentation into site/
# make bench      speed and memory, as ratios within one run; writes results/bench.json
# make bench-lerobot  IDP inside LeRobot: time of a training step, score on PushT; writes results/lerobot
# make fuzz       bad input for every reader, 10,000 cases; writes results/reliability/fuzz.json
# make faults     runs that are killed, damaged and left without space; writes results/reliability/faults.json
# make mistakes   what newcomers do wrong, and the answers; writes results/reliability/mistakes.json
# make soak       memory, handles and processes over a long run; writes results/reliability/soak.json
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := -m pip install --quiet --disable-pip-version-check
DOCS := .venv-docs
LEROBOT := .venv-lerobot
PYTHON312 ?= python3.12
CONFIG ?= train_idp_mlp_lowdim
PRESET ?= cpu
ARGS ?=
APT := apt-get install -y -q libosmesa6
BROWSE := apt-get install -y -q chromium chromium-driver
BROWSER := { $(BROWSE) || { apt-get update -q && $(BROWSE); }; }
RENDERER := { [ "$$(id -u)" = 0 ] && $(APT) >/dev/null 2>&1 || { apt-get update -q && $(APT); } >/dev/null 2>&1; }
# Whole files of tests go to a worker because tests of a file share slow fixtures. Tests start many processes: waiting
# OpenMP threads must not spin, or they take the cores from each other. A single run is twice as fast when they do
# spin, so the other targets leave that setting alone.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(PY) -m pytest --numprocesses=auto --maxprocesses=4 --dist=loadfile

.PHONY: setup train test test-fast test-lerobot lint format docs bench bench-lerobot fuzz faults mistakes soak clean
setup: $(VENV)/.installed

# torch first and alone: a pinned version keeps pip from choosing another build for the packages after it.
# These come without their dependencies: a second OpenCV, torchvision, drivers of input devices, another MuJoCo and an
# older numpy, none of which is used here.
$(VENV)/.installed: requirements.txt pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	    { echo "Python's venv module is missing; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) $(PIP) torch==2.13.0
	$(PY) $(PIP) -r requirements.txt
	$(PY) $(PIP) --no-deps robosuite==1.5.1 robomimic==0.3.0 metaworld==3.1.1 openpi-client==0.1.2
	$(PY) $(PIP) --no-deps --no-build-isolation -e .
	@$(PYTHON) -c 'from ctypes.util import find_library; raise SystemExit(not find_library("OSMesa"))' || $(RENDERER) || \
	    echo "To render the simulators' tasks without a GPU, on Debian and Ubuntu: apt-get install libosmesa6"
	@touch $@

# Tests of a suite's page need a browser, and skip without one.
$(VENV)/.browser:
	@command -v chromedriver >/dev/null || { [ "$$(id -u)" = 0 ] && $(BROWSER) >/dev/null 2>&1; } || \
	    echo "To test the pages of suites, on Debian and Ubuntu: apt-get install chromium chromium-driver"
	@mkdir -p $(VENV) && touch $@

$(VENV)/.linters: requirements-dev.txt $(VENV)/.installed
	$(PY) $(PIP) -r requirements-dev.txt
	@touch $@

$(DOCS)/.installed: requirements-docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python $(PIP) -r requirements-docs.txt
	@touch $@

# lerobot accepts no torch as new as ours, and its newest version no Python 3.11. The plugin depends on this project,
# which comes first, from here. The tests of this project need pytest's plugins.
$(LEROBOT)/.installed: pyproject.toml setup.py plugins/lerobot_policy_idp/pyproject.toml
	$(PYTHON312) -m venv $(LEROBOT)
	$(LEROBOT)/bin/python $(PIP) 'lerobot[dataset,training,pusht,async]==0.6.1' pytest pytest-xdist hypothesis
	$(LEROBOT)/bin/python $(PIP) -e '.[lerobot-data]'
	$(LEROBOT)/bin/python $(PIP) -e plugins/lerobot_policy_idp
	@touch $@

train: setup
	$(PY) train.py --config-name=$(CONFIG) preset=$(PRESET) $(ARGS)

test: setup $(VENV)/.browser
	$(PYTEST) $(ARGS)

test-fast: setup
	$(PYTEST) tests/unit $(ARGS)

test-lerobot: $(LEROBOT)/.installed
	OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 $(LEROBOT)/bin/python -m pytest plugins/lerobot_policy_idp/tests $(ARGS)
	OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 LEROBOT_PYTHON=$(CURDIR)/$(LEROBOT)/bin/python \
	    $(LEROBOT)/bin/python -m pytest tests/unit --numprocesses=auto --maxprocesses=4 --dist=loadfile $(ARGS)

lint: $(VENV)/.linters
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(VENV)/.linters
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# API pages are made from the source text: the package itself need not be installed.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict $(ARGS)

bench: setup
	$(PY) $(PIP) --no-deps gym-pusht==0.1.8
	$(PY) -m benchmarks --output results/bench.json $(ARGS)

bench-lerobot: $(LEROBOT)/.installed
	OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 $(LEROBOT)/bin/python -m benchmarks.lerobot_plugin $(ARGS)

fuzz faults mistakes soak: setup
	OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 $(PY) -m benchmarks.$@ --output results/reliability/$@.json $(ARGS)

clean:
	rm -rf $(VENV) $(DOCS) $(LEROBOT) site build dist *.egg-info
