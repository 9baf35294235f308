"""
A common interface to the converter and the quantizer libraries.

Nothing outside this folder imports litert_torch, torchao or ai_edge_quantizer, so that their
releases affect one place. Each shim names the versions and the symptom, and has a test in
`tests/litert/` that fails when it is no longer needed.

- `libraries` has their names, and rules that others have registered; `converter` converts.
- PT2E quantizers: `pt2e_graphs`, `configs`, `annotations`, `simulated`. Training: `qat`,
  `patterns`. FX mode: `fx`. torchao's `quantize_`: `ao`, `weights`. Recipes: `recipes`, `rules`.
- `graphs` stores torch graphs without pickles, `digest` hashes them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pytest_edgeq.litert.chatter import quiet as quiet
from pytest_edgeq.litert.configs import NODE_METADATA as NODE_METADATA
from pytest_edgeq.litert.configs import RefusedError as RefusedError
from pytest_edgeq.litert.libraries import converter_module as converter_module
from pytest_edgeq.litert.libraries import load_exporter as load_exporter
from pytest_edgeq.litert.libraries import registered_by_others as registered_by_others
from pytest_edgeq.litert.libraries import require_converter as require_converter
from pytest_edgeq.litert.recipes import calibrate_recipe as calibrate_recipe
from pytest_edgeq.litert.recipes import load_recipe as load_recipe
from pytest_edgeq.litert.recipes import quantize_recipe as quantize_recipe
from pytest_edgeq.litert.rules import Rule as Rule
from pytest_edgeq.litert.rules import ScopedOp as ScopedOp
from pytest_edgeq.litert.rules import check_rules as check_rules
from pytest_edgeq.litert.rules import listed_ops as listed_ops
from pytest_edgeq.litert.rules import match_rules as match_rules
from pytest_edgeq.litert.weights import QuantizedWeight as QuantizedWeight
from pytest_edgeq.litert.weights import write_weights as write_weights

if TYPE_CHECKING:
    from pytest_edgeq.litert.ao import ao_weights as ao_weights
    from pytest_edgeq.litert.ao import dequantized as dequantized
    from pytest_edgeq.litert.ao import holds_ao_weights as holds_ao_weights
    from pytest_edgeq.litert.ao import is_ao_config as is_ao_config
    from pytest_edgeq.litert.ao import quantize_ao as quantize_ao
    from pytest_edgeq.litert.converter import SIGNATURE as SIGNATURE
    from pytest_edgeq.litert.converter import Traced as Traced
    from pytest_edgeq.litert.converter import convert as convert
    from pytest_edgeq.litert.converter import export as export
    from pytest_edgeq.litert.exported import drop_guards as drop_guards
    from pytest_edgeq.litert.fx import is_prepared_by_torch_ao as is_prepared_by_torch_ao
    from pytest_edgeq.litert.native import Native as Native
    from pytest_edgeq.litert.pt2e_graphs import finish_pt2e as finish_pt2e
    from pytest_edgeq.litert.pt2e_graphs import holds_observers as holds_observers
    from pytest_edgeq.litert.pt2e_graphs import holds_quantization as holds_quantization
    from pytest_edgeq.litert.pt2e_graphs import is_pt2e_quantizer as is_pt2e_quantizer
    from pytest_edgeq.litert.pt2e_graphs import needs_data as needs_data
    from pytest_edgeq.litert.pt2e_graphs import prepare_pt2e as prepare_pt2e
    from pytest_edgeq.litert.pt2e_graphs import pt2e_preset as pt2e_preset
    from pytest_edgeq.litert.pt2e_graphs import settings_of as settings_of
    from pytest_edgeq.litert.pt2e_graphs import uncalibrated as uncalibrated
    from pytest_edgeq.litert.qat import finish_own as finish_own
    from pytest_edgeq.litert.qat import finish_qat as finish_qat
    from pytest_edgeq.litert.qat import float_side as float_side
    from pytest_edgeq.litert.qat import not_finite as not_finite
    from pytest_edgeq.litert.qat import own_graph as own_graph
    from pytest_edgeq.litert.qat import prepare_qat as prepare_qat
    from pytest_edgeq.litert.qat import trains_quantization as trains_quantization
    from pytest_edgeq.litert.qat import unseen as unseen
    from pytest_edgeq.litert.simulated import activation_scales as activation_scales
    from pytest_edgeq.litert.simulated import constants_of as constants_of
    from pytest_edgeq.litert.simulated import copied_to_run as copied_to_run
    from pytest_edgeq.litert.simulated import holds_weights_alone as holds_weights_alone
    from pytest_edgeq.litert.simulated import in_float as in_float
    from pytest_edgeq.litert.simulated import is_static as is_static
    from pytest_edgeq.litert.simulated import modules_left_in_float as modules_left_in_float
    from pytest_edgeq.litert.simulated import quantized_weights as quantized_weights
    from pytest_edgeq.litert.simulated import without_rounding as without_rounding

_WITH_TORCH = ("ao", "converter", "exported", "fx", "pt2e_graphs", "qat", "simulated")


def __getattr__(name: str) -> Any:
    """Import what needs torch with its first use: steps in other processes run without."""
    for each in _WITH_TORCH:
        module = importlib.import_module(f"{__name__}.{each}")
        if name == each or name in vars(module):
            return vars(module).get(name, module)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
