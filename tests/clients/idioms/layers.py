"""Layers: blocks, norms, weights that are shared, read, pruned or zero, recurrent cells, attention."""

from __future__ import annotations

from tests.clients.idioms.form import Form

_SAME = "nn.Conv2d({c}, {c}, 1)", "nn.Conv2d({c}, {c}, 3, padding=1)"
_TOKENS = (
    "{t} = {x}.flatten(2).transpose(1, 2)",
    "{t} = {x}.flatten(2).permute(0, 2, 1)",
    "{t} = {x}.reshape({x}.shape[0], {c}, -1).transpose(-1, -2)",
    "{t} = {x}.view({x}.size(0), {c}, np.prod(({h}, {w}))).permute(0, 2, 1)",
)
_IMAGE = "{t}.transpose(1, 2).reshape(-1, {c}, {h}, {w})"

FORMS = (
    Form("depthwise", "{dw}({x})", {"dw": "nn.Conv2d({c}, {c}, 3, padding=1, groups={c})"}),
    Form("gate", ("{x} * torch.sigmoid({gate}(F.adaptive_avg_pool2d({x}, 1)))",
                  "{x} * torch.sigmoid({gate}({x}.mean((2, 3), keepdim=True)))",
                  "{x} * torch.sigmoid({gate}({x}.mean(dim=[-2, -1], keepdim=True)))"),
         {"gate": "nn.Conv2d({c}, {c}, 1)"}),
    Form("linear last", "{fc}({x}.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)",
         {"fc": "nn.Linear({c}, 4)"}, shape=4),
    Form("functional layer", ("F.linear({x}.permute(0, 2, 3, 1), {kernel}).permute(0, 3, 1, 2)",
                              "F.conv2d({x}, {image})"),
         made={"kernel": "nn.Parameter(torch.randn({c}, {c}) * 0.3)",
               "image": "nn.Parameter(torch.randn({c}, {c}, 1, 1) * 0.3)"}),
    Form("position", "{x} + {pos}", made={"pos": ("nn.Parameter(torch.zeros(1, {c}, {h}, {w}))",
                                                  "nn.Parameter(torch.randn(1, {c}, {h}, {w}))")}),
    Form("called twice", "{twice}({twice}({x}))", {"twice": _SAME}),
    Form("member used elsewhere", "F.relu({bn}({raw})) + {raw}", {"conv": _SAME, "bn": "nn.BatchNorm2d({c})"},
         names="raw", lines=("{raw} = {conv}({x})",)),
    Form("norm", "{norm}({x})", {"norm": (
        "nn.BatchNorm2d({c})", "nn.GroupNorm(2, {c})", "nn.InstanceNorm2d({c})", "nn.LayerNorm({w})",
        "nn.LayerNorm([{h}, {w}])", "nn.LayerNorm([{c}, {h}, {w}], elementwise_affine=False)")}),
    Form("channel norm", "{norm}({x}.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)", {"norm": (
        "nn.LayerNorm({c})", "nn.LayerNorm({c}, eps=1e-6)", "nn.LayerNorm(normalized_shape=({c},))")}),
    Form("functional norm", "F.layer_norm({x}, ({w},))"),
    Form("upsample", "{up}({x})", {"up": (
        "nn.Upsample(scale_factor=2)", 'nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)',
        "horizon.nn.Interpolate(scale_factor=2, recompute_scale_factor=True)",
        'horizon.nn.Interpolate(scale_factor=(2, 2), mode="bilinear", recompute_scale_factor=True)')},
        shape="doubled", largest=8),
    # Weights: zero as sampling offsets begin, pruned, read by the forward, tied.
    Form("zero branch", "{x} + {zero}({x})", made={"zero": "nn.Conv2d({c}, {c}, 1)"}, init=(
        "nn.init.zeros_({zero}.weight)", ("nn.init.zeros_({zero}.bias)", "nn.init.uniform_({zero}.bias, -2, 2)"))),
    Form("pruned", "{sparse}({x})", made={"sparse": "nn.Conv2d({c}, {c}, 1)"}, init=((
        'prune.l1_unstructured({sparse}, "weight", 0.5)', 'prune.random_unstructured({sparse}, name="bias", amount=2)',
        'prune.ln_structured({sparse}, "weight", 0.5, n=2, dim=0)', 'prune.identity({sparse}, "weight")'),)),
    Form("weight is read", ("{conv}({x}.to({conv}.weight.dtype))", "F.relu({conv}({x}.to({conv}.weight.device)))",
                            "{conv}({x}.reshape(-1, {conv}.weight.shape[1], {h}, {w}))",
                            "{conv}({x}.view({x}.shape[0], {conv}.in_channels, {h}, {w}))"),
         made={"conv": "nn.Conv2d({c}, {c}, 1)"}),
    Form("tied by function", ("{conv}({x}) + F.conv2d({x}, {conv}.weight)", "F.conv2d({conv}({x}), {conv}.weight)",
                              "F.conv2d({x}, {conv}.weight, {conv}.bias, padding=0)"),
         made={"conv": "nn.Conv2d({c}, {c}, 1)"}),
    Form("tied layers", "{a}({x}) + {b}({x})", made={"a": "nn.Conv2d({c}, {c}, 1)", "b": "nn.Conv2d({c}, {c}, 1)"},
         init=("{b}.weight = {a}.weight",)),
    Form("hooked", "{hooked}({x})", made={"hooked": "nn.Conv2d({c}, {c}, 1)"}, init=((
        "{hooked}.register_forward_hook(lambda m, a, o: None)",
        "{hooked}.register_forward_hook(lambda m, a, k, o: None, with_kwargs=True)",
        "{hooked}.register_forward_pre_hook(lambda m, a: None)",
        "{hooked}.register_forward_pre_hook(lambda m, a, k: None, with_kwargs=True)",
        "{hooked}.register_forward_pre_hook(lambda m, a, k: (a, k), with_kwargs=True)"),)),
    # Settings that the forward reads.
    Form("settings are read", (
        '{conv}({x}) if {conv}.padding_mode == "zeros" and {conv}.stride == (1, 1) else {x}',
        "{conv}({x})[:, : {conv}.out_channels // {conv}.groups]", "{conv}({x}) * {conv}.kernel_size[0]"),
        made={"conv": ("nn.Conv2d({c}, {c}, 1)", 'nn.Conv2d({c}, {c}, 3, padding=1, padding_mode="reflect")')}),
    Form("pool that is asked", "{pool}({x}) if {pool}.kernel_size == 2 and {pool}.padding == 0 else {x}",
         made={"pool": ("nn.AvgPool2d(2)", "nn.MaxPool2d(2)")}, shape="halved", smallest=4),
    Form("slopes in a buffer", "F.prelu({x}, self.{slopes})", names="slopes",
         init=('self.register_buffer("{slopes}", torch.rand({c}) * 0.5)',)),
    Form("hook that computes", "{hooked}({x})", made={"hooked": "nn.Conv2d({c}, {c}, 1)"}, init=((
        "{hooked}.register_forward_hook(lambda m, a, o: o * 0.5)",
        "{hooked}.register_forward_hook(lambda m, a, o: torch.sigmoid(o))",
        "{hooked}.register_forward_pre_hook(lambda m, a: (a[0] + 1,))"),), is_traceable=False),
    # Tokens.
    Form("attention", _IMAGE, dict.fromkeys("qkv", "nn.Linear({c}, {c})"), names="t a", lines=(_TOKENS, (
        "{a} = {q}({t}) @ {k}({t}).transpose(1, 2)", "{a} = torch.matmul({q}({t}), {k}({t}).transpose(-2, -1))",
        "{a} = torch.bmm({q}({t}), {k}({t}).permute(0, 2, 1))",
        '{a} = torch.einsum("bic,bjc->bij", {q}({t}), {k}({t}))',
    ), ("{a} = F.softmax({a} * 0.35, dim=-1)", "{a} = ({a} * {c} ** -0.5).softmax(-1)"),
        ("{t} = {a} @ {v}({t})", "{t} = torch.matmul({a}, {v}({t}))")), largest=8, weight=2),
    Form("normed tokens", _IMAGE, {"norm": "nn.LayerNorm({c})", "fc": "nn.Linear({c}, {c})"}, names="t", lines=(
        _TOKENS, ("{t} = {t} + {fc}({norm}({t}))", "{t} = {norm}({fc}({t}))"))),
    Form("multi-head", _IMAGE, {"mha": "nn.MultiheadAttention({c}, 2, batch_first=True)"}, names="t", lines=(_TOKENS, (
        "{t} = {mha}({t}, {t}, {t})[0]", "{t} = {mha}(query={t}, key={t}, value={t})[0]",
        "{t}, _ = {mha}({t}, {t}, {t}, need_weights=False)",
        "{t} = {t} + {mha}({t}, {t}, {t}, key_padding_mask=None)[0]",
    )), has_arguments=True, largest=8),
    Form("multi-head, length first", "{t}.permute(1, 2, 0).reshape(-1, {c}, {h}, {w})",
         {"mha": "nn.MultiheadAttention({c}, 2)"}, names="t", lines=(
        "{t} = {x}.flatten(2).permute(2, 0, 1)", "{t} = {mha}({t}, {t}, value={t})[0]"), has_arguments=True, largest=8),
    Form("recurrent", "{x} * {t}.transpose(1, 2).unsqueeze(-1)", {"cell": (
        "nn.GRU({c}, {c}, batch_first=True)", "nn.LSTM({c}, {c}, batch_first=True)")}, names="t rest",
        lines=("{t}, {rest} = {cell}({x}.mean(3).transpose(1, 2))",), largest=8),
    Form("recurrent with its first state", "{x} * {t}.transpose(1, 2).unsqueeze(-1)",
         made={"cell": ("nn.GRU({c}, {c}, 2, batch_first=True)", "nn.RNN({c}, {c} // 2, batch_first=True, "
                        "bidirectional=True)")}, names="t first rest", lines=(
        "{first} = torch.zeros({cell}.num_layers * (2 if {cell}.bidirectional else 1), {x}.shape[0], "
        "{cell}.hidden_size)", "{t}, {rest} = {cell}({x}.mean(3).transpose(1, 2), {first})"), largest=8),
    Form("gru cell", "{x} * {state}[:, :, None, None]", {"cell": "nn.GRUCell({c}, {c})"}, names="state", lines=(
        ("{state} = {cell}({x}.mean((2, 3)), {x}.amax((2, 3)))", "{state} = {cell}({x}.mean(dim=(2, 3)))"),),
        has_arguments=True),
    Form("lstm cell", "{x} + {state}.unsqueeze(-1).unsqueeze(-1)", {"cell": "nn.LSTMCell({c}, {c})"},
         names="state memory", lines=(
        "{state}, {memory} = {cell}({x}.mean((2, 3)))",
        ("{state}, {memory} = {cell}({x}.amax((2, 3)), ({state}, {memory}))", "pass"),
        "{state} = {state} * {memory}"), has_arguments=True),
)  # fmt: skip
