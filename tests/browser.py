"""A real Chromium for tests of pages: it reaches nothing but 127.0.0.1, and tells what it asks for."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)
WIDE, NARROW = (1100, 760), (320, 640)

# every visible text with its WCAG contrast against what is painted behind it, [ratio, text]
CONTRASTS = """
const seen = [];
const part = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
const colour = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length === 3 ? [...n, 1] : n; };
const over = (top, below) => [0, 1, 2].map((i) => top[3] * top[i] + (1 - top[3]) * below[i]);
function behind(node) {
  const layers = [];
  for (let n = node; n; n = n.parentElement) layers.push(colour(getComputedStyle(n).backgroundColor));
  return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
}
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const node = walk.currentNode.parentElement;
  if (!walk.currentNode.data.trim() || !node.checkVisibility()) continue;
  if (node.closest(":disabled, .unseen, svg, noscript")) continue;
  const back = behind(node);
  const ink = over(colour(getComputedStyle(node).color), back);
  const [high, low] = [light(ink), light(back)].sort((a, b) => b - a);
  seen.push([(high + 0.05) / (low + 0.05), walk.currentNode.data.trim().slice(0, 40)]);
}
return seen;
"""


class Browser:
    """One Chromium, used by many tests in turn. Raises FileNotFoundError where Debian's chromium is not installed."""

    def __init__(self) -> None:
        chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
        if not chromium or not driver:
            raise FileNotFoundError("tests of pages need Chromium: apt-get install chromium chromium-driver")
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in FLAGS:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        self.driver.set_script_timeout(20)

    def close(self) -> None:
        self.driver.quit()

    def open(self, url: str, size: tuple[int, int] = WIDE, *, dark: bool = False) -> None:
        """A fresh page of `size` CSS pixels."""
        self.driver.get("about:blank")
        self.complaints()
        self.requests()
        self.resize(*size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self.driver.get(url)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **size)

    def command(self, name: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, arguments)

    def complaints(self) -> list[str]:
        """What the console has said since it was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Every URL asked for since they were last asked."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def find(self, css: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def text(self, css: str) -> str:
        return self.find(css).text

    def value(self, css: str) -> str:
        return self.find(css).get_property("value")

    def script(self, text: str, *arguments: Any) -> Any:
        return self.driver.execute_script(text, *arguments)

    def type(self, *keys: str) -> None:
        """Keys to whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def focus(self) -> str:
        """Id of what has the focus, else its text."""
        active = self.driver.switch_to.active_element
        return active.get_attribute("id") or active.text

    def until(self, what: Callable[[], Any], seconds: float = 15) -> Any:
        """The first true value of `what`. Fails with the page's text after `seconds`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if found := what():
                    return found
            except StaleElementReferenceException:
                pass  # drawn anew in between
            time.sleep(0.03)
        raise AssertionError(f"not within {seconds} s; the page says:\n{self.text('body')}\n{self.complaints()}")

    def faint(self, least: float = 4.5) -> list[str]:
        """Visible texts with less contrast than `least`."""
        return [f"{ratio:.2f} {text}" for ratio, text in self.script(CONTRASTS) if ratio < least]

    def nameless(self) -> list[str]:
        """Roles of controls that say nothing to a screen reader."""
        nodes = self.command("Accessibility.getFullAXTree")["nodes"]
        roles = {
            "button",
            "textbox",
            "searchbox",
            "combobox",
            "checkbox",
            "slider",
            "spinbutton",
            "link",
            "application",
        }
        found = [node for node in nodes if not node["ignored"] and node["role"]["value"] in roles]
        return [node["role"]["value"] for node in found if not node.get("name", {}).get("value")]

    def picture(self, path: Path) -> None:
        """A PNG of what is shown, in 256 colours: small enough to keep."""
        shown = Image.open(io.BytesIO(self.driver.get_screenshot_as_png()))
        shown.convert("RGB").quantize(256).save(path, optimize=True)
