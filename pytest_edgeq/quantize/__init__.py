"""
From a model and a quantizer to a `QuantizedModel`, one module a flow.

`arguments` checks the arguments of `edgeq.quantize`, `request` holds them for a flow and finishes
its file, `resolve` chooses the flow: `pt2e`, `recipe`, `torchao`, `prebuilt` (`edgeq.load`).
`conversion_refusals` explains what a library refuses. `cache` keeps finished steps.
"""
