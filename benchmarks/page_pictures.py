"""Screenshots of ``report.html`` and ``check --html`` in docs/pages, by Chromium.

python -m lit_ft fit --config recipes/quickstart.yaml --run_dir RUN (with the options of docs/pages.md)
python -m lit_ft check --config recipes/quickstart.yaml --html check.html
python -m benchmarks.page_pictures RUN/report.html check.html
"""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

PAGES = Path(__file__).parents[1] / "docs" / "pages"
SHOTS = (
    *((page, "", width, dark) for page in ("report", "check") for width in (1280, 390) for dark in (False, True)),
    ("report", "answers", 1280, False),
    ("report", "validation", 390, False),
    ("report", "batch", 1280, True),
)
"""Page, section that it is scrolled to, width in pixels, and whether it is in dark mode."""
HEIGHT = 1300
COLORS = 96
"""Colors of a picture; few keep it small."""


def shoot(browser: str, page: Path, picture: Path, section: str, width: int, dark: bool) -> None:
    """Write a screenshot of a page.

    Args:
        browser: path of Chromium.
        page: HTML file.
        picture: PNG file to write.
        section: id of the element that the page is scrolled to; empty for the top.
        width: width of the screen in pixels.
        dark: whether the system is in dark mode.
    """
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        # In a frame: a window of Chromium's is 500 wide at least.
        frame = Path(folder) / "frame.html"
        style = f"width: {width}px; height: {HEIGHT}px; border: 0"
        address = f"{page.resolve().as_uri()}#{section}"
        frame.write_text(f'<body style="margin: 0"><iframe src="{address}" style="{style}"></iframe>')
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={folder}/profile", f"--window-size={max(width, 500)},{HEIGHT}"]
        command += ["--force-dark-mode"] if dark else []
        shot = Path(folder) / "shot.png"
        subprocess.run([*command, f"--screenshot={shot}", frame.as_uri()], check=True, capture_output=True, timeout=100)
        whole = Image.open(shot).convert("RGB").crop((0, 0, width, HEIGHT))
    whole.quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(picture, optimize=True)


def main() -> None:
    """Parse the options and write the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("report", type=Path, help="report.html of a run")
    parser.add_argument("check", type=Path, help="page of check --html")
    pages = vars(parser.parse_args())
    if (browser := shutil.which("chromium") or shutil.which("google-chrome")) is None:
        parser.error("no Chromium here: apt-get install chromium")
    PAGES.mkdir(exist_ok=True)
    for name, section, width, dark in SHOTS:
        parts = [name, section, str(width), "dark" if dark else "light"]
        picture = PAGES / f"{'-'.join(filter(None, parts))}.png"
        shoot(browser, pages[name], picture, section, width, dark)
        print(f"{picture}: {picture.stat().st_size / 1024:,.0f} KiB")


if __name__ == "__main__":
    main()
