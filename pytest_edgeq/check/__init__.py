"""
`edgeq.check`: everything that must hold of a model that ships, and all that does not in one text.

`run` is the interface: `measuring` runs the samples, `gate` judges the results, `verdict` holds the
findings and writes the text of the failure.
"""
