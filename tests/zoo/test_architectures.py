"""Every architecture goes all the way to ONNX Runtime, or is listed with the reason why it does not."""

from __future__ import annotations

from typing import Any

import pytest

from docs.generate_models import disagreement
from horizon_plugin_pytorch.march import March, set_march
from tests.tiers import in_soak
from tests.zoo.stages import STAGES, walk

architectures = pytest.importorskip("tests.zoo.architectures", exc_type=ImportError)

pytestmark = pytest.mark.slow


# Architectures that stop early: the stages that they pass, and a part of the error's text.
STOPS: dict[str, tuple[int, str]] = {}


# Far from float in int16, for a reason.
COARSE = {
    "rt_detr": "boxes of random weights lie at 0 and 1, where log(x / (1 - x)) loses all; prepare warns of it",
}


# Only in the soak, because of a relative that is made of the same parts.
RELATIVES = {
    "albert": "bert", "conditional_detr": "detr", "convnext_v2": "convnext", "deit": "vit",
    "depth_anything": "depth_dpt", "dinov2_registers": "dinov2", "dinov3_convnext": "convnext",
    "dinov3_vit": "dinov2", "electra": "bert", "gemma": "llama", "glpn": "segformer",
    "gpt2_with_cache": "llama_with_cache", "hubert": "wav2vec2", "mask2former": "maskformer",
    "mobilevit_v2": "mobilevit", "oneformer_pixels": "maskformer", "opt": "gpt2", "owlvit_vision": "clip_vision",
    "phi": "llama", "pixtral_vision": "llama", "pvt_v2": "pvt", "qwen3": "qwen2", "regnet_x": "regnet",
    "resnet_d": "resnet", "roberta": "bert", "rt_detr": "deformable_detr", "siglip_vision": "clip_vision",
    "swin_v2": "swin", "table_transformer": "detr", "timesformer": "videomae",
}  # fmt: skip
assert not set(RELATIVES.values()) & set(RELATIVES) and set(RELATIVES) <= set(architectures.ARCHITECTURES)

FORMATS = ("qint8", "qint16")
RUNS: list[Any] = []
for number, name in enumerate(architectures.ARCHITECTURES):  # one in int8, the next in int16
    one, other = (name, FORMATS[number % 2]), (name, FORMATS[1 - number % 2])
    RUNS += in_soak(one, other) if name in RELATIVES else [one, *in_soak(other)]


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_architecture(name, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    set_march(March.NASH_E)
    model, inputs = architectures.build(name)
    result = walk(model, inputs, tmp_path, dtype)
    stages, reason = STOPS.get(name, (len(STAGES), ""))
    assert len(result.passed) == stages, result.trace
    assert reason in result.error
    if dtype == "qint16" and stages == len(STAGES) and name not in COARSE:
        assert result.distance < 0.03  # far from float would mean a wrong number somewhere, not a coarse one
    assert disagreement(name, model, dtype, result) == ""
