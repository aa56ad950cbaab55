"""The board in Chromium, as a user has it: form, training, live curve, stop, resume, chat, phone."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from lit_ft.board.processes import Record

pytest.importorskip("nicegui", reason="the extra `board` is not installed")
pytest.importorskip("selenium", reason="selenium drives Chromium")
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from benchmarks.board_pictures import CHROMEDRIVER, open_browser, set_screen

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMEDRIVER, reason="no Chromium here: apt-get install chromium chromium-driver"),
    pytest.mark.xdist_group("board"),
]
ROOT = Path(__file__).parents[2]
TOKEN = "the-token-of-a-test"


class Page:
    """The open page, by the marks of its parts."""

    def __init__(self, browser: Any, address: str) -> None:
        self.browser, self.address = browser, address

    def open(self, path: str) -> None:
        self.browser.get(f"{self.address}{path}")

    def part(self, mark: str) -> Any:
        return self.wait(lambda: self.browser.find_element(By.CSS_SELECTOR, f'[data-mark="{mark}"]'))

    def shown(self, mark: str) -> bool:
        return any(one.is_displayed() for one in self.browser.find_elements(By.CSS_SELECTOR, f'[data-mark="{mark}"]'))

    def click(self, mark: str) -> None:
        self.wait(lambda: self.shown(mark))
        self.wait(lambda: self.part(mark).click() or True)

    def write(self, mark: str, text: str) -> None:
        field = self.part(mark)
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(text or Keys.DELETE)

    def text(self, mark: str) -> str:
        return str(self.part(mark).text)

    def wait(self, found: Callable[[], Any], seconds: float = 120) -> Any:
        deadline, last = time.monotonic() + seconds, None
        while time.monotonic() < deadline:
            try:
                if last := found():
                    return last
            except (StaleElementReferenceException, Exception) as error:
                last = error
            time.sleep(0.2)
        raise AssertionError(f"not after {seconds} s: {last!r}\n{self.browser.find_element(By.TAG_NAME, 'body').text}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("board")


def start_board(folder: Path) -> "tuple[subprocess.Popen[str], str]":
    command = [sys.executable, "-m", "lit_ft", "board", str(folder / "runs"), "--port", "0", "--token", TOKEN]
    # In a session of its own, as in a terminal: what ends it must not reach its children by being their group.
    board = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert board.stdout is not None
    line = next(line for line in board.stdout if line.startswith("open "))
    return board, line.split()[1]


@pytest.fixture(scope="module")
def board(folder: Path) -> "Iterator[tuple[subprocess.Popen[str], str]]":
    process, address = start_board(folder)
    yield process, address
    process.send_signal(signal.SIGINT)
    process.wait(30)


@pytest.fixture(scope="module")
def page(board: "tuple[subprocess.Popen[str], str]") -> Iterator[Page]:
    browser = open_browser()
    browser.get(board[1])
    yield Page(browser, board[1].partition("/?")[0])
    browser.quit()


def status(address: str) -> int:
    try:
        return int(urlopen(address, timeout=30).status)
    except HTTPError as error:
        return error.code


def test_without_the_token_nothing_is_shown(board: "tuple[subprocess.Popen[str], str]") -> None:
    address = board[1].partition("/?")[0]
    for path in ("/", "/new", "/?token=another-token", "/_nicegui_ws/socket.io/?EIO=4&transport=polling", "/nope"):
        assert status(address + path) == 401, path
    assert status(board[1]) == 401  # redirected to the same address without the token: a cookie has it


def test_a_port_in_use_is_an_error_with_its_fix(board: "tuple[subprocess.Popen[str], str]") -> None:
    port = re.findall(r":(\d+)/", board[1])[0]
    command = [sys.executable, "-m", "lit_ft", "board", "--port", port]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"127.0.0.1:{port} cannot be listened on" in done.stderr
    assert "give another --port" in done.stderr


def test_form_yaml_and_command_follow_each_other(page: Page) -> None:
    page.open("/new")
    page.write("data.micro_batch_size", "8")
    page.wait(lambda: "micro_batch_size: 8" in page.part("yaml").get_attribute("value"))
    command = "python -m lit_ft fit --config recipes/quickstart.yaml --data.micro_batch_size 8"
    page.wait(lambda: page.text("command") == command)
    yaml = page.part("yaml").get_attribute("value")
    assert yaml.startswith("# Teach a tiny base model")  # comments stay
    page.write("yaml", yaml.replace("max_length: 256", "max_length: 128"))
    page.wait(lambda: page.part("data.max_length").get_attribute("value") == "128")
    assert page.text("command") == f"{command} --data.max_length 128".replace(
        "--data.micro_batch_size 8 --data.max_length 128", "--data.max_length 128 --data.micro_batch_size 8"
    )


def newest_run(folder: Path) -> Path:
    return max((folder / "runs").glob("*/*"), key=lambda run: run.name)


def test_a_training_is_started_watched_stopped_and_resumed(page: Page, folder: Path) -> None:
    page.write("name", "first")
    page.click("start")
    page.wait(lambda: "/run/0/first/" in page.browser.current_url)
    page.wait(lambda: page.text("state") == "running")
    drawn = "return document.querySelector('.chart canvas, .chart svg') !== null"
    page.wait(lambda: page.shown("chart loss") and page.browser.execute_script(drawn))
    page.click("stop")
    page.click("stop now")
    page.wait(lambda: page.text("state") == "stopped")
    run = newest_run(folder)
    assert (run / "checkpoints" / "last.ckpt").exists()
    assert "resume with: python -m lit_ft fit" in (run / "board" / "fit.log").read_text()
    page.click("resume")
    page.wait(lambda: page.text("state") == "running")


def test_a_run_goes_on_when_the_board_is_killed_and_another_board_shows_it(page: Page, folder: Path) -> None:
    run = newest_run(folder)
    second, _ = start_board(folder)
    second.kill()
    second.wait()
    record = Record(**json.loads((run / "board" / "fit.json").read_text()))
    os.kill(record.pid, 0)


def test_chat_with_base_and_adapter(page: Page, folder: Path) -> None:
    page.click("stop")
    page.click("stop now")
    page.wait(lambda: page.text("state") == "stopped")
    page.browser.find_element(By.CSS_SELECTOR, '[data-mark="tab chat"]').click()
    page.click("open chat")
    page.wait(lambda: page.shown("message"))
    page.write("message", "Translate into Chinese: the red book.")
    page.click("send")
    answers = page.wait(
        lambda: (
            [one.text for one in page.browser.find_elements(By.CSS_SELECTOR, ".answer") if one.text not in ("", "...")][
                1:
            ]
            and [one.text for one in page.browser.find_elements(By.CSS_SELECTOR, ".answer")]
        )
    )
    assert len(answers) == 2
    assert answers[0] != answers[1]


@pytest.mark.parametrize("path", ["/", "/new", "run"])
def test_on_a_phone_nothing_is_wider_than_the_screen(page: Page, folder: Path, path: str) -> None:
    set_screen(page.browser, 390, dark=True)
    page.open(f"/run/0/first/{newest_run(folder).name}" if path == "run" else path)
    page.part({"/": "language", "/new": "yaml", "run": "state"}[path])
    widths = "return [innerWidth, document.documentElement.scrollWidth]"
    assert page.browser.execute_script(widths) == [390, 390]
    paper = "return getComputedStyle(document.body).backgroundColor"
    assert page.browser.execute_script(paper) == "rgb(18, 22, 29)"
    set_screen(page.browser, 1280, dark=False)


def test_the_other_language(page: Page) -> None:
    page.open("/")
    page.click("language")
    page.wait(lambda: page.browser.find_element(By.TAG_NAME, "h1").text == "训练")
    page.click("language")
    page.wait(lambda: page.browser.find_element(By.TAG_NAME, "h1").text == "Runs")


def test_no_request_left_the_machine_and_no_page_logged_an_error(page: Page) -> None:
    entries = [json.loads(entry["message"])["message"] for entry in page.browser.get_log("performance")]
    urls = [one["params"]["request"]["url"] for one in entries if one["method"] == "Network.requestWillBeSent"]
    assert len(urls) > 20
    assert [url for url in urls if not url.startswith((page.address, "data:", "blob:", "about:"))] == []
    errors = [entry for entry in page.browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == []
