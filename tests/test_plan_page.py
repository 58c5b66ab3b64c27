"""What-if data, the page made of it (in a headless Chromium where there is one), and the drawing."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longspan.core.errors import LongspanError
from longspan.core.heads import split_heads
from longspan.core.layout import choose_layout
from longspan.plan import Job, Mesh, planned, read_hardware, read_model, search
from longspan.plan.job import Mode
from longspan.plan.views.curves import BEST, PARTS_SHOWN, RANKS_SHOWN, contexts, gpu_counts, grid
from longspan.plan.views.drawing import SIZE, draw
from longspan.plan.views.page import render
from longspan.plan.views.report import to_dict

MODEL, HARDWARE = read_model("llama-2-70b"), read_hardware("a100-80gb")
NASTY = 'a</script ><script>window.broken = 1</script><!--<script >"{{DATA}}"'


@functools.cache
def _page(job: Job, gpus: int, name: str = MODEL.name) -> tuple[str, dict[str, Any], dict[str, Any]]:
    model = dataclasses.replace(MODEL, name=name)
    report = to_dict(search(model, job, gpus, HARDWARE), model, job, gpus, HARDWARE)
    data = grid(model, job, gpus, HARDWARE)
    return render(report, data), report, data


# ---------------------------------------------------------------------------------------------------------------------
# The what-if data.


@pytest.mark.parametrize(
    ("context", "first", "last"),
    [(131072, 4096, 1 << 24), (1_000_000, 4096, 1 << 24), (1 << 25, 4096, 1 << 27), (3, 2, 1 << 24)],
)
def test_contexts_are_powers_of_two_and_the_jobs_own(context: int, first: int, last: int) -> None:
    found = contexts(Job(context=context))
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (first, last)
    assert context in found
    assert all(n.bit_count() == 1 for n in found if n != context)


@pytest.mark.parametrize(("gpus", "expected"), [(1, [1, 2, 4, 8]), (6, [1, 2, 4, 6, 8, 16, 32, 64])])
def test_gpu_counts_reach_eight_times_the_jobs(gpus: int, expected: list[int]) -> None:
    assert gpu_counts(gpus) == expected


@pytest.mark.parametrize("mode", ["train", "prefill", "decode"])
def test_every_point_says_what_cost_says(mode: Mode) -> None:
    job = Job(context=200_000, batch=4, mode=mode)
    data = grid(MODEL, job, 6, HARDWARE)
    for i, context in list(enumerate(data["contexts"]))[::3]:
        for j, gpus in enumerate(data["gpus"]):
            at_point = dataclasses.replace(job, context=context)
            found, point = search(MODEL, at_point, gpus, HARDWARE), data["points"][i][j]
            assert (point["legal"], point["rejected"]) == (len(found.plans), len(found.rejected))
            best = None if point["recommended"] is None else Mesh(*point["plans"][point["recommended"]]["mesh"])
            assert best == (found.recommended and found.recommended.mesh)
            for compact in point["plans"]:
                _check(compact, data, planned(MODEL, at_point, Mesh(*compact["mesh"]), HARDWARE))


def _check(compact: dict[str, Any], data: dict[str, Any], plan: Any) -> None:
    assert compact["fits"] is plan.fits
    assert compact["runs"] is plan.runs
    assert compact["ring_impl"] == plan.ring_impl
    assert dict(zip(data["items"], compact["memory"], strict=True)) == plan.memory_bytes
    assert sum(compact["memory"]) == plan.memory_total_bytes
    for key in ("step", "compute", "exposed"):
        assert compact[key] == pytest.approx(getattr(plan, f"{key}_seconds"), rel=1e-5)
    assert compact["tokens_per_second"] == pytest.approx(plan.tokens_per_second, rel=1e-5)
    assert compact["mfu"] == pytest.approx(plan.mfu, rel=1e-5)
    assert [data["notes"][place] for place in compact["notes"]] == list(plan.notes)
    for (place, size, count, seconds), collective in zip(compact["comm"], plan.comm, strict=True):
        assert (size, count) == (collective.bytes_per_gpu, collective.count)
        assert seconds == pytest.approx(collective.seconds, rel=1e-5)
        for key, value in data["collectives"][place].items():
            assert getattr(collective, key) == value


def test_a_point_keeps_the_best_the_recommended_and_the_pure_meshes() -> None:
    job = Job(context=131072, batch=8, mode="prefill")
    data = grid(MODEL, job, 16, HARDWARE)
    for j, gpus in enumerate(data["gpus"]):
        found = search(MODEL, job, gpus, HARDWARE)
        kept = [Mesh(*plan["mesh"]) for plan in data["points"][data["contexts"].index(131072)][j]["plans"]]
        in_order = [plan.mesh for plan in found.plans]
        assert kept[:BEST] == in_order[:BEST]
        assert kept == [mesh for mesh in in_order if mesh in kept]
        legal = {mesh for mesh in (Mesh(ring=gpus), Mesh(ulysses=gpus), Mesh(tensor=gpus)) if mesh in in_order}
        assert legal <= set(kept)
        assert len(legal) == (1 if gpus in (1, 128) else 3)  # 64 query heads


def test_heads_are_dealt_as_the_layout_does() -> None:
    data = grid(MODEL, Job(context=131072), 32, HARDWARE)
    assert (data["heads"]["q"], data["heads"]["kv"]) == (64, 8)
    for key, shares in data["heads"]["shares"].items():
        tensor, ulysses = map(int, key.split(","))
        expected = split_heads(64 // tensor, max(1, 8 // tensor), ulysses)
        assert shares == [[s.q_start, s.q_stop, s.kv_start, s.kv_stop] for s in expected][:16]
    used = {(plan["mesh"][3], plan["mesh"][2]) for row in data["points"] for point in row for plan in point["plans"]}
    assert {f"{t},{u}" for t, u in used} == set(data["heads"]["shares"])


def test_lines_follow_a_mesh_as_far_as_it_fits() -> None:
    job = Job(context=1_000_000, mode="prefill")
    data = grid(MODEL, job, 8, HARDWARE)
    assert "ulysses=8" in [line["mesh"] for line in data["lines"]]
    for line in data["lines"]:
        mesh = Mesh(**{axis: int(size) for axis, size in (part.split("=") for part in line["mesh"].split())})
        assert line["contexts"] == data["contexts"]
        plans = [planned(MODEL, dataclasses.replace(job, context=n), mesh, HARDWARE) for n in line["contexts"]]
        assert line["memory"] == [plan.memory_total_bytes for plan in plans]
        assert line["step"] == pytest.approx([plan.step_seconds for plan in plans], rel=1e-5)
        assert [plan.fits for plan in plans] == [i < line["fitting"] for i in range(len(plans))]


# ---------------------------------------------------------------------------------------------------------------------
# The page as text.


@pytest.mark.parametrize("name", [MODEL.name, NASTY])
def test_page_holds_its_data_and_nothing_ends_its_script(name: str) -> None:
    page, report, data = _page(Job(context=131072), 8, name)
    scripts = re.findall(r"<script[^>]*>(.*?)</script", page, flags=re.DOTALL)
    assert len(scripts) == 2
    assert json.loads(scripts[0]) == json.loads(json.dumps({"report": report, "grid": data}))
    assert "<" not in scripts[0]


def test_page_loads_nothing() -> None:
    page, _, _ = _page(Job(context=131072), 8)
    assert not re.search(r"(src|href)\s*=\s*[\"']?\s*(https?:)?//", page)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", page)


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
def test_the_page_is_told_who_holds_which_tokens(kind: str) -> None:
    """Of every mesh and context that it may show; its own script knows no layout."""
    page, _, data = _page(Job(context=100_001, layout=kind), 12)
    shown = {(plan["mesh"][1], plan["mesh"][2]) for row in data["points"] for point in row for plan in point["plans"]}
    assert {f"{ring},{ulysses}" for ring, ulysses in shown} == set(data["layouts"])
    assert any(ring > 1 and ulysses > 1 for ring, ulysses in shown)
    for ring, ulysses in shown:
        told, layout = data["layouts"][f"{ring},{ulysses}"], choose_layout(kind, ring, ulysses)
        assert told["kind"] == layout.kind
        for n, at_context in zip(data["contexts"], told["contexts"], strict=True):
            assert len(at_context["parts"]) == (layout.size if layout.size <= PARTS_SHOWN else RANKS_SHOWN)
            for rank, flat in enumerate(at_context["parts"]):
                assert flat == [place for span in layout.spans(n, rank) for place in span]
            for rank, flat in enumerate(at_context["blocks"]):
                held = {place for u in range(ulysses) for place in layout.spans(n, rank * ulysses + u)}
                assert sum(flat[1::2]) - sum(flat[::2]) == sum(stop - start for start, stop in held)
    assert "zigzag" not in page.rpartition("<script>")[2]


# ---------------------------------------------------------------------------------------------------------------------
# The page in a browser.


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="the page is not opened: pip install selenium")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("the page is not opened: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # Both programs by their paths, or selenium would look for them in the network.
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()


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


def test_page_opens_without_an_error(browser: Any, tmp_path: Path) -> None:
    page, report, data = _page(Job(context=131072, mode="prefill"), 8)
    _open(browser, tmp_path / "plan.html", page)
    assert browser.get_log("browser") == []
    assert "llama-2-70b" in _find(browser, "h1")[0].text
    own = data["points"][data["contexts"].index(131072)][data["gpus"].index(8)]
    assert len(_find(browser, ".mesh")) == len(own["plans"])
    assert "128k" in _find(browser, "#context-value")[0].text
    assert _find(browser, "#context")[0].get_attribute("aria-valuetext") == "128k tokens"
    assert len(_find(browser, "#rejected tbody tr")) == len({r["reasons"][0] for r in report["rejected"]})
    assert len(_find(browser, "#rejected tbody .badge")) == len(report["rejected"])
    assert "60 %" in _find(browser, "#assumptions")[0].text


def test_sliders_change_bars_collectives_and_ranks(browser: Any, tmp_path: Path) -> None:
    page, _, _ = _page(Job(context=131072, mode="prefill"), 4)
    _open(browser, tmp_path / "plan.html", page)

    def shown() -> tuple[list[str], str]:
        return (
            [bar.get_attribute("aria-label") for bar in _find(browser, ".mesh .bar")],
            _find(browser, "#communication")[0].text,
        )

    bars, collectives = shown()
    _press(browser, "#context", RIGHT)
    assert _find(browser, "#context-value")[0].text == "256k tokens"
    later_bars, later_collectives = shown()
    assert later_bars != bars
    assert later_collectives != collectives

    assert len(_find(browser, "#ranks .rank")) == 4
    _press(browser, "#gpus", RIGHT)
    assert len(_find(browser, "#ranks .rank")) == 8
    _press(browser, "#gpus", RIGHT, 2)
    assert len(_find(browser, "#ranks .rank")) == 16
    assert "Ranks 16 to 31" in _find(browser, "#chosen")[0].text

    _find(browser, "#back")[0].click()
    assert shown() == (bars, collectives)
    assert browser.get_log("browser") == []


def test_meshes_are_chosen_by_click_and_by_key(browser: Any, tmp_path: Path) -> None:
    page, _, _ = _page(Job(context=131072, mode="prefill"), 8)
    _open(browser, tmp_path / "plan.html", page)
    _find(browser, ".mesh[data-mesh='ulysses=8']")[0].click()
    assert _find(browser, "#chosen h2")[0].text == "ulysses=8"
    assert "All-to-All over ulysses" in _find(browser, "#communication")[0].text
    rows = [row.text for row in _find(browser, "#ranks .rank .holds")]
    assert rows[:2] == ["tokens 0 – 16k, all heads", "all tokens, heads 0 – 7, KV 0"]
    assert rows[-2:] == ["tokens 112k – 128k, all heads", "all tokens, heads 56 – 63, KV 7"]

    names = [row.get_attribute("data-mesh") for row in _find(browser, ".mesh")]
    _press(browser, ".mesh[data-mesh='ulysses=8'] input", DOWN)
    after = names[(names.index("ulysses=8") + 1) % len(names)]
    assert _find(browser, "#chosen h2")[0].text == after


def test_choice_stays_when_the_context_moves(browser: Any, tmp_path: Path) -> None:
    page, _, _ = _page(Job(context=131072, mode="prefill"), 8)
    _open(browser, tmp_path / "plan.html", page)
    _find(browser, ".mesh[data-mesh='tensor=8']")[0].click()
    _press(browser, "#context", LEFT)
    assert _find(browser, "#chosen h2")[0].text == "tensor=8"


def test_what_does_not_fit_is_marked(browser: Any, tmp_path: Path) -> None:
    page, _, _ = _page(Job(context=131072), 8)
    _open(browser, tmp_path / "plan.html", page)
    assert "Does not fit" in _find(browser, "#answer")[0].text
    rows = _find(browser, ".mesh")
    assert rows
    for row in rows:
        assert row.get_attribute("data-fits") == "false"
        assert "does not fit" in row.text
        assert row.find_elements("css selector", ".bar .over")
    # With sixteen times the GPUs a short context does.
    _press(browser, "#gpus", RIGHT, 3)
    _press(browser, "#context", LEFT, 3)
    assert any(row.get_attribute("data-fits") == "true" for row in _find(browser, ".mesh"))


@pytest.mark.parametrize("width", [360, 800, 1400])
@pytest.mark.parametrize("mode", ["train", "prefill", "decode"])
def test_nothing_is_wider_than_the_window(browser: Any, tmp_path: Path, mode: Mode, width: int) -> None:
    page, _, _ = _page(Job(context=1_000_000, mode=mode), 8, name="/data/models/" + 8 * "a-long-name_" + ".json")
    _open(browser, tmp_path / "plan.html", page, width)
    assert browser.execute_script("return document.documentElement.clientWidth") > width - 20
    _press(browser, "#gpus", RIGHT, 3)
    too_wide = """
        const edge = document.documentElement.clientWidth;
        if (document.documentElement.scrollWidth > edge) return ["page"];
        return [...document.querySelectorAll("main *")]
          .filter((e) => !e.closest(".bar, .held, .ticks") && e.getBoundingClientRect().right > edge + 0.5)
          .map((e) => e.outerHTML.slice(0, 120));
    """
    assert browser.execute_script(too_wide) == []
    assert browser.get_log("browser") == []


def test_a_name_is_never_read_as_html(browser: Any, tmp_path: Path) -> None:
    page, _, _ = _page(Job(context=131072), 8, NASTY)
    _open(browser, tmp_path / "plan.html", page)
    assert browser.execute_script("return window.broken ?? null") is None
    assert _find(browser, "h1")[0].text.startswith(NASTY)
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("name", ["gemma-3-12b", "deepseek-v3", "gpt-oss-20b"])
def test_page_of_other_kinds_of_attention(browser: Any, tmp_path: Path, name: str) -> None:
    model, job = read_model(name), Job(context=65536, batch=2, mode="prefill")
    report = to_dict(search(model, job, 4, HARDWARE), model, job, 4, HARDWARE)
    _open(browser, tmp_path / "plan.html", render(report, grid(model, job, 4, HARDWARE)))
    for row in _find(browser, ".mesh"):
        row.click()
        assert len(_find(browser, "#ranks .rank")) == 4
    assert browser.get_log("browser") == []


# ---------------------------------------------------------------------------------------------------------------------
# The drawing.


@pytest.mark.parametrize(
    "job", [Job(context=131072), Job(context=1_000_000, mode="prefill"), Job(context=5, mode="decode")]
)
def test_drawing_is_a_png_of_the_stated_size(tmp_path: Path, job: Job) -> None:
    pytest.importorskip("matplotlib", reason="nothing is drawn: pip install matplotlib")
    draw(grid(MODEL, job, 8, HARDWARE), tmp_path / "plan.png")
    written = (tmp_path / "plan.png").read_bytes()
    assert written[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", written[16:24]) == SIZE


def test_drawing_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LongspanError, match="pip install matplotlib"):
        draw(grid(MODEL, Job(context=131072), 8, HARDWARE), tmp_path / "plan.png")


def test_drawing_refuses_when_there_is_no_mesh(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="nothing is drawn: pip install matplotlib")
    with pytest.raises(LongspanError, match="no mesh of 7 GPUs can hold a context of 3 tokens"):
        draw(grid(MODEL, Job(context=3, batch=2), 7, HARDWARE), tmp_path / "plan.png")
