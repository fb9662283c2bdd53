"""Functions of tensors: tables, numbers and constants, sums, moves, indices."""

from __future__ import annotations

from tests.clients.idioms.form import Form

FORMS = (
    Form("table", (
        "torch.tanh({x})", "{x}.sigmoid()", "F.gelu({x})", "F.leaky_relu({x}, 0.2)", "F.elu({x})", "F.softplus({x})",
        "torch.exp({x} * 0.2)", "torch.sin({x})", "torch.abs({x})", "F.hardtanh({x}, -1.0, 1.0)", "torch.clamp({x}, 0)",
        "torch.clamp({x}, min=-1.0, max=np.float32(1))", "F.relu6(input={x})",
    )),
    Form("number", (
        "{x} * 2.0", "{x} * np.float32(0.5)", "{x} * np.float64(1.5)", "{x} * (1 / math.sqrt(8))", "{x} + 1",
        "{x} + np.float32(0.25)", "{x}.pow(2)", "1.0 - {x}", "{x} / np.sqrt(2)", "{x} * torch.tensor(0.5)",
        "np.float32(2) * {x}", "torch.mul({x}, np.array(0.5).item())",
    )),
    Form("scalar functional", ("{ff}.mul_scalar({x}, 0.5)", "{ff}.mul_scalar({x}, np.float32(2))",
                               "{ff}.add_scalar({x}, 0.25)"), made={"ff": "FloatFunctional()"}),
    # A tensor where a number is meant.
    Form("constant as a number", ("{x} * {k}", "{x} / {k}", "torch.pow({x}, {two})", "{x} ** {two}", "{x} + {k}",
                                  "torch.clamp({x}, -2.0, {k}.item())", "{x} * float({k})", "{x} * {k}.item()"),
         made={"k": ("torch.tensor(2.0)", "torch.tensor([1.5])"), "two": "torch.tensor(2.0)"}),
    Form("parameter as a number", ("{x} * {k}", "{x} / {k}"), made={"k": "nn.Parameter(torch.tensor(2.0), False)"}),
    Form("sum", (
        "{x} - {x}.mean(1, keepdim=True)", "{x} + {x}.sum(dim=(2, 3), keepdim=True) * 0.02",
        "{x} * {x}.amax(1, keepdim=True)", "{x} + torch.mean(input={x}, dim=(-1,), keepdim=True)",
        "torch.sub({x}, {x}.max(dim=1, keepdim=True)[0])", "{x} - {x}.min(1, keepdim=True).values",
        "torch.stack([{x}, {y}]).mean(0)", "torch.stack([{x}, {y}]).sum(dim=0)", "torch.stack([{x}, {y}]).max(0)[0]",
        "torch.maximum({x}, {y})", "torch.stack(({x}, {y}), -1).amax(-1)",
    ), weight=2),
    Form("moved", (
        "torch.roll({x}, (1, 1), (2, 3))", "{x}.flip(3)", "{x}.transpose(2, 3).contiguous()", "{x}.clone()",
        "{x}.unsqueeze(1).squeeze(1)", "F.max_pool2d(F.pad({x}, (1, 1, 1, 1)), 3, 1)",
        "F.pad({x}, (np.int64(1), 0, 0, 0))[..., 1:]",
        "{x}.reshape({x}.shape[0], np.int64({c}), -1).view(-1, {c}, {h}, {w})",
        "{x}.view(*np.array([-1, {c}, {h}, {w}]).tolist())",
    )),
    Form("part", "torch.cat([{part}, {part}], 1)", names="part", lines=((
        "{part} = {x}[[slice(None), slice(0, {c} // 2)]]", "{part} = {x}[:, :{c} // 2]",
        "{part} = {x}[..., :{c} // 2, :, :]", "{part} = {x}[:, np.arange({c} // 2)]",
        "{part} = {x}[:, list(range({c} // 2))]", "{part} = {x}[(slice(None), slice(0, {c} // 2))]",
        "{part} = {x}.narrow(1, 0, np.int64({c} // 2))",
    ),)),
    Form("split", ("torch.cat([{b}, {a}], dim=1)", "torch.cat([{a}.relu(), {b}], 1)"), names="a b", lines=((
        "{a}, {b} = {x}.chunk(2, 1)", "{a}, {b} = torch.split({x}, {c} // 2, dim=1)",
        "{a}, {b} = {x}.split([{c} // 2, {c} // 2], 1)",
    ),)),
    Form("order", ("{x}[:, {order}]", "{x}.index_select(1, {order})"), made={"order": "torch.randperm({c})"}),
    Form("mask", ("torch.where({mask}, {x}, torch.zeros_like({x}))", "torch.where({mask}, {x}, {x} * 0.5)",
                  "torch.where({mask}, {x}, 0.0)", "{x}.masked_fill({mask}, 0.0)"),
         made={"mask": "torch.rand({h}, {w}) > 0.5"}),
    Form("best", "{x} * {best}.mean(-1).reshape(-1, {c}, 1, 1)", names="best where", lines=(
        "{best}, {where} = {x}.flatten(2).topk(4, dim=-1)",)),
    Form("dict of features", 'F.relu({feats}["a"])', names="feats", lines=('{feats} = {{"a": {x}, "b": [{x}]}}',)),
    Form("pool", ("F.avg_pool2d({x}, {size})", "F.max_pool2d({x}, {size})"), names="size", shape="halved", smallest=4,
         made={"array": "np.array([2, 2], np.int32)"}, lines=((
             "{size} = ({array}[0], {array}[1])", "{size} = tuple({array})", "{size} = int({array}[0])",
             "{size} = {array}[0]", "{size} = {array}.tolist()"),)),
    Form("resize", (
        "F.interpolate({x}, scale_factor=2.0, mode='bilinear', align_corners=False)",
        "F.interpolate({x}, scale_factor=2)", "F.interpolate({x}, size=({h} * 2, {w} * 2))",
        "F.interpolate({x}, size=(np.int64({h} * 2), np.int64({w} * 2)), mode='bilinear', align_corners=False)",
        "F.interpolate({x}, size=tuple(np.array([{h} * 2, {w} * 2])))",
        "F.interpolate({x}, size=[{x}.shape[2] * 2, {x}.shape[3] * 2])",
    ), shape="doubled", largest=8),
    Form("windows", "HF.window_reverse({parts}, 2, {h}, {w}).permute(0, 3, 1, 2)", names="parts", lines=(
        "{parts} = HF.window_partition({x}.permute(0, 2, 3, 1), 2)",)),
    Form("constant grid", "F.grid_sample({x}, {grid}.expand({x}.shape[0], -1, -1, -1), align_corners=False)",
         made={"grid": "torch.rand(1, {h}, {w}, 2) * 2 - 1"}),
    # A field of offsets that begins with zeros, as in deformable networks.
    Form("sampling offsets", "F.grid_sample({x}, ({grid} + {offset}({x}).permute(0, 2, 3, 1) * 0.1)"
         ".clamp(-1, 1), align_corners=True)",
         made={"offset": "nn.Conv2d({c}, 2, 3, padding=1)",
               "grid": "torch.stack(torch.meshgrid(torch.linspace(-1, 1, {h}), torch.linspace(-1, 1, {w}), "
                       'indexing="ij")[::-1], -1).unsqueeze(0)'},
         init=("nn.init.zeros_({offset}.weight)", ("nn.init.zeros_({offset}.bias)", "pass"))),
)  # fmt: skip
