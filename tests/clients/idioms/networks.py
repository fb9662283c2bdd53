"""What networks of one kind have: cameras, depths, queries, proposals, trajectories, heads over levels."""

from __future__ import annotations

from tests.clients.idioms.form import Form

_TOKENS = "{t} = {x}.flatten(2).transpose(1, 2)"
_IMAGE = "{t}.transpose(1, 2).reshape(-1, {c}, {h}, {w})"

FORMS = (
    # Several cameras in one batch.
    Form("cameras", ("{views}.mean(1)", "{views}.amax(dim=1)", "{views}[:, 0] + {views}[:, 1]",
                     "torch.max({views}, dim=1)[0]"), {"net": "nn.Conv2d({c}, {c}, 3, padding=1)"}, names="views b n",
         lines=(("{views} = torch.stack([{x}, {y}], dim=1)", "{views} = {x}.unsqueeze(1).repeat(1, 2, 1, 1, 1)",
                 "{views} = {x}[:, None].expand(-1, 2, -1, -1, -1)"),
                ("{b}, {n} = {views}.shape[:2]", "{b}, {n} = {views}.size(0), 2", "{b}, {n}, *_ = 2, 2, {c}"),
                ("{views} = {net}({views}.flatten(0, 1)).view({b}, {n}, {c}, {h}, {w})",
                 "{views} = {net}({views}.reshape(-1, {c}, {h}, {w})).unflatten(0, ({b}, {n}))"))),
    # Lift, splat: features times a distribution over depths.
    Form("depths", ("{volume}.sum(2)", "{volume}.mean(dim=2)", "{volume}.flatten(1, 2)[:, :{c}]"),
         {"depth": "nn.Conv2d({c}, 3, 1)"}, names="volume", lines=((
             "{volume} = {depth}({x}).softmax(dim=1).unsqueeze(1) * {x}.unsqueeze(2)",
             "{volume} = torch.einsum('bdhw,bchw->bcdhw', F.softmax({depth}({x}), 1), {x})",
             "{volume} = torch.mul({x}[:, :, None], torch.softmax({depth}({x}), dim=1)[:, None])"),), largest=8),
    # Decoders: learnt queries, positions behind a stub, references.
    Form("queries", ("{x} + {t}.mean(1)[:, :, None, None]", "{x} * {t}.amax(1).sigmoid().view(-1, {c}, 1, 1)"),
         {"mha": "nn.MultiheadAttention({c}, 2, batch_first=True)", "norm": "nn.LayerNorm({c})"},
         made={"query": "nn.Embedding(5, {c})"}, names="t q", lines=(
             _TOKENS, ("{q} = {query}.weight.unsqueeze(0).repeat({x}.shape[0], 1, 1)",
                       "{q} = {query}.weight[None].expand({x}.size(0), -1, -1)",
                       "{q} = {query}(torch.arange(5)).unsqueeze(0).repeat(2, 1, 1)"),
             ("{t} = {norm}({q} + {mha}({q}, {t}, {t})[0])", "{t} = {mha}(query={q}, key={t}, value={t})[0]")),
         has_arguments=True, largest=8),
    Form("position behind a stub", ("{add}.add({x}, {stub}({pos}))", "{x} + {stub}({pos})", "{stub}({pos}) * {x}"),
         made={"add": "FloatFunctional()", "stub": ("QuantStub()", "QuantStub(scale=1 / 64)"), "pos": (
             "nn.Parameter(torch.rand(1, {c}, {h}, {w}) * 2 - 1)", "torch.rand({c}, {h}, {w}) * 2 - 1")}),
    Form("references", "{x} * {ref}", {"points": "nn.Conv2d({c}, {c}, 1)"}, names="ref", lines=(
        "{ref} = {points}({x}).sigmoid()",
        ("{ref} = torch.log({ref}.clamp(min=0.1) / (1 - {ref}).clamp(min=0.1))",
         "{ref} = {ref}.clamp(min=0.05, max=0.95) * 2 - 1"),
        "{ref} = {ref}.sigmoid()")),
    # Proposals: the best tokens, or those at fixed places.
    Form("gathered", ("{x} + {t}.mean(1)[..., None, None]", "{x} - {t}.amax(dim=1).view(-1, {c}, 1, 1)"), names="t",
         made={"places": "torch.randint(0, {h} * {w}, (2, 3))"}, lines=(_TOKENS, (
             "{t} = torch.gather({t}, 1, {places}.unsqueeze(-1).expand(-1, -1, {c}))",
             "{t} = {t}[torch.arange(2)[:, None], {places}]", "{t} = {t}.index_select(1, {places}[0])"))),
    # Trajectories.
    Form("trajectory", "{x} * torch.stack({outs}, dim=-1).mean(-1)[..., None, None]", made={
        "cell": "nn.GRUCell({c}, {c})", "delta": "nn.Linear({c}, {c})"}, names="outs state point", lines=(
        "{state}, {outs} = {x}.mean((2, 3)), []", "{point} = {x}.amax((2, 3))", "for _ in range(3):",
        "    {state} = {cell}({point}, {state})", ("    {point} = {point} + {delta}({state})",
                                                   "    {point} = {delta}({state})"),
        "    {outs}.append({point})"), has_repeats=True),
    Form("summed steps", ("torch.cumsum({x}, dim=-1) * 0.2", "{x}.cumsum(2) * 0.1")),
    # Heads over levels, as detectors call them.
    Form("multi apply", ("{a}[0] + F.interpolate({a}[1], scale_factor=2)", "{a}[0] * {b}[0].mean(1, keepdim=True)"),
         made={"stem": "nn.Conv2d({c}, {c}, 1)", "scores": "nn.Conv2d({c}, {c}, 1)",
               "boxes": "nn.Conv2d({c}, 4, 3, padding=1)"}, names="levels a b one", lines=(
        "{levels} = [{x}, F.avg_pool2d({x}, 2)]",
        "def {one}(feat, stride):", "    feat = F.relu({stem}(feat))",
        "    return {scores}(feat), {boxes}(feat) * stride",
        ("{a}, {b} = map(list, zip(*map({one}, {levels}, (8, 16))))",
         "{a}, {b} = zip(*[{one}(f, s) for f, s in zip({levels}, (8, 16))])",
         "{a}, {b} = tuple(zip({one}({levels}[0], 8), {one}({levels}[1], 16)))")), smallest=4, has_repeats=True),
    Form("pyramid", ("{lat}[0]", "{lat}[0] + F.interpolate({lat}[1], size={lat}[0].shape[-2:])"), made={
        "laterals": "nn.ModuleList([nn.Conv2d({c}, {c}, 1) for _ in range(2)])"}, names="lat", lines=(
        "{lat} = [conv(f) for conv, f in zip({laterals}, ({x}, F.max_pool2d({x}, 2)))]",
        "for i in range(len({lat}) - 1, 0, -1):", (
            "    {lat}[i - 1] = {lat}[i - 1] + F.interpolate({lat}[i], scale_factor=2, mode='nearest')",
            "    {lat}[i - 1] += F.interpolate({lat}[i], size=({h}, {w}))")), smallest=4, has_repeats=True),
    # Patches: YOLOX's focus, Swin's merging, ViT's patches and class token.
    Form("focus", "{fc}({p})", {"fc": "nn.Conv2d({c} * 4, {c}, 1)"}, names="p", shape="halved", smallest=4, lines=((
        "{p} = torch.cat([{x}[..., ::2, ::2], {x}[..., 1::2, ::2], {x}[..., ::2, 1::2], {x}[..., 1::2, 1::2]], 1)",
        "{p} = F.pixel_unshuffle({x}, 2)",
        "{p} = torch.cat([{x}[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)], dim=1)"),)),
    Form("class token", "{x} * {t}[:, 0].sigmoid()[..., None, None] + {t}[:, 1:].transpose(1, 2).reshape({x}.shape)",
         {"norm": "nn.LayerNorm({c})"}, made={"token": "nn.Parameter(torch.randn(1, 1, {c}))"}, names="t", lines=(
        _TOKENS, "{t} = {norm}(torch.cat([{token}.expand({t}.shape[0], -1, -1), {t}], dim=1))"), largest=8),
    # Layers of this package, as its users call them.
    Form("own norm", "{norm}({x})", {"norm": ("horizon.nn.LayerNorm(normalized_shape=[{c}, 1, 1], dim=1)",
                                               "horizon.nn.LayerNorm([{c}, 1, 1], dim=1)")}),
    Form("own sampling", "{sample}({x}, {grid}.repeat({x}.shape[0], 1, 1, 1))", has_arguments=True,
         modules={"sample": 'horizon.nn.GridSample(mode="bilinear", padding_mode="zeros")'},
         made={"grid": "torch.rand(1, {h}, {w}, 2) * 2 - 1"}),
    Form("warp", "HF.warp({x}, {flow}.repeat({x}.shape[0], 1, 1, 1))",
         made={"flow": "torch.randn(1, {h}, {w}, 2)"}),
    # Layers whose drop is for training, and containers between blocks.
    Form("drop path", "{path}({x}) + {x}", names="path keep", lines=(
        "{keep} = 0.9", "def {path}(t):", "    if not self.training:", "        return t",
        "    mask = torch.rand(t.shape[0], 1, 1, 1).add_({keep}).floor_()", "    return t.div({keep}) * mask")),
    Form("features as a dataclass", ("F.relu({feats}.first) + {feats}.rest[0]", "{feats}.rest[0] * {feats}.rest[-1]"),
         names="feats", lines=("{feats} = Features(first={x}, rest=[{y}, {x}])",)),
    Form("size in a buffer", ("{x}.reshape(-1, {c}, *{size}.tolist())",
                              "{x}.view({x}.shape[0], {c}, int({size}[0]), -1)",
                              "F.adaptive_avg_pool2d({x}, tuple({size}.tolist()))",
                              "{x}.flatten(2).split(int({size}.prod()), -1)[0].view(-1, {c}, {h}, {w})"),
         made={"size": "torch.tensor([{h}, {w}])"}),
    Form("written parts", "{out}", names="out", lines=(
        ("{out} = torch.zeros_like({x})", "{out} = {x}.new_zeros({x}.shape)", "{out} = {x}.clone()"),
        ("{out}[:, : {c} // 2] = {x}[:, : {c} // 2] * 0.5", "{out}[..., 1:] = {y}[..., :-1]"),
        ("{out}[:, {c} // 2 :] = {y}[:, {c} // 2 :]", "{out}[:, -1] = {x}[:, 0]"), "{out}[..., :1] = {x}[..., :1]")),
    Form("standardised weight", "F.conv2d({x}, ({weight} - {weight}.mean((1, 2, 3), keepdim=True)) / {weight}.std())",
         made={"weight": "nn.Parameter(torch.randn({c}, {c}, 1, 1))"}, is_traceable=False),
)  # fmt: skip
