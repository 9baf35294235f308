"""
From a model and a quantizer to a `QuantizedModel`, one module a flow.

`resolve.py` chooses the flow, `request.py` holds what every flow is given.
"""
