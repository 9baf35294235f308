"""
The record of a run and its views.

The record is plain data: each test carries its part on its report, and `run.py` puts the parts
together. Every view is made from the record alone, in the run or later from its file.
"""
