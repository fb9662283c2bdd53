"""Is a prepared model what its user meant?"""

from horizon_plugin_pytorch.analysis.check_qat_model import check_qat_model

__all__ = ["check_qat_model"]
