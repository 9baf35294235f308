"""
How many tensors an op of the schema takes and gives at least.

From the `Prepare` functions of the kernels in tflite/kernels (ai-edge-litert 2.3.0). Operands
beyond these are optional, or refused by the kernels with a sentence.
"""

from __future__ import annotations

from typing import NamedTuple


class Arity(NamedTuple):
    """
    The least numbers of operands.

    Attributes:
        inputs: How many there are at least.
        outputs: How many there are at least.
        required: How many of the first may not be left out (−1); None for all of `inputs`.
        all_required: None of any number may be left out.
    """

    inputs: int
    outputs: int
    required: int | None = None
    all_required: bool = False


_ONE_IN = """
    ABS AVERAGE_POOL_2D BITCAST BUCKETIZE CAST CEIL COMPLEX_ABS COS DENSIFY DEPTH_TO_SPACE
    DEQUANTIZE ELU EXP FAKE_QUANT FLOOR GELU HARD_SWISH HASHTABLE_SIZE IMAG L2_NORMALIZATION
    L2_POOL_2D LEAKY_RELU LOCAL_RESPONSE_NORMALIZATION LOG LOGICAL_NOT LOGISTIC LOG_SOFTMAX
    MATRIX_DIAG MAX_POOL_2D NEG QUANTIZE RANDOM_STANDARD_NORMAL RANDOM_UNIFORM RANK READ_VARIABLE
    REAL RELU RELU6 RELU_0_TO_1 RELU_N1_TO_1 ROUND RSQRT SHAPE SIGN SIN SKIP_GRAM SOFTMAX
    SPACE_TO_DEPTH SQRT SQUARE SQUEEZE TANH UNPACK WHERE ZEROS_LIKE
"""
_TWO_IN = """
    ADD ARG_MAX ARG_MIN ATAN2 BATCH_MATMUL BITWISE_XOR BROADCAST_ARGS BROADCAST_TO CUMSUM DIV
    EMBEDDING_LOOKUP EQUAL EXPAND_DIMS FILL FLOOR_DIV FLOOR_MOD GATHER GATHER_ND GREATER
    GREATER_EQUAL LESS LESS_EQUAL LOGICAL_AND LOGICAL_OR MATRIX_SET_DIAG MAXIMUM MEAN MINIMUM
    MIRROR_PAD MUL MULTINOMIAL NOT_EQUAL PAD POW PRELU REDUCE_ALL REDUCE_ANY REDUCE_MAX REDUCE_MIN
    REDUCE_PROD RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR REVERSE_SEQUENCE REVERSE_V2 RFFT2D
    RIGHT_SHIFT SEGMENT_SUM SPLIT SQUARED_DIFFERENCE SUB SUM TILE TRANSPOSE
"""
_THREE_IN = """
    BATCH_TO_SPACE_ND CONV_3D_TRANSPOSE DILATE DYNAMIC_UPDATE_SLICE HASHTABLE_FIND PADV2 RANGE
    SCATTER_ND SELECT SELECT_V2 SLICE SPACE_TO_BATCH_ND SPLIT_V TRANSPOSE_CONV UNSORTED_SEGMENT_MAX
    UNSORTED_SEGMENT_MIN UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_SUM
"""

ARITY: dict[str, Arity] = {
    **dict.fromkeys(_ONE_IN.split(), Arity(1, 1)),
    **dict.fromkeys(_TWO_IN.split(), Arity(2, 1)),
    **dict.fromkeys(_THREE_IN.split(), Arity(3, 1)),
    **dict.fromkeys(("ONE_HOT", "SPARSE_TO_DENSE", "STRIDED_SLICE"), Arity(4, 1)),
    # The third is the bias.
    **dict.fromkeys(("CONV_2D", "CONV_3D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"), Arity(2, 1)),
    # With its shape in the options where the second is missing.
    "RESHAPE": Arity(1, 1, all_required=True),
    **dict.fromkeys(("ADD_N", "CONCATENATION", "PACK"), Arity(1, 1, all_required=True)),
    "ASSIGN_VARIABLE": Arity(2, 0),
    "CALL_ONCE": Arity(0, 0),
    "EMBEDDING_LOOKUP_SPARSE": Arity(5, 1),
    "HASHTABLE": Arity(0, 1),
    "HASHTABLE_IMPORT": Arity(3, 0),
    "HASHTABLE_LOOKUP": Arity(3, 2),
    "IF": Arity(1, 0, all_required=True),
    "LSH_PROJECTION": Arity(2, 1),
    # The basic kernel takes 5, the full one 20 or 24 of which most are optional.
    "LSTM": Arity(5, 1, required=1),
    "NON_MAX_SUPPRESSION_V4": Arity(5, 2),
    "NON_MAX_SUPPRESSION_V5": Arity(6, 3),
    "RNN": Arity(5, 1),
    # The fourth is the bias.
    "STABLEHLO_COMPOSITE": Arity(0, 0, all_required=True),
    "SVDF": Arity(5, 1, required=3),
    "TOPK_V2": Arity(2, 2),
    "UNIDIRECTIONAL_SEQUENCE_LSTM": Arity(20, 1, required=1),
    "UNIDIRECTIONAL_SEQUENCE_RNN": Arity(5, 1),
    "UNIQUE": Arity(1, 2),
    "VAR_HANDLE": Arity(0, 1),
    "WHILE": Arity(0, 0, all_required=True),
}
