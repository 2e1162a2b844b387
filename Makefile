# On a bare machine with Python 3.11 or newer: `make demo`, `make test`. Each creates what it needs, in .venv.
PYTHON ?= python3
BIN := .venv/bin
# The service with its worker; what `make test` needs beside it; what `make test-all` needs beside that.
SERVICE := .venv/.service
READY := .venv/.ready
WEB_TOOLS := .venv/.web-tools
INTEGRATIONS := .venv/.integrations

WEB_MODULES := app/web/htm_format.js app/web/htm_template.js app/web/vendor_entry.js app/web/static/js tests/app/web/js
PRETTIER := .venv/web/node_modules/.bin/prettier --config app/web/.prettierrc.json

comma := ,

# Where this is set, every process would compile PyTorch's modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo up test test-all lint lint-python lint-web format format-python format-web checked browser bench venv chaos mutants properties fuzz resume-matrix methods estimates planner prediction docs reference pictures vendor soak gpu-check manifests

demo: $(SERVICE)  ## fine-tune a small model through the service and watch; MODEL=<hub name> for another
	@$(BIN)/anneal demo $(if $(MODEL),--model '$(MODEL)')

up: $(SERVICE)  ## run the service until Ctrl-C
	@exec $(BIN)/anneal up

# All of it in several processes (tests/scheduling.py); a part, often small, in one.
test: checked browser  ## every promise, in minutes; ARGS='-k stream' for a part
ifdef ARGS
	@$(BIN)/python -m pytest $(ARGS)
else
	@$(BIN)/python -m pytest -n auto
endif

# Before a release: also every combination of method, adapter and place, every tracker, and all campaigns.
test-all: checked browser $(INTEGRATIONS) .venv/.bench  ## every test, then properties, resume-matrix, chaos, fuzz and mutants
	@$(BIN)/python -m pytest -n auto -m ''
	@$(MAKE) --no-print-directory properties resume-matrix chaos fuzz mutants

# A machine that cannot have one runs the other tests, and says so at the end. REQUIRED=browser demands one.
browser: $(READY)
	@$(BIN)/python -m tests.chromium

lint: lint-python lint-web  ## style, format, types, and who may import whom; of the dashboard's modules too

lint-python: $(READY)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

lint-web: $(READY) $(WEB_TOOLS)
	@PATH="$(CURDIR)/$(BIN):$$PATH" .venv/web/node_modules/.bin/tsc -p app/web
	@PATH="$(CURDIR)/$(BIN):$$PATH" .venv/web/node_modules/.bin/oxlint -c app/web/.oxlintrc.json $(WEB_MODULES)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PRETTIER) --check --log-level warn $(WEB_MODULES) app/web/static/css

format: format-python format-web  ## write Python, and the dashboard's modules and style sheets, as `make lint` expects them

format-python: $(READY)
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

format-web: $(READY) $(WEB_TOOLS)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PRETTIER) --write --log-level warn $(WEB_MODULES) app/web/static/css

# A new environment has no bytecode. One process compiles what the tests import, beside the linters; four processes at
# once would each compile the same modules. Tests that cannot be collected are reported by the run that follows.
# Without npm's registry the dashboard's modules are not checked; REQUIRED demands it, as it does a browser.
checked: $(READY)
	@$(MAKE) --no-print-directory -j2 lint-python .venv/.compiled
	@if $(MAKE) --no-print-directory $(WEB_TOOLS); then $(MAKE) --no-print-directory lint-web; \
	  elif [ -n "$(REQUIRED)" ] || PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/npm ping --loglevel=silent >/dev/null 2>&1; then exit 1; \
	  else echo "npm cannot install the dashboard's linters (above): its modules are not checked. Run 'make lint' later."; fi

.venv/.compiled: $(READY)
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true
	@touch .venv/.compiled

chaos: $(READY)  ## break everything for ROUNDS=200 rounds; SEED=7 replays a schedule, JOBS=2 halves the time on 4 free cores
	@$(BIN)/python -m tests.chaos --rounds $(or $(ROUNDS),200) $(if $(SEED),--seed $(SEED)) $(if $(JOBS),--jobs $(JOBS))

mutants: $(READY)  ## build in known bugs, one at a time, and see each caught; ONLY='late-acks' for one
	@$(BIN)/python -m tests.mutants $(ONLY)

properties: $(READY)  ## the property tests with 25 times the examples of the suite, new ones in every run; ARGS='-k upload' for a part
	@HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -n auto -m 'hypothesis and not full' $(ARGS)

fuzz: $(READY)  ## CASES=10000 requests that the API's own description allows, or nearly; SEED=7 makes the same ones
	@$(BIN)/python -m tests.fuzz $(if $(CASES),--cases $(CASES)) $(if $(SEED),--seed $(SEED))

