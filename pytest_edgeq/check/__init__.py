"""
Implementation of `edgeq.check`: judge a model and report all defects in one text.

`run` is the interface: `measuring` runs the samples, `gate` judges the results, `verdict` holds the
findings and formats the failure.
"""
