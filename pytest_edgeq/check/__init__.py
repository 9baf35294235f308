"""
Implementation of `edgeq.check`: judge a model and report all defects in one text.

`gate` is the interface and judges the results, `measuring` runs the samples, `agreement` compares
the runtimes, `verdict` holds the findings and formats the failure.
"""
