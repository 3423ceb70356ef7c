# Paths are relative, so that the folder may have any name.
python := .venv/bin/python
export OMP_NUM_THREADS := 1

.PHONY: demo test lint format tables clean

demo: # FB-NLL on scikit-learn's digits
	@sh tools/setup run
	.venv/bin/fbnll demo

test: lint # every check there is
	$(python) -m pytest --jaxtyping-packages=fbnll,beartype.beartype

lint:
	@sh tools/setup dev
	$(python) -m ruff format --check
	$(python) -m ruff check
	$(python) -m mypy

format:
	@sh tools/setup dev
	$(python) -m ruff format
	$(python) -m ruff check --fix

tables: # the tables in README.md, from the CSVs
	@sh tools/setup dev
	$(python) benchmarks/tables.py

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache dist
