"""
Measure samples in other processes and on other machines, by any `concurrent.futures.Executor`.

- `session_executor`: what options, sessions and calls name.
- `sample_executor`, `local_pool`: the client's side of an executor, of dask, of local processes.
- `remote`: pickles a model and its samples. `pickled`: pickles of a user's objects.
- `stream`: samples in chunks, a few of which are in flight.
- `worker`: what runs in the other process. It knows jobs alone, which stand with what they measure.
"""
