# make setup   install everything into .venv
# make train   train IDP on PushT with the small preset, evaluate it, show where everything is
# make test    install and run the test suite
# make bench   speed and memory, as ratios within one run; writes results/bench.json
# make fuzz    bad input for every reader, 10,000 cases; writes results/reliability/fuzz.json
# make faults  runs that are killed, damaged and left without space; writes results/reliability/faults.json
# make soak    memory, handles and processes over a long run; writes results/reliability/soak.json
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
CONFIG ?= train_idp_mlp_lowdim
PRESET ?= cpu
ARGS ?=
RENDERER := { [ "$$(id -u)" = 0 ] && apt-get install -y -q libosmesa6 >/dev/null 2>&1 || { apt-get update -q && apt-get install -y -q libosmesa6; } >/dev/null 2>&1; }

.PHONY: setup train test bench fuzz faults soak clean
setup: $(VENV)/.installed

# torch first and alone: a pinned version keeps pip from choosing another build for the packages after it.
$(VENV)/.installed: requirements.txt pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Python's venv module is missing; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	# Without what they name beside these: a second OpenCV, torchvision, drivers of input devices, none of which is used here, and another MuJoCo.
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps robosuite==1.5.1 robomimic==0.3.0 metaworld==3.1.1
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(PYTHON) -c 'from ctypes.util import find_library; raise SystemExit(not find_library("OSMesa"))' || $(RENDERER) || \
	    echo "To render the simulators' tasks without a GPU, on Debian and Ubuntu: apt-get install libosmesa6"
	@touch $@

train: setup
	$(PY) train.py --config-name=$(CONFIG) preset=$(PRESET) $(ARGS)

# Files of tests run side by side, each as a whole, because tests of a file share what is slow to make. They start many processes: OpenMP threads
# that spin while they wait would take the cores from each other. One run alone is twice as fast when they do spin, so the other targets leave
# that as it is.
test: setup
	OMP_WAIT_POLICY=PASSIVE $(PY) -m pytest --numprocesses=auto --maxprocesses=4 --dist=loadfile $(ARGS)

bench: setup
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps gym-pusht==0.1.8
	$(PY) -m benchmarks --output results/bench.json $(ARGS)

fuzz faults soak: setup
	OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 $(PY) -m benchmarks.$@ --output results/reliability/$@.json $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info
