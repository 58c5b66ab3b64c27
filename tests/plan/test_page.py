"""The data of the page, and the page itself (in a headless Chromium if there is one)."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from longspan.cli import main
from longspan.core.memory import Memory
from longspan.plan import CATALOGUE, Job, ParallelConfig, cost, read_hardware, read_model, search
from longspan.plan.job import Mode
from longspan.plan.memory_options import find_suggestions
from longspan.plan.methods import compare
from longspan.plan.views.page import MESHES_SHOWN, grid, page, render
from longspan.plan.views.report import Report, plan_dict
from tests.choose import confirming, each_value

MODEL, HARDWARE = read_model("llama-2-70b"), read_hardware("a100-80gb")
LONG_NAME = "/data/models/" + 8 * "a-long-name_" + ".json"
NASTY = 'a</script ><script>window.broken = 1</script><!--<script >"{{DATA}}"'


@functools.cache
def _page(job: Job, gpus: int, name: str = MODEL.name) -> tuple[str, dict[str, Any], dict[str, Any]]:
    model = dataclasses.replace(MODEL, name=name)
    report = Report(search(model, job, gpus, HARDWARE), model, job, gpus, HARDWARE).to_dict()
    data = grid(model, job, gpus, HARDWARE)
    return render(report, data), report, data


# ---------------------------------------------------------------------------------------------------------------------
# The what-if data.


@pytest.mark.parametrize("mode", ["prefill", *confirming(["train", "decode"])])
def test_every_point_equals_its_plan(mode: Mode) -> None:
    job = Job(context=200_000, batch=4, mode=mode)
    data = grid(MODEL, job, 6, HARDWARE)
    for i, context in list(enumerate(data["contexts"]))[::3]:
        for j, gpus in enumerate(data["gpus"]):
            at_point = dataclasses.replace(job, context=context)
            found, point = search(MODEL, at_point, gpus, HARDWARE), data["points"][i][j]
            assert point["legal"] == len(found.plans)
            best = None if point["recommended"] is None else point["plans"][point["recommended"]]["mesh"]
            assert best == (found.recommended and found.recommended.mesh.degrees)
            for listed in point["plans"]:
                plan = cost(MODEL, at_point.on(**listed["mesh"]), HARDWARE)
                assert listed == {**plan_dict(plan, max_context=False), "memory_options": None, "notes": plan.notes}


def test_a_point_lists_the_best_the_recommended_and_one_axis_meshes() -> None:
    job = Job(context=131072, batch=8, mode="prefill")
    data = grid(MODEL, job, 16, HARDWARE)
    for j, gpus in enumerate(data["gpus"]):
        found = search(MODEL, job, gpus, HARDWARE)
        point = data["points"][data["contexts"].index(131072)][j]
        listed = [ParallelConfig(**plan["mesh"]) for plan in point["plans"]]
        in_order = [plan.mesh for plan in found.plans]
        assert listed[:MESHES_SHOWN] == in_order[:MESHES_SHOWN]
        assert listed == [mesh for mesh in in_order if mesh in listed]
        legal = {
            mesh
            for mesh in (ParallelConfig(ring=gpus), ParallelConfig(ulysses=gpus), ParallelConfig(tensor=gpus))
            if mesh in in_order
        }
        assert legal <= set(listed)
        assert len(legal) == (1 if gpus in (1, 128) else 3)  # 64 query heads


# ---------------------------------------------------------------------------------------------------------------------
# The page as text.


@pytest.mark.parametrize("name", [MODEL.name, NASTY])
def test_the_page_contains_its_data_escaped(name: str) -> None:
    made, report, data = _page(Job(context=131072), 8, name)
    scripts = re.findall(r"<script[^>]*>(.*?)</script", made, flags=re.DOTALL)
    assert len(scripts) == 2
    assert json.loads(scripts[0]) == json.loads(json.dumps({"report": report, "grid": data}))
    assert "<" not in scripts[0]


def test_the_page_loads_nothing() -> None:
    made, _, _ = _page(Job(context=131072), 8)
    assert not re.search(r"(src|href)\s*=\s*[\"']?\s*(https?:)?//", made)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", made)


# ---------------------------------------------------------------------------------------------------------------------
# The page in a browser.


def _open(browser: Any, path: Path, page: str, width: int = 1400) -> None:
    path.write_text(page, encoding="utf-8")
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get_log("browser")  # empties it
    browser.get(path.as_uri())


def _find(browser: Any, selector: str) -> list[Any]:
    return list(browser.find_elements("css selector", selector))


def _press(browser: Any, slider: str, key: str, times: int = 1) -> None:
    for _ in range(times):
        _find(browser, slider)[0].send_keys(key)


LEFT, RIGHT, DOWN = "\ue012", "\ue014", "\ue015"


def test_the_page_follows_its_sliders_and_choices(browser: Any, tmp_path: Path) -> None:
    made, report, data = _page(Job(context=131072, mode="prefill"), 8)
    _open(browser, tmp_path / "plan.html", made)
    assert browser.get_log("browser") == []
    assert "llama-2-70b" in _find(browser, "h1")[0].text
    own = data["points"][data["contexts"].index(131072)][data["gpus"].index(8)]
    assert len(_find(browser, "label.mesh")) == len(own["plans"])
    assert "128k" in _find(browser, "#context-value")[0].text
    assert _find(browser, "#context")[0].get_attribute("aria-valuetext") == "128k tokens"
    assert len(_find(browser, "#rejected tbody tr")) == len({r["reasons"][0] for r in report["rejected"]})
    assert len(_find(browser, "#rejected tbody .badge")) == len(report["rejected"])
    assert "60 %" in _find(browser, "#assumptions")[0].text

    def shown() -> tuple[list[str], str]:
        return (
            [bar.get_attribute("aria-label") for bar in _find(browser, ".mesh .bar")],
            _find(browser, "#communication")[0].text,
        )

    bars, collectives = shown()
    _press(browser, "#context", RIGHT)
    assert _find(browser, "#context-value")[0].text == "256k tokens"
    assert "256k tokens on 8 GPUs" in _find(browser, "#answer")[0].text
    later_bars, later_collectives = shown()
    assert later_bars != bars
    assert later_collectives != collectives

    _press(browser, "#gpus", RIGHT, 2)
    assert "256k tokens on 32 GPUs" in _find(browser, "#answer")[0].text

    _find(browser, "#back")[0].click()
    assert shown() == (bars, collectives)
    assert browser.get_log("browser") == []

    _find(browser, ".mesh[data-mesh='ulysses=8']")[0].click()
    assert _find(browser, "#chosen h2")[0].text == "ulysses=8"
    assert "all_to_all over ulysses" in _find(browser, "#communication")[0].text

    names = [row.get_attribute("data-mesh") for row in _find(browser, "label.mesh")]
    _press(browser, ".mesh[data-mesh='ulysses=8'] input", DOWN)
    after = names[(names.index("ulysses=8") + 1) % len(names)]
    assert _find(browser, "#chosen h2")[0].text == after


def test_meshes_that_do_not_fit_are_marked(browser: Any, tmp_path: Path) -> None:
    made, _, _ = _page(Job(context=131072), 8)
    _open(browser, tmp_path / "plan.html", made)
    assert "Does not fit" in _find(browser, "#answer")[0].text
    rows = _find(browser, "label.mesh")
    assert rows
    for row in rows:
        assert row.get_attribute("data-fits") == "false"
        assert "does not fit" in row.text
        assert row.find_elements("css selector", ".bar .over")
    # With sixteen times the GPUs a short context does.
    _press(browser, "#gpus", RIGHT, 3)
    _press(browser, "#context", LEFT, 3)
    assert any(row.get_attribute("data-fits") == "true" for row in _find(browser, "label.mesh"))


@pytest.mark.parametrize(("width", "mode"), each_value([360, 800, 1400], ["train", "prefill", "decode"]))
def test_nothing_is_wider_than_the_window(browser: Any, tmp_path: Path, mode: Mode, width: int) -> None:
    made, _, _ = _page(Job(context=1_000_000, mode=mode), 8, LONG_NAME)
    _open(browser, tmp_path / "plan.html", made, width)
    assert browser.execute_script("return document.documentElement.clientWidth") > width - 20
    _press(browser, "#gpus", RIGHT, 3)
    assert browser.execute_script(TOO_WIDE) == []
    assert browser.get_log("browser") == []


TOO_WIDE = """
    const edge = document.documentElement.clientWidth;
    if (document.documentElement.scrollWidth > edge) return ["page"];
    return [...document.querySelectorAll("main *")]
      .filter((e) => !e.closest(".bar, .scroll, .curve") && e.getBoundingClientRect().right > edge + 0.5)
      .map((e) => e.outerHTML.slice(0, 120));
