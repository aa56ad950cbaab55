"""Screenshots of the board in docs/pages, by Chromium.

python -m lit_ft board --port 8080 --token TOKEN
python -m benchmarks.board_pictures http://127.0.0.1:8080/?token=TOKEN
"""

import argparse
import io
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urljoin

from benchmarks.page_pictures import COLORS, HEIGHT, PAGES

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

CHROMEDRIVER = shutil.which("chromedriver") or ""
SHOTS = (
    ("start", "/", 1280, False),
    ("new", "/new", 1280, False),
    ("run", None, 1280, True),
    ("run", None, 390, False),
    ("new", "/new", 390, True),
)
"""Name, address (None: the first run of the list), width in pixels, and whether it is in dark mode."""


def open_browser(width: int = 1280, dark: bool = False, language: str = "en-US") -> "Chrome":
    """Chromium without a window, of a given width: below 500 pixels as a phone's.

    Args:
        width: width of the screen in pixels.
        dark: whether the system is in dark mode.
        language: language that the browser prefers.
    """
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--accept-lang={language}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = Chrome(options, Service(CHROMEDRIVER))
    set_screen(browser, width, dark)
    return browser


def set_screen(browser: "Chrome", width: int, dark: bool) -> None:
    """Give the page another width and color scheme."""
    size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def shoot(browser: "Chrome", picture: Path) -> None:
    """Write a screenshot of the page that is open."""
    from PIL import Image

    whole = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    whole.quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(picture, optimize=True)


def main() -> None:
    """Parse the options and write the pictures."""
    from selenium.webdriver.common.by import By

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("address", help="address that the board has printed, with its token")
    parser.add_argument("--out", type=Path, default=PAGES, help="folder of the pictures")
    parser.add_argument("--seconds", type=float, default=4, help="time that a page gets to draw itself")
    options = parser.parse_args()
    browser = open_browser()
    try:
        browser.get(options.address)
        time.sleep(options.seconds)
        run = browser.find_element(By.CSS_SELECTOR, "a.run").get_attribute("href")
        for name, address, width, dark in SHOTS:
            set_screen(browser, width, dark)
            browser.get(urljoin(options.address, address or str(run)))
            time.sleep(options.seconds)
            picture = options.out / f"board-{name}-{width}-{'dark' if dark else 'light'}.png"
            shoot(browser, picture)
            print(f"{picture}: {picture.stat().st_size / 1024:,.0f} KiB")
    finally:
        browser.quit()


if __name__ == "__main__":
    main()
