"""The site builds strictly, lists and searches every page, asks no other host, and quotes real messages."""

from __future__ import annotations

import ast
import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import fcdp_compile
from docs.site import rooms
from tests.docs.blocks import ROOT

yaml = pytest.importorskip("yaml", reason="zensical is not installed (pip install '.[docs]')")
pytest.importorskip("zensical", reason="zensical is not installed (pip install '.[docs]')")

DOCS = ROOT / "docs"
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
FETCHING = {"script": "src", "img": "src", "link": "href", "source": "srcset", "iframe": "src"}
"""Attributes that a browser fetches without being asked to."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site.  Zensical builds into the project's folder only, hence a copy."""
    project = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "mkdocs.yml", project)
    shutil.copytree(DOCS, project / "docs")
    for name in ("fcdp_compile", "passes", "runtime"):
        (project / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower(), done.stdout + done.stderr
    return project / _settings()["site_dir"]


class _Page(HTMLParser):
    """What a page fetches, what it links to, and what can be linked to in it."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors.add(values.get("id") or "")
        if tag == "a":
            self.links.append(values.get("href") or "")
        is_only_named = tag == "link" and values.get("rel") in ("canonical", "prev", "next")
        if tag in FETCHING and not is_only_named:
            self.addresses.append(values.get(FETCHING[tag]) or "")


def _read(site: Path) -> dict[Path, _Page]:
    pages = {}
    for file in site.resolve().rglob("*.html"):
        pages[file] = _Page()
        pages[file].feed(file.read_text(encoding="utf-8"))
    return pages


def _nav(entries: Any) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, str):
            yield entry
            continue
        for value in entry.values():
            yield from [value] if isinstance(value, str) else _nav(value)


def _settings() -> Any:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def test_the_navigation_lists_every_page() -> None:
    settings = _settings()
    left_out = settings["exclude_docs"].split()
    pages = {
        page
        for page in (str(f.relative_to(DOCS)) for f in DOCS.rglob("*.md"))
        if not any(page == name or page.startswith(name) for name in left_out)
    }
    listed = list(_nav(settings["nav"]))
    assert sorted(listed) == sorted(pages)


@pytest.mark.slow
def test_every_page_is_built_and_no_other(site: Path) -> None:
    built = {str(page.relative_to(site)) for page in site.rglob("*.html")}
    listed = {str(Path(page).with_suffix(".html")) for page in _nav(_settings()["nav"])}
    assert built == listed | {"404.html"}
    assert not (site / "site").exists(), "code of docs/site"


@pytest.mark.slow
def test_search_knows_every_page(site: Path) -> None:
    found = json.loads((site / "search.json").read_text(encoding="utf-8"))
    known = {item["location"].partition("#")[0] for item in found["items"]}
    assert known == {str(Path(page).with_suffix(".html")) for page in _nav(_settings()["nav"])}


@pytest.mark.slow
def test_links_lead_to_files_and_anchors(site: Path) -> None:
    """Zensical itself asks this only of links between pages."""
    pages = _read(site)
    for page, found in pages.items():
        for link in found.links:
            address, _, anchor = link.partition("#")
            if re.match(r"https?://|mailto:", address):
                continue
            assert page.name == "404.html" or not address.startswith("/"), f"{page.name}: {link}"
            target = page
            if address:
                where = site if address.startswith("/") else page.parent
                target = (where / address.lstrip("/")).resolve()
            assert target.is_file(), f"{page.name}: {link}"
            if anchor:
                assert anchor in pages[target].anchors, f"{page.name}: {link}"


@pytest.mark.slow
def test_pages_name_nothing_to_fetch_from_other_hosts(site: Path) -> None:
    for page, found in _read(site).items():
        assert found.addresses
        for address in found.addresses:
            assert not re.match(r"(https?:)?//", address), f"{page.name} fetches {address}"
            if address and not address.startswith("data:"):
                file = address.partition("?")[0]
                where = site if file.startswith("/") else page.parent
                assert (where / file.lstrip("/")).exists(), f"{page.name}: {address}"
    for sheet in site.rglob("*.css"):
        imports = re.findall(r"url\(['\"]?(https?://[^)]*)|@import", sheet.read_text())
        assert not imports, f"{sheet.name}: {imports}"


@pytest.mark.slow
def test_a_browser_asks_no_other_host(site: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next((p for p in map(shutil.which, BROWSERS) if p), None)
    if path is None:
        pytest.skip(f"no browser on PATH: none of {', '.join(BROWSERS)}")
    with _Served(site) as address, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page()
        asked: list[str] = []
        complaints: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        for name in ("index", "how-it-works", "api", "benchmarks"):
            page.goto(f"{address}/{name}.html", wait_until="networkidle")
        browser.close()
    assert asked
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []
    assert complaints == []


class _Served:
    """Serves a folder over HTTP on this machine, within a `with` block."""

    def __init__(self, folder: Path) -> None:
        handler = functools.partial(_Quiet, directory=str(folder))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.slow
def test_the_reference_has_every_public_name(site: Path) -> None:
    built = (site / "api.html").read_text(encoding="utf-8")
    for name in fcdp_compile.__all__:
        home = fcdp_compile._HOMES[name]
        ids = (f'id="fcdp_compile.{name}"', f'id="fcdp_compile.{home}.{name}"')
        assert any(i in built for i in ids), f"docs/api.md does not show {name}"


def test_links_from_readme_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / target).exists(), target


def test_the_picture_of_the_rooms_is_drawn_from_today_s_imports() -> None:
    assert rooms.PICTURE.read_text(encoding="utf-8") == rooms.svg(), "python -m docs.site.rooms"


def test_pages_name_files_that_exist() -> None:
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"`((?:examples|benchmarks)/[\w/.-]+\.\w+)`", text):
            assert (ROOT / name).is_file(), f"{page.name} names {name}"


QUOTING = (
    *("../README.md", "index.md", "strategies.md", "limits.md", "troubleshooting.md"),
    *("faq.md", "issues.md"),
)
"""Pages with figures of the benchmark."""


@pytest.mark.parametrize("page", QUOTING)
def test_quoted_figures_stand_where_they_were_measured(page: str) -> None:
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    known = {float(figure) for figure in re.findall(r"\d+\.\d+", text)}
    for figure in re.findall(
        r"(?<![\d:/])\d+\.\d+(?!\d)", (DOCS / page).read_text(encoding="utf-8")
    ):
        digits = len(figure.partition(".")[2])
        is_measured = any(f"{value:.{digits}f}" == figure for value in known)
        assert is_measured or figure in NO_FIGURES, f"{page} says {figure}, the benchmark does not"


NO_FIGURES = {*(f"2.{n}" for n in range(11, 16)), *(f"3.{n}" for n in (11, 12, 13)), "0.9"}
"""Versions of torch and Python, and the default of an option."""


def _messages() -> str:
    """Every string of the source, one after the other, with a NUL for each inserted value."""
    found: list[str] = []
    for folder in ("fcdp_compile", "passes", "runtime"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    found.append(
                        "".join(
                            str(v.value) if isinstance(v, ast.Constant) else "\0"
                            for v in node.values
                        )
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


def test_quoted_messages_are_in_the_code() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    messages = _messages()
    quoted = [
        " ".join(q.split()) for q in re.findall(r"(?<![*\w])\*(?! )([^*]{20,}?)\*(?!\*)", page)
    ]
    assert len(quoted) > 15
    for message in quoted:
        for part in message.split("…"):
            text = part.strip(" :;,")
            assert text in messages, f"no message says {text!r} (of {message!r})"
