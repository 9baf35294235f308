"""
The record of a run as an HTML page.

Its modules import Bokeh and Jinja, which come with the extra `pytest-edgeq[report]`.
"""
