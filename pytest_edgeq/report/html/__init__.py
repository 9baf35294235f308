"""
The record of a run as an HTML page.

`page` is the interface, `history` the page of several runs; `view` computes the content,
`chart_data` the data of charts, `charts` draws them.

The modules import Bokeh and Jinja, which come with the extra `pytest-edgeq[report]`.
"""
