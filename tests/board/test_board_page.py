"""The board in Chromium, as a user has it: form, training, live curve, stop, resume, chat, phone."""

import contextlib
import json
import os
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

from lit_ft.commands.board import run as run_command
from lit_ft.errors import RecipeError

pytest.importorskip("nicegui", reason="the extra `board` is not installed")
pytest.importorskip("selenium", reason="selenium drives Chromium")
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.action_chains import ActionChains
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
CURVE = """
const box = document.querySelector('[data-mark="chart loss"] .nicegui-echart');
const options = box && getElement(+box.id.slice(1))?.chart?.getOption();
return options?.series?.[0]?.data?.length ?? 0"""
"""Number of points of the first curve."""


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
        self.wait(lambda: self.shown(mark))
        self.click(mark)
        field = self.part(mark)
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(text or Keys.DELETE)

    def text(self, mark: str) -> str:
        return str(self.part(mark).text)

    def wait(self, found: Callable[[], Any], seconds: float = 200) -> Any:
        deadline, last = time.monotonic() + seconds, None
        while time.monotonic() < deadline:
            try:
                if last := found():
                    return last
            except WebDriverException as error:  # not there yet, or drawn again
                last = error
            time.sleep(0.2)
        raise AssertionError(f"not after {seconds} s: {last!r}\n{self.browser.find_element(By.TAG_NAME, 'body').text}")


