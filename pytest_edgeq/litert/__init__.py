"""
A common interface to the converter and the quantizer libraries.

Nothing outside this folder imports litert_torch, torchao or ai_edge_quantizer, so that their
releases affect one place. Each shim names the versions and the symptom, and has a test in
`tests/litert/` that fails when it is no longer needed.

- `libraries` has their names; `converter` exports and converts, `decompositions` skips repeated
  work of torch; `extensions` finds rules that other code has registered.
- PT2E quantizers: `pt2e_graphs`, `configs`, `annotations`, `simulated`. Training: `qat`,
  `patterns`. FX mode: `fx`. torchao's `quantize_`: `ao`, `weights`. Recipes: `recipes`, `rules`.
- `graphs` and `node_metadata` store torch graphs without pickles, `digest` hashes them.
"""

from pytest_edgeq.litert.ao import (
    ao_weights,
    dequantized,
    holds_ao_weights,
    is_ao_config,
    quantize_ao,
    second_pipeline,
)
from pytest_edgeq.litert.chatter import quiet
from pytest_edgeq.litert.configs import NODE_METADATA, RefusedError
from pytest_edgeq.litert.converter import (
    SIGNATURE,
    Traced,
    convert,
    export,
)
from pytest_edgeq.litert.exported import drop_guards
from pytest_edgeq.litert.extensions import registered_by_others
from pytest_edgeq.litert.fx import (
    is_prepared_by_torch_ao,
    quantizer_from_fx,
)
from pytest_edgeq.litert.libraries import (
    converter_module,
    converter_name,
    load_exporter,
    register_operators,
)
from pytest_edgeq.litert.native import Native
from pytest_edgeq.litert.pt2e_graphs import (
    finish_pt2e,
    holds_observers,
    holds_quantization,
    is_pt2e_quantizer,
    needs_data,
    prepare_pt2e,
    pt2e_preset,
    uncalibrated,
)
from pytest_edgeq.litert.qat import (
    finish_own,
    finish_qat,
    float_side,
    not_finite,
    own_graph,
    prepare_qat,
    trains_quantization,
    unseen,
)
from pytest_edgeq.litert.recipes import calibrate_recipe, load_recipe, quantize_recipe
from pytest_edgeq.litert.rules import Rule, ScopedOp, check_rules, listed_ops, match_rules
from pytest_edgeq.litert.settings import settings_of
from pytest_edgeq.litert.simulated import (
    activation_scales,
    constants_of,
    copied_graph,
    copied_to_run,
    holds_weights_alone,
    in_float,
    is_static,
    modules_left_in_float,
    quantized_weights,
    without_rounding,
)
from pytest_edgeq.litert.weights import QuantizedWeight, write_weights

__all__ = [
    "NODE_METADATA",
    "SIGNATURE",
    "Native",
    "QuantizedWeight",
    "RefusedError",
    "Rule",
    "ScopedOp",
    "Traced",
    "activation_scales",
    "ao_weights",
    "calibrate_recipe",
    "check_rules",
    "constants_of",
    "convert",
    "converter_module",
    "converter_name",
    "copied_graph",
    "copied_to_run",
    "dequantized",
    "drop_guards",
    "export",
    "finish_own",
    "finish_pt2e",
    "finish_qat",
    "float_side",
    "holds_ao_weights",
    "holds_observers",
    "holds_quantization",
    "holds_weights_alone",
    "in_float",
    "is_ao_config",
    "is_prepared_by_torch_ao",
    "is_pt2e_quantizer",
    "is_static",
    "listed_ops",
    "load_exporter",
    "load_recipe",
    "match_rules",
    "modules_left_in_float",
    "needs_data",
    "not_finite",
    "own_graph",
    "prepare_pt2e",
    "prepare_qat",
    "pt2e_preset",
    "quantize_ao",
    "quantize_recipe",
    "quantized_weights",
    "quantizer_from_fx",
    "quiet",
    "register_operators",
    "registered_by_others",
    "second_pipeline",
    "settings_of",
    "trains_quantization",
    "uncalibrated",
    "unseen",
    "without_rounding",
    "write_weights",
]
