"""Templates to self-contained HTML documents.

Everything that a template of HTML prints is escaped (autoescape) unless it is written in the
template itself; the one script is allowed by its hash, so no other one can run.
"""

import base64
import hashlib
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from deberta_ds.base.numbers import format_duration, format_value
from deberta_ds.base.version import __version__

TEMPLATES = Path(__file__).parent / "templates"


@cache
def template(name: str) -> Template:
    """Return a file of templates/; a missing value is an error.

    Filters: VALUE|value(UNIT) and SECONDS|duration as everywhere, SHARE|percent as a place from 0
    to 100 (only the diagnostic AX-b, a correlation, can score below 0), TEXT|cell in Markdown.
    """
    environment = Environment(loader=FileSystemLoader(TEMPLATES), trim_blocks=True,
                              autoescape=name.endswith(".html"), lstrip_blocks=True,
                              undefined=StrictUndefined)
    environment.filters |= {"value": format_value, "duration": format_duration,
                            "percent": lambda share: round(100 * max(0.0, share), 2),
                            "cell": _cell}
    return environment.get_template(name)


def _cell(value: object) -> str:
    """Return a value as text that stays inside one cell of a Markdown table."""
    text = " ".join(str(value).split())
    return text.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def render(name: str, /, **values) -> str:
    """Return the page of a template; it needs no network and no other file."""
    script = (TEMPLATES / "script.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = template(name).render(
        version=__version__, script=Markup(script), script_hash=f"sha256-{digest}", **values)
    # Half of a surrogate pair has no bytes in UTF-8.
    return page.encode("utf-8", "replace").decode()
