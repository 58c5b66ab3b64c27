"""A self-contained HTML page of a plan, which opens offline."""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files
from typing import Any


def render(report: dict[str, Any], grid: dict[str, Any], settings: dict[str, Any] | None = None) -> str:
    """Return the page.

    Args:
        report: of `longspan.plan.views.report.to_dict`.
        grid: of `longspan.plan.views.curves.grid`, for the same job.
        settings: of `longspan.plan.views.settings.settings_grid`; None: a page without switches.
    """
    job, gpu = report["job"], report["hardware"]["name"]
    title = f"longspan plan: {report['model']['name']}, {job['context']:,} tokens, {job['gpus']} x {gpu}"
    filled = {
        "TITLE": html.escape(title),
        "DATA": _inside_script({"report": report, "grid": grid, "settings": settings}),
    }
    template = files("longspan.plan.views").joinpath("page.html").read_text(encoding="utf-8")
    # In one pass, so that a model called "{{DATA}}" stays a name.
    return re.sub(r"\{\{(TITLE|DATA)\}\}", lambda found: filled[found[1]], template)


def _inside_script(data: Any) -> str:
    """Return JSON for a <script>, where the HTML parser finds `</script>` and `<!--` even in strings."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
