"""
Measure samples in other processes and on other machines, by the engine that a team already has.

- `names`, `session_executor`: what options, sessions and calls name.
- `carriers`, `processes`: any executor, dask.distributed, spawned processes.
- `travel`, `pickled`, `parcel`: the file and its references, as they travel once a worker.
- `chunks`, `stream`, `tasks`, `reading`: samples in bounded flight, and chunks whose worker died.
- `worker`, `compare_job`, `ops_job`, `accuracy_job`, `machines`: what runs there.

Figures are the same to the last bit for any number of workers, any size of chunks, and any order.
"""