class Server:
    """A board on a free port."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        command = [sys.executable, "-m", "lit_ft", "board", str(folder / "runs"), "--token", TOKEN]
        self.process = subprocess.Popen(
            [*command, "--port", str(port)], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        line = next(line for line in self.process.stdout if line.startswith("open "))
        self.with_token = line.split()[1]
        self.address = self.with_token.partition("/?")[0]
        self.port = int(self.address.rpartition(":")[2])

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait(30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("board")


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[list[Server]]:
    found = [Server(folder)]
    yield found
    found[-1].end(signal.SIGINT)
    for file in folder.glob("runs/*/*/board/*.json"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(json.loads(file.read_text())["pid"], signal.SIGKILL)


@pytest.fixture(scope="module")
def page(servers: list[Server]) -> Iterator[Page]:
    browser = open_browser()
    browser.get(servers[0].with_token)
    yield Page(browser, servers[0].address)
    browser.quit()


def status(address: str) -> int:
    try:
        return int(urlopen(address, timeout=30).status)
    except HTTPError as error:
        return error.code


def test_without_the_token_nothing_is_shown(servers: list[Server]) -> None:
    for path in ("/", "/new", "/?token=another-token", "/_nicegui_ws/socket.io/?EIO=4&transport=polling", "/nope"):
        assert status(servers[0].address + path) == 401, path
    assert status(servers[0].with_token) == 401  # the redirect's target: this client keeps no cookie


def test_a_port_in_use_is_an_error_with_its_fix(servers: list[Server]) -> None:
    with pytest.raises(RecipeError, match=f"127.0.0.1:{servers[0].port} cannot be listened on .* give another --port"):
        run_command(["board", "--port", str(servers[0].port)])


def put_on_top(page: Page, name: str) -> None:
    page.click("fragments")
    page.part("fragments").send_keys(name)
    offered = ".q-menu .q-item"
    page.wait(lambda: [one.text for one in page.browser.find_elements(By.CSS_SELECTOR, offered)] == [name])
    page.part("fragments").send_keys(Keys.ARROW_DOWN, Keys.ENTER, Keys.ESCAPE)
    page.wait(lambda: f"recipes/{name}.yaml" in page.text("command"))


def test_fragments_are_further_configs_and_other_changes_stay(page: Page) -> None:
    page.open("/new")
    page.write("data.micro_batch_size", "8")
    page.wait(lambda: "--data.micro_batch_size 8" in page.text("command"))
    put_on_top(page, "tuning/ia3")
    put_on_top(page, "precision/bf16_true")
    files = ("quickstart", "tuning/ia3", "precision/bf16_true")
    configs = " ".join(f"--config recipes/{file}.yaml" for file in files)
    assert page.text("command") == f"python -m lit_ft fit {configs} --data.micro_batch_size 8"
    yaml = page.part("yaml").get_attribute("value")
    assert all(text in yaml for text in ("class_path: peft.IA3Config", "precision: bf16-true", "micro_batch_size: 8"))


def test_form_yaml_and_command_follow_each_other(page: Page) -> None:
    page.open("/new")
    page.write("data.micro_batch_size", "8")
    page.wait(lambda: "micro_batch_size: 8" in page.part("yaml").get_attribute("value"))
    command = "python -m lit_ft fit --config recipes/quickstart.yaml --data.micro_batch_size 8"
    page.wait(lambda: page.text("command") == command)
    yaml = page.part("yaml").get_attribute("value")
    assert yaml.startswith("# Teach a tiny base model")  # comments stay
    page.browser.execute_script("document.querySelector('[data-mark=\"other options\"] .q-item').click()")
    page.write("find option", "use_dora")
    page.wait(lambda: page.browser.find_element(By.CSS_SELECTOR, ".q-menu .q-item"))
    page.part("find option").send_keys(Keys.ARROW_DOWN, Keys.ENTER)
    page.wait(lambda: "DoRA" in page.browser.find_element(By.TAG_NAME, "body").text)  # its help
    page.write("option value", "true")
    page.click("set option")
    page.wait(lambda: page.text("command") == f"{command.replace(' --data', ' --model.peft.use_dora true --data')}")
    page.write("option value", "")
    page.click("set option")
    page.wait(lambda: page.text("command") == command)
    page.write("yaml", yaml.replace("max_length: 256", "max_length: 128"))
    page.wait(lambda: page.part("data.max_length").get_attribute("value") == "128")
    shorter = command.replace(" --data.micro", " --data.max_length 128 --data.micro")
    page.wait(lambda: page.text("command") == shorter)


def newest_run(folder: Path) -> Path:
    return max((folder / "runs").glob("*/*"), key=lambda run: run.name)


def test_a_training_is_started_and_watched_and_outlives_a_killed_board(
    page: Page, folder: Path, servers: list[Server]
) -> None:
    page.write("name", "no/name")
    page.click("start")
    close = page.wait(lambda: page.browser.find_element(By.CSS_SELECTOR, ".q-notification .q-btn"))
    assert close.value_of_css_property("color") == "rgba(255, 255, 255, 1)"  # on red
    page.wait(lambda: close.click() or True)
    page.write("name", "first")
    ActionChains(page.browser).double_click(page.part("start")).perform()
    page.wait(lambda: "/run/0/first/" in page.browser.current_url)
    assert len(list(folder.glob("runs/first/*"))) == 1
    page.wait(lambda: page.text("state") == "running")
    few = page.wait(lambda: page.browser.execute_script(CURVE))
    assert page.wait(lambda: page.browser.execute_script(CURVE) > few)  # it grows
    servers[0].end(signal.SIGKILL)
    servers.append(Server(folder, servers[0].port))
    page.browser.refresh()
    assert page.wait(lambda: page.text("state")) == "running"
    page.click("stop")
    page.click("stop now")
    page.wait(lambda: page.text("state") == "stopped")
    run = newest_run(folder)
    assert (run / "checkpoints" / "last.ckpt").exists()
    assert "resume with: python -m lit_ft fit" in (run / "board" / "fit.log").read_text()
    assert page.shown("resume")


def test_chat_with_base_and_adapter(page: Page, folder: Path) -> None:
    page.open(f"/run/0/first/{newest_run(folder).name}")
    page.click("tab chat")
    page.click("open chat")
    page.wait(lambda: page.shown("message"))
    page.write("message", "Translate into Chinese: the red book.")
    page.click("send")
    spoken = "return [...document.querySelectorAll('.answer')].map(one => one.innerText)"
    page.wait(lambda: len(page.browser.execute_script(spoken)) == 2 and page.shown("send"))  # both have ended
    answers = page.browser.execute_script(spoken)
    assert len(answers) == 2
    assert answers[0] != answers[1]


@pytest.mark.parametrize("path", ["/", "/new", "run"])
def test_on_a_phone_nothing_is_wider_than_the_screen(page: Page, folder: Path, path: str) -> None:
    set_screen(page.browser, 390, dark=True)
    page.open(f"/run/0/first/{newest_run(folder).name}" if path == "run" else path)
    page.part({"/": "language", "/new": "yaml", "run": "state"}[path])
    widths = "return [innerWidth, document.documentElement.scrollWidth]"
    assert page.browser.execute_script(widths) == [390, 390]
    for tab in ("samples", "console", "chat", "export", "recipe") if path == "run" else ():
        page.click(f"tab {tab}")
        page.wait(lambda tab=tab: page.part(f"tab {tab}").get_attribute("aria-selected") == "true")
        assert page.browser.execute_script(widths) == [390, 390], tab
    if path == "run":
        run, moved = newest_run(folder), folder / "moved"
        run.rename(moved)
        page.wait(lambda: page.text("failure") == f"{run} is not there any more: deleted or moved.")
        assert not page.shown("resume")
        moved.rename(run)
        page.wait(lambda: page.text("state") == "stopped" and page.shown("resume"))
    paper = "return getComputedStyle(document.body).backgroundColor"
    assert page.browser.execute_script(paper) == "rgb(18, 22, 29)"
    set_screen(page.browser, 1280, dark=False)


def test_the_list_keeps_the_focus_and_has_another_language(page: Page, folder: Path) -> None:
    page.open("/")
    row = page.wait(lambda: page.browser.find_element(By.CSS_SELECTOR, "a.run"))
    row.send_keys("")  # by keyboard
    csv = newest_run(folder) / "metrics.csv"
    os.utime(csv, (time.time() - 7200, time.time() - 7200))
    page.wait(lambda: "2 h ago" in row.text)  # the row is still the same
    assert page.browser.switch_to.active_element == row
    page.click("language")
    page.wait(lambda: page.browser.find_element(By.TAG_NAME, "h1").text == "训练")
    page.click("language")
    page.wait(lambda: page.browser.find_element(By.TAG_NAME, "h1").text == "Runs")


def test_no_request_left_the_machine_and_no_page_logged_an_error(page: Page) -> None:
    entries = [json.loads(entry["message"])["message"] for entry in page.browser.get_log("performance")]
    urls = [one["params"]["request"]["url"] for one in entries if one["method"] == "Network.requestWillBeSent"]
    assert len(urls) > 20
    assert [url for url in urls if not url.startswith((page.address, "data:", "blob:", "about:"))] == []
    errors = [entry["message"] for entry in page.browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert [one for one in errors if "ERR_CONNECTION_REFUSED" not in one] == []  # of the board that was killed
