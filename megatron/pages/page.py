"""Renders a jinja2 template as a self-contained HTML file: styles, plotly and figures are embedded.

Templates of pages are next to the code that computes their values.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
# Requirement by package, as in the extra `report` of pyproject.toml.
_PACKAGES = {"jinja2": "jinja2>=3.1", "plotly": "plotly>=6"}


class MissingPackageError(ImportError):
    """Raised if a package that pages require is not installed."""


def require_packages() -> None:
    """Raises MissingPackageError naming the packages that are not installed."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        install = " ".join(f"'{_PACKAGES[name]}'" for name in missing)
        raise MissingPackageError(
            f"the page needs {' and '.join(missing)}: pip install {install}, or this project's extra report"
        )


def render(template: Path, **values: Any) -> str:
    """Renders a template, which usually extends frame.html.jinja, and returns the page.

    Inserted values are escaped. Templates may call plotly_script() and source(name), which returns the text of a file
    in the template's folder or in this one. Raises MissingPackageError.
    """
    require_packages()
    import jinja2
    from markupsafe import Markup

    loader = jinja2.FileSystemLoader([template.parent, FOLDER])
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # JSON has no NaN. The order of keys is the order of rows on a page.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.globals["source"] = lambda name: Markup(loader.get_source(environment, name)[0])
    environment.globals["plotly_script"] = lambda: Markup(plotly_script())
    return environment.get_template(template.name).render(values)


def plotly_script() -> str:
    """Returns the source of plotly.js, about 4.5 MB. Raises MissingPackageError."""
    require_packages()
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())
