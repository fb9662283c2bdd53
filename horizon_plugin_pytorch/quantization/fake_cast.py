"""Values that the chip computes in float16."""

from horizon_plugin_pytorch.fake_quant.fake_cast import (
    FakeCast,
    _Cast,  # noqa: F401 - named in pickles
    default_fp16_fake_cast,
    is_cast,
)

__all__ = ["FakeCast", "default_fp16_fake_cast", "is_cast"]
