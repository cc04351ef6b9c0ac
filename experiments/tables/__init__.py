"""Tables from results rows: `python -m experiments.tables`, or `make tables`. One file per table, `build(rows)` in it.

Every figure comes from a stored row; beside it stands the published value where there is one. A cell without a row
says missing, one whose runs failed says failed, and `out/cells.csv` names the command behind each.
"""
