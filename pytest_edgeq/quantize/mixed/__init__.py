"""
Find the layers to leave in float: sensitivities, and mixed precision that meets a budget.

- `suggest` is the interface. `engine` has what a flow must offer: errors of the model with some
  layers in float, the quantizer that makes such a file, and the code that a user pastes.
- `simulated` (PT2E) toggles roundings of the quantized graph, `recipe_files` quantizes the float
  file by changed recipes, `torchao_layers` exchanges layers of the quantized module.
- `search` chooses layers by such an engine, `planner` converts them until a file meets the
  `criteria`; `results` holds what users get.
"""
