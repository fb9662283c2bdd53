"""Fake quantizers: scales, rounding while training, trained scales, float16; and the qconfigs made of them."""
