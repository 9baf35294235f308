"""
Measure samples in other processes and on other machines, by the engine that a team already has.

- `names`, `resolve`: what options, sessions and calls name.
- `engines`, `pool`: any executor, dask.distributed, spawned processes.
- `travel`, `pickled`, `parcel`: the file and its references, as they travel once a worker.
- `chunks`, `stream`, `tasks`, `run`: samples in bounded flight, and chunks whose worker died.
- `worker`, `jobs`, `machines`: what runs there.

Figures are the same to the last bit for any number of workers, any size of chunks, and any order.
"""
