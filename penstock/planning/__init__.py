"""Says what fits on given GPUs, and how fast it will be, without one: `penstock plan`.

`hardware.py` has the GPUs, `shapes.py` the sizes of a rank, from a model on the meta device.
`costs.py` is the cost model, `plan.py` puts them together, `report.py` and `plot.py` show it.
"""
