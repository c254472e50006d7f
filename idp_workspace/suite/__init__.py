"""Suites: methods x tasks x backbones x seeds, trained, evaluated and turned into tables and a page.

python -m idp_workspace.suite run suites/pusht_state.yaml
python -m idp_workspace.suite report suites/pusht_state.yaml

grid.py expands and checks a suite, jobs.py makes one run, scheduler.py many, live.py shows them, records.py reads what
they left, statistics.py, tables.py and page.py report it, index.py writes the front page of results/.
"""
