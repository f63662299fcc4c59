"""Draw the pictures of docs/how-it-works.md: screenshots of `fcdp dump` pages of small real runs.

    examples/lora_finetune.py on 2 x 2 ranks, --dump ─▶ fcdp dump --format html ─▶ docs/pictures/*.png

    python -m benchmarks.pictures

Needs playwright, Pillow and a Chromium on PATH.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from benchmarks.launch import ROOT, on_ranks

PICTURES = ROOT / "docs" / "pictures"
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
MACHINE = "a40x8-10gbe"
JOB = ("--batch-size=8", "--seq-len=256", "--steps=2", "--base-steps=2")
WIDTH = 1100
COLOURS = 128  # enough for a page of flat colours; the file is a third as large


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture's file name, and the strategy and the phase of the run that it shows."""

    name: str
    strategy: str
    phase: str


WANTED = (
    Picture(name="full-fcdp", strategy="fcdp", phase="base"),
    Picture(name="full-zero3", strategy="zero3", phase="base"),
    Picture(name="lora-fcdp", strategy="fcdp", phase="lora"),
)


def main() -> int:
    """Train, dump and photograph; returns 2 if there is no browser."""
    path = next((p for p in map(shutil.which, BROWSERS) if p), None)
    if path is None:
        print(f"no browser on PATH: none of {', '.join(BROWSERS)}", file=sys.stderr)
        return 2
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        for strategy in dict.fromkeys(p.strategy for p in WANTED):
            _train(strategy, folder / strategy)
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for picture in WANTED:
            page = folder / f"{picture.name}.html"
            page.write_bytes(_page(folder / picture.strategy / picture.phase))
            for scheme in ("light", "dark"):
                file = PICTURES / f"{picture.name}-{scheme}.png"
                file.write_bytes(_photograph(browser, page, scheme))
                print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1000:.0f} kB")
        browser.close()
    return 0


def _train(strategy: str, folder: Path) -> None:
    script = [str(ROOT / "examples" / "lora_finetune.py"), "--nodes=2", f"--strategy={strategy}"]
    if code := on_ranks(4, *script, f"--dump={folder}", *JOB):
        sys.exit(code)


def _page(folder: Path) -> bytes:
    command = [sys.executable, "-m", "fcdp_compile.cli", "dump", str(folder), "--format", "html"]
    shown = subprocess.run(
        [*command, "--machine", MACHINE],
        check=True,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1"},
    )
    return shown.stdout


def _photograph(browser: Browser, page: Path, scheme: str) -> bytes:
    """Photograph the page from its top to the end of the lanes, as a PNG with few colours."""
    # playwright types the scheme as a literal; ours is any string.
    shown = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    shown.goto(page.as_uri())
    shown.wait_for_selector("#figure[data-end]")
    bottom = shown.evaluate("document.querySelector('#figure').getBoundingClientRect().bottom")
    raw = shown.screenshot(
        full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": bottom + 12}
    )
    shown.close()
    small = io.BytesIO()
    picture = Image.open(io.BytesIO(raw)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    picture.save(small, format="png", optimize=True)
    return small.getvalue()


if __name__ == "__main__":
    sys.exit(main())
