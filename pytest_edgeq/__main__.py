"""Run the command line `edgeq` by `python -m pytest_edgeq`."""

from pytest_edgeq.cli import main

if __name__ == "__main__":
    main()