"""


def test_a_model_name_is_not_parsed_as_html(browser: Any, tmp_path: Path) -> None:
    made, _, _ = _page(Job(context=131072), 8, NASTY)
    _open(browser, tmp_path / "plan.html", made)
    assert browser.execute_script("return window.broken ?? null") is None
    assert _find(browser, "h1")[0].text.startswith(NASTY)
    assert browser.get_log("browser") == []


LLAMA = read_model("llama-3.1-8b")
ASKED = Job(context=131072)


def test_the_page_has_suggestions_and_methods(browser: Any, tmp_path: Path) -> None:
    h100 = CATALOGUE["h100"]
    found, methods = find_suggestions(LLAMA, ASKED, 8, h100), compare(LLAMA, ASKED, 8, h100)
    report = Report(search(LLAMA, ASKED, 8, h100), LLAMA, ASKED, 8, h100, methods, suggestions=found)
    _open(browser, tmp_path / "plan.html", page(report))
    assert found.more is not None and found.memory_options is not None
    assert _find(browser, "#more-gpus")[0].text.startswith(
        f"{found.more.mesh.ranks} GPUs of the kind suffice: {found.more.mesh},"
    )
    assert str(found.memory_options.mesh) in _find(browser, "#other-memory-options")[0].text
    rows = {row.get_attribute("data-method"): row for row in _find(browser, "#methods [data-method]")}
    assert list(rows) == [method.name for method in methods if method.plan is not None]
    for method in methods:
        if method.plan is None:
            assert f"{method.name}: {method.reason}" in _find(browser, "#methods")[0].text
            continue
        bar = rows[method.name].find_element("css selector", ".bar").get_attribute("aria-label")
        assert len(bar.split(", ")) >= sum(held > 0 for held in method.plan.memory_bytes.values())
        assert method.ops_per_layer in rows[method.name].text
        assert ("does not fit" in rows[method.name].text) == (not method.plan.fits)
    assert browser.get_log("browser") == []


@pytest.mark.parametrize(
    "extra",
    [
        ["--compare"],
        ["--json", "--memory", "checkpointing=grouped"],
        *confirming([([],)]),
    ],
)
def test_the_page_has_the_plans_that_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str]
) -> None:
    path, hardware = tmp_path / "new" / "plan.html", tmp_path / "one.toml"
    hardware.write_text('like = "cpu"\nmemory_bytes = 11e9\nflops = 1e13\n')
    args = ["plan", "--model", "qwen3-0.6b", "--gpu", str(hardware), "--gpus", "2", "--context", "16k"]
    assert main([*args, "--html", str(path), *extra]) == 0
    out, err = capsys.readouterr()
    assert f"page written to {path}" in (err if "--json" in extra else out)
    if "--json" in extra:
        json.loads(out)
    shown = json.loads(re.findall(r"<script[^>]*>(.*?)</script", path.read_text(), flags=re.DOTALL)[0])
    assert bool(shown["report"]["methods"]) == ("--compare" in extra)
    # Without memory options as flags each mesh has its own.
    report, data = shown["report"], shown["grid"]
    planned = {tuple(plan["mesh"].values()): plan for plan in report["plans"]}
    assert (len({str(plan["memory"]) for plan in report["plans"]}) == 1) == ("--memory" in extra)
    point = data["points"][data["contexts"].index(16384)][data["gpus"].index(2)]
    assert len(point["plans"]) == len(planned) == 3
    for listed in point["plans"]:
        plan = planned[tuple(listed["mesh"].values())]
        # The page searches again: without the longest context, and without why the memory options were chosen.
        assert all(listed[key] == plan[key] for key in plan.keys() - {"max_context", "reasons"})
        assert listed["memory_options"] == (
            None if plan["memory"] == report["job"]["memory"] else Memory(**plan["memory"]).describe()
        )
