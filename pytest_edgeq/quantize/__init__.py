"""
Quantize a model to a `QuantizedModel`, one module a flow.

`arguments` checks the arguments of `edgeq.quantize`, `request` stores them for a flow and finishes
its file, `resolve` chooses the flow: `pt2e`, `recipe`, `torchao`, `prebuilt` (`edgeq.load`),
`language` (of language models). `conversion_refusals` explains errors of the libraries. `session`
has settings of all models, `cache` stores the results of steps. `mixed` finds layers to leave in
float.
"""
