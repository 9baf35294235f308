"""
The record of a run and its views.

The record is plain data: `journal` records the calls of a test, with `facts` of models, the test
carries them on its report, and `run` puts the parts together. Every view is made from the record
alone, in the run or later from its file: `markdown`, `html`, `model_explorer`; `model_rows` are the
rows of their tables. `bundle` writes the files of a failed test with `reproduce`, a script;
`whole_files` writes files atomically.
"""
