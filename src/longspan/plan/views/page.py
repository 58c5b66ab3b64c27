"""One self-contained HTML page of a plan: everything it needs is inside, so it opens offline and can be mailed."""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files
from typing import Any


def render(report: dict[str, Any], grid: dict[str, Any], settings: dict[str, Any] | None = None) -> str:
    """The page, as text.

    Args:
        report: what `longspan.plan.views.report.to_dict` made of the job.
        grid: what `longspan.plan.views.curves.grid` made of the same job.
        settings: what `longspan.plan.views.settings.settings_grid` made of it; None for a page without switches.
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
    """JSON that can stand in a <script>: the HTML parser looks for `</script>` and `<!--` there, in strings as well."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