docs: .venv/.docs reference  ## build the documentation site into build/site; SERVE=1 serves it with live reload
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(if $(SERVE),serve,build --strict)

reference: $(READY)  ## write the reference pages of docs/reference from the code
	@$(BIN)/python -m docs.generator

pictures: browser  ## take the pictures of the documentation from real runs; needs Chromium
	@REQUIRED=browser PICTURES=docs/assets $(BIN)/python -m pytest -m full tests/e2e/test_pictures.py

manifests: $(READY)  ## write deploy/kubernetes.yml, what the chart makes of its defaults
	@$(BIN)/helm template anneal deploy/helm | sed '/^# Source:/d' > deploy/kubernetes.yml

vendor: $(READY)  ## build the vendored files of the dashboard from their npm packages
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m app.web.vendoring

soak: $(READY)  ## memory and latency under 300 idle readers, a hostile run and other attackers, in 3 minutes; PHASE=60 for longer phases
	@$(BIN)/python -m tests.soak $(if $(PHASE),--seconds $(PHASE))

resume-matrix: $(READY)  ## interrupt every method with every adapter at every kind of place, and see it go on exactly; ARGS=dpo for some objectives
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.worker.training.cells $(ARGS)

methods: $(READY)  ## every method with every adapter: what it learns, and that plain libraries load what it writes; ARGS=dpo for some methods
	@$(BIN)/python -m benchmarks.methods $(ARGS)

prediction: $(READY)  ## how far off predicted finishes are, over 30 runs; SCALE=0.2 for a trial
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.prediction $(if $(SCALE),--scale $(SCALE))

estimates: $(READY)  ## the memory of a training step by formula beside what torch holds, for small models; SIZE=full for models of 0.6B to 8B on a simulated GPU
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.$(if $(filter full,$(SIZE)),full_size_)estimates

# A whole check on a GPU is stored in benchmarks/results and shown in docs/internals/gpu.md.
gpu-check: $(SERVICE)  ## training on this machine's GPU beside plain TRL, in eight minutes; STAGES='facts device' for some stages
ifdef STAGES
	@$(BIN)/python -m benchmarks.gpu_check $(STAGES)
else
	@$(BIN)/python -m benchmarks.gpu_check; code=$$?; \
	  $(BIN)/python -m benchmarks.gpu_check.publish build/gpu-check/gpu-check.json && exit $$code
endif

planner: $(READY)  ## the step plan by measured passes beside that by the estimate, in counted operations; ARGS='--layers 4' for a trial in small
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m benchmarks.planner $(ARGS)

bench: .venv/.bench  ## all benchmarks; ONLY=C8 for one, SCALE=0.01 for a trial in small
	@$(BIN)/python -m benchmarks $(ONLY) $(if $(SCALE),--scale $(SCALE))

venv: $(READY)

# --no-compile halves the time: Python compiles what is really imported, when it first is.
define install
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
  { echo "Anneal needs Python 3.11 or newer: install it, or name it: make PYTHON=python3.12"; exit 1; }
@echo "Creating the virtual environment .venv …"
@$(PYTHON) -m venv .venv || { echo "Python has no venv here: install it (Debian: apt install python3-venv)."; exit 1; }
@echo "Installing PyTorch, transformers and the rest into it; about a minute, more on a slow line …"
@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -e '.[$(1)]' -c constraints.txt
endef

$(SERVICE): pyproject.toml constraints.txt
	$(call install,worker)
	@touch $(SERVICE)
	@echo "Installed."

$(READY): pyproject.toml constraints.txt
	$(call install,worker$(comma)dev)
	@touch $(SERVICE) $(READY)
	@echo "Installed."

# What checks and formats the dashboard's modules, and the types of the packages that they use.
$(WEB_TOOLS): app/web/package.json app/web/package-lock.json | $(READY)
	@mkdir -p .venv/web && cp app/web/package.json app/web/package-lock.json .venv/web
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/npm ci --loglevel=error --no-audit --no-fund --prefix .venv/web
	@touch $(WEB_TOOLS)

# One of the readers of streams that the tests try runs on Node.
$(INTEGRATIONS): $(READY)
	@echo "Installing the integrations that the tests try: trackers, object stores …"
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -e '.[worker,dev,integrations]' -c constraints.txt
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/npm install --loglevel=error --no-audit --no-fund --no-package-lock \
	  --prefix .venv/node eventsource@4.1.1 eventsource-parser@3.1.1
	@touch $(INTEGRATIONS)

.venv/.docs: $(READY)
	@echo "Installing MkDocs …"
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -e '.[worker,dev,docs]' -c constraints.txt
	@touch .venv/.docs

.venv/.bench: $(READY)
	@echo "Installing what the benchmarks measure against …"
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -e '.[worker,dev,integrations,bench]' -c constraints.txt
	@touch .venv/.bench
