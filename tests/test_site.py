"""The documentation site, opened from the disk: search works, and nothing is fetched."""

import shutil

import pytest
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.support import ROOT, browser

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site of two pages with the settings of ours; ours takes half a minute to build."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "docs/deep").mkdir(parents=True)
    (folder / "docs/index.md").write_text("# Start\n\nNothing about that here.\n")
    (folder / "docs/deep/page.md").write_text("# Below\n\n## Rotation\n\nWe speak of wombats.\n")
    for name in ("iframe-worker.js", "site.css"):
        shutil.copy(ROOT / "docs" / name, folder / "docs")
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    settings["plugins"] = [name for name in settings["plugins"] if isinstance(name, str)]
    settings["hooks"] = [str(ROOT / hook) for hook in settings["hooks"]]
    settings["nav"] = ["index.md", "deep/page.md"]
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    build(load_config(str(folder / "mkdocs.yml"), site_dir=str(folder / "site")))
    return folder / "site"


@pytest.mark.parametrize("page", ["index.html", "deep/page.html"])
def test_search_works_from_the_disk(page, site, tmp_path):
    chromium = browser.start(tmp_path / "profile")
    try:
        chromium.get((site / page).as_uri())
        browser.resize(chromium, 1280)
        chromium.find_element(By.CSS_SELECTOR, ".md-search__input").send_keys("wombats")
        found = WebDriverWait(chromium, 30).until(
            lambda driver: driver.find_elements(By.CSS_SELECTOR, ".md-search-result__link")
        )
        links = [link.get_attribute("href").partition("?")[0] for link in found]
        assert (site / "deep/page.html").as_uri() in links[0]
        assert browser.complaints(chromium) == []
        asked = browser.fetched(chromium, site / page)
        assert asked and all(address.startswith(("file:", "data:")) for address in asked)
    finally:
        chromium.quit()
