"""
Numbers only: error metrics, budgets on them, health findings. Pure numpy.

Nothing here imports pytest, torch or another room of pytest_edgeq.
"""
