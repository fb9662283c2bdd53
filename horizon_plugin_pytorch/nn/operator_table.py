"""The operator table: one row an operator, declared beside the operator's code."""

from horizon_plugin_pytorch.operators.table import (
    Call,
    Kind,
    NotBindable,
    Operator,
    ScaleRule,
    advice_for,
    advise,
    as_module,
    depends_on_graph,
    is_pair,
    register,
    row_named,
    row_of_function,
    row_of_method,
    row_of_module,
    rows,
)

__all__ = [
    "Call",
    "Kind",
    "NotBindable",
    "Operator",
    "ScaleRule",
    "advice_for",
    "advise",
    "as_module",
    "depends_on_graph",
    "is_pair",
    "register",
    "row_named",
    "row_of_function",
    "row_of_method",
    "row_of_module",
    "rows",
]
