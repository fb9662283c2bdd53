"""Python around the layers: loops, branches, states that are made when first needed, writes in place."""

from __future__ import annotations

from tests.clients.idioms.form import Form

_GRID = (
    "    lines = torch.linspace(-1, 1, {h}), torch.linspace(-1, 1, {w})",
    '    {grid} = torch.stack(torch.meshgrid(*lines, indexing="ij")[::-1], -1).unsqueeze(0)',
)
_SAMPLED = "F.grid_sample({x}, {grid}.expand({x}.shape[0], -1, -1, -1), align_corners=True)"
_CONV = {"conv": "nn.Conv2d({c}, {c}, 1)"}

FORMS = (
    Form("cached grid", _SAMPLED, made={"grid": "None"}, lines=("if {grid} is None:", *_GRID), is_traceable=False),
    Form("grid made once", _SAMPLED, made={"grid": "None"}, init=("del {grid}",),
         lines=('if not hasattr(self, "{grid}"[5:]):', *_GRID), is_traceable=False),
    Form("cached number", "{x} * {gain}", made={"gain": "None"}, lines=(
        "if {gain} is None:", ("    {gain} = 1 / math.sqrt({x}.shape[1])", "    {gain} = torch.tensor(0.5)")),
        is_traceable=False),
    Form("branch on shape", "{t}", _CONV, names="t", lines=(
        "{t} = {conv}({x})", "if {t}.shape[-1] % 2 == 0 and {t}.dim() == 4:", "    {t} = {t} * 0.5"),
        is_traceable=False),
    Form("branch on training", "{t}", names="t", lines=(
        "{t} = {x} * 0.5", "if self.training:", "    {t} = F.dropout({t}, 0.1, training=True)")),
    Form("guarded", "{t}", names="t", lines=(
        "try:", "    {t} = {x} * 0.5", "except KeyError:", "    {t} = {x}",
        "assert {t}.shape == {x}.shape, f'{{{t}.shape}}'"), is_traceable=False),
    Form("statement in place", "{t}", _CONV, names="t", lines=("{t} = {conv}({x})", (
        "{t}.clamp_(-0.5, 0.5)", "{t}.mul_(0.5)", "{t}.relu_()", "{t}.add_(0.25)", "{t}.sigmoid_()"))),
    Form("activation in place", "{act}({t}) + {second}", {**_CONV, "act": (
        "nn.SiLU(inplace=True)", "nn.ReLU(inplace=True)", "nn.Hardswish(inplace=True)")}, names="t second",
        lines=("{t} = {conv}({x})", "{second} = {t}")),
    Form("levels", ("{outs}[0] * {outs}[1]", "sum({outs})", "torch.stack({outs}).sum(0)"), names="outs", made={
        "heads": "nn.ModuleList(nn.Conv2d({c}, {c}, 1) for _ in range(2))",
        "level": ("nn.Parameter(torch.randn(2, {c}))", "nn.Parameter(torch.zeros(2, {c}))")}, lines=(
        "{outs} = []", "for i, head in enumerate({heads}):",
        "    {outs}.append(head({x}) + {level}[i].view(1, -1, 1, 1))"), has_repeats=True),
    Form("zipped levels", ("{outs}[0] + {outs}[1]", "torch.cat({outs}, 1)[:, :{c}]", "torch.max({outs}[0], {outs}[1])"),
         names="outs", made={
        "lateral": "nn.ModuleList([nn.Conv2d({c}, {c}, 1), nn.Conv2d({c}, {c}, 1)])",
        "smooth": "nn.ModuleList([nn.Conv2d({c}, {c}, 3, padding=1), nn.Identity()])"},
        lines=("{outs} = [s(F.relu(l({x}))) for l, s in zip({lateral}, {smooth})]",), has_repeats=True),
    Form("steps of a decoder", "{t}", {"step": "nn.Conv2d({c}, {c}, 1)"}, names="t", lines=(
        "{t} = {x}", "for _ in range(3):", ("    {t} = {step}({t}) + {x}", "    {t} = F.relu({step}({t}))")),
        has_repeats=True),
    Form("layers by name", "{t}", names="t stem", init=("for i in range(2):", (
        '    setattr(self, f"{stem}_{{i}}", nn.Sequential(nn.Conv2d({c}, {c}, 1), nn.ReLU()))')),
        lines=("{t} = {x}", "for i in range(2):", '    {t} = getattr(self, f"{stem}_{{i}}")({t})')),
    Form("function inside", "{f}({x})", names="f", lines=((
        "{f} = lambda t: t.sigmoid() * t", "def {f}(t, gain=0.5): return F.relu(t) * gain"),)),
)  # fmt: skip
