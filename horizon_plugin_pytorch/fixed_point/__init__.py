"""The one arithmetic: pure functions on integer-valued tensors.

Training (in the VALIDATION state), converted models and the ONNX exporter all use these functions and no others.
Every rounding, shift and saturation of the package is here and in ``docs/numerics.md``.
"""

from horizon_plugin_pytorch.fixed_point.accumulator import conv, linear, matmul
from horizon_plugin_pytorch.fixed_point.accumulator_plan import (
    INT32_MAX,
    AccumulatorPlan,
    Geometry,
    plan_accumulator,
    split_digits,
)
from horizon_plugin_pytorch.fixed_point.angle import AngleTables, atan2, build_angles
from horizon_plugin_pytorch.fixed_point.byte_layers import ByteLayer
from horizon_plugin_pytorch.fixed_point.byte_products import matmul_on_bytes
from horizon_plugin_pytorch.fixed_point.byte_roundings import OneCall
from horizon_plugin_pytorch.fixed_point.coarsening import coarsen
from horizon_plugin_pytorch.fixed_point.comparison import (
    choose_comparison,
    compare,
    extremum,
    on_grid_between,
)
from horizon_plugin_pytorch.fixed_point.correlation import correlation
from horizon_plugin_pytorch.fixed_point.dynamic import Blocks, block_scale, dynamic_linear, sum_dtype
from horizon_plugin_pytorch.fixed_point.elementwise import (
    add,
    affine,
    along,
    away_from_zero,
    choose_affine,
    choose_quotient_factor,
    choose_sum_factors,
    dequantize,
    div,
    mul,
    quantize,
    requantize,
    smallest_divisor,
)
from horizon_plugin_pytorch.fixed_point.kernels import (
    are_kernels_used,
    has_products,
    integer_kernels,
    use_integer_kernels,
)
from horizon_plugin_pytorch.fixed_point.library import flatten, unflatten
from horizon_plugin_pytorch.fixed_point.mixing import choose_mix, mix_channels
from horizon_plugin_pytorch.fixed_point.norm import (
    LARGEST,
    MAGNITUDES,
    SMALLEST,
    SQUARES,
    VARIANCE,
    cumsum,
    divide_by_norm,
    is_wide,
    norm,
)
from horizon_plugin_pytorch.fixed_point.normalization import choose_logarithm, log_softmax, normalize, softmax
from horizon_plugin_pytorch.fixed_point.reduction import (
    adaptive_matrix,
    avg_pool2d,
    avg_pool3d,
    bilinear_matrix,
    bilinear_positions,
    is_beyond_float32,
    resample2d,
    resample3d,
    sum,
    weight_bits,
)
from horizon_plugin_pytorch.fixed_point.rescaling import (
    EXACT_FLOAT32,
    OutputSums,
    choose_factor,
    multiplier_and_shift,
    rescale_,
)
from horizon_plugin_pytorch.fixed_point.runs import rle
from horizon_plugin_pytorch.fixed_point.sampling import (
    deformable_attention,
    grid_factors,
    grid_sample,
    resize2d,
    roi_align,
)
from horizon_plugin_pytorch.fixed_point.scattering import bev_pool, scatter_rows
from horizon_plugin_pytorch.fixed_point.selection import topk
from horizon_plugin_pytorch.fixed_point.slopes import prelu
from horizon_plugin_pytorch.fixed_point.table import (
    Division,
    SegmentTable,
    Table,
    build_segments,
    build_table,
    evaluate,
    lookup,
    lookup_bytes,
)
from horizon_plugin_pytorch.fixed_point.transposed_layers import TransposedLayer
from horizon_plugin_pytorch.fixed_point.wide_layers import WideLayer

__all__ = [
    "EXACT_FLOAT32", "INT32_MAX", "LARGEST", "MAGNITUDES", "SMALLEST", "SQUARES", "VARIANCE", "AccumulatorPlan",
    "AngleTables", "Blocks", "ByteLayer", "Division", "Geometry", "OneCall", "OutputSums", "SegmentTable", "Table",
    "TransposedLayer", "WideLayer", "adaptive_matrix", "add", "affine", "along", "are_kernels_used", "atan2",
    "avg_pool2d", "avg_pool3d", "away_from_zero", "bev_pool", "bilinear_matrix", "bilinear_positions", "block_scale",
    "build_angles", "build_segments", "build_table", "choose_affine", "choose_comparison", "choose_factor",
    "choose_logarithm", "choose_mix", "choose_quotient_factor", "choose_slopes", "choose_sum_factors", "coarsen",
    "compare", "conv", "correlation", "cumsum", "deformable_attention", "dequantize", "div", "divide_by_norm",
    "dynamic_linear", "evaluate", "extremum", "flatten", "grid_factors", "grid_sample", "has_products",
    "integer_kernels", "is_beyond_float32", "is_wide", "linear", "log_softmax", "lookup", "lookup_bytes", "matmul",
    "matmul_on_bytes", "mix_channels", "mul", "multiplier_and_shift", "norm", "normalize", "on_grid_between",
    "plan_accumulator", "prelu", "quantize", "requantize", "resample2d", "resample3d", "rescale_", "resize2d", "rle",
    "roi_align", "scatter_rows", "smallest_divisor", "softmax", "split_digits", "sum", "sum_dtype", "topk", "unflatten",
    "use_integer_kernels", "weight_bits",
]  # fmt: skip
