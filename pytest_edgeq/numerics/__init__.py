"""Error metrics, budgets on them, health findings: numpy and scipy alone."""
