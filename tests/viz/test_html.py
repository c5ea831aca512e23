"""The static page is one file that fetches nothing, escapes every name, and works in a browser."""

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from segcal.metrics import CalibrationMeter
from segcal.metrics.rows import cells_of, columns_of, more_columns_of
from segcal.viz import Overlay, PageRow, overlay_panel, write_figures, write_page
from segcal.viz.drawings import Drawings
from segcal.viz.html import (
    class_columns,
    class_rows,
    facts,
    headline,
    render_page,
    verdict,
)
from tests.support.browser import complaints, fetched, resize, set_scheme, start
from tests.support.synthetic_reports import constant_report, predictor, synthetic_report

NAMES = ["road", "sky", "tree", "<i>car</i>"]
EVIL = '"><script>document.title = "run"</script><img src="http://127.0.0.1:9/x.png">'
LOG = [
    {"epoch": epoch, "holdout/ece": 0.1 / epoch, "holdout/sce": 0.01 / epoch, "best": epoch < 3}
    for epoch in (1, 2, 3)
]


def entry(name="nll", sharpness=3.0, **more):
    return PageRow(name, synthetic_report(sharpness=sharpness, names=NAMES, per_image=True), **more)


@pytest.fixture(scope="module")
def evil_page(tmp_path_factory):
    """A page of two entries whose every name wants to break out."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(evil_entries(), path, title=f"Title {EVIL}", static=True)
    return path


def evil_entries():
    panel = overlay_panel(None, *predictor(0.7), name=EVIL)
    first = entry(
        EVIL,
        history=LOG,
        config=f"loss: nll\nname: {EVIL}\n",
        overlays=[Overlay(EVIL, panel, 0.0734)],
        skipped=[f"{EVIL}.npz: truncated"],
    )
    return [first, entry("calm", 1.0, history=LOG)]


class Elements(HTMLParser):
    """Tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self._stack = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._stack.append(tag)

    def handle_endtag(self, tag):
        while self._stack and self._stack.pop() != tag:
            pass

    def handle_data(self, data):
        if not {"script", "style"} & set(self._stack):
            self.words.append(data)

    def all(self, tag):
        return [attrs for each, attrs in self.tags if each == tag]


@pytest.fixture(scope="module")
def evil(evil_page):
    return Elements(evil_page.read_text())


def test_names_are_words_not_tags(evil):
    assert len(evil.all("script")) == 1
    assert not any("onerror" in attrs for _, attrs in evil.tags)
    assert EVIL in "".join(evil.words)
    assert "<i>car</i>" in evil.words
    assert not evil.all("i")


def test_nothing_points_outside(evil):
    for tag, attrs in evil.tags:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert attrs.get(name, "#").startswith(("data:", "#")), (tag, attrs)
    styles = " ".join(attrs.get("style") or "" for _, attrs in evil.tags)
    assert "url(" not in styles and "@import" not in styles


def test_pictures_point_nowhere_either(evil):
    for image in evil.all("img"):
        kind, data = image["src"].split(";base64,")
        if kind == "data:image/svg+xml":
            svg = base64.b64decode(data).decode()
            assert "<script" not in svg
            for target in re.findall(r'(?:href|src)="([^"]*)"', svg) + re.findall(
                r"url\((.*?)\)", svg
            ):
                assert target.startswith(("#", "data:"))


def test_policy_allows_our_script_alone(evil_page, evil):
    policy = next(
        attrs["content"]
        for attrs in evil.all("meta")
        if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    script = re.search(r"<script>(.*?)</script>", evil_page.read_text(), re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "img-src data:" in policy


def test_page_holds_what_it_must(evil):
    words = " ".join(evil.words)
    report = entry().report
    reports = [report, entry("calm", 1.0).report]
    (cells, _) = cells_of(reports, columns_of(reports) + more_columns_of(reports))
    for needed in (
        *(cell.text for cell in cells),
        *(cell.interval for cell in cells),
        "ECE of this image 7.34 %",
        "1 file left out",
        "truncated",
        "loss: nll",
        "15 of equal width, (lo, hi]",
        "segcal 0.",
        f"{report.protocol.pixels:,} pixels of 8 images",
    ):
        assert needed in words
    titles = {image["alt"].split(":")[0] for image in evil.all("img")}
    assert {
        *("Reliability", "Confidence", "Confidence of wrong predictions", "Reliability by class"),
        *("Gaps by class and bin", "ECE over training", "SCE over training"),
    } <= titles
    assert all(image["alt"] for image in evil.all("img"))


def test_page_is_small_and_always_the_same(evil_page):
    again = evil_page.with_name("again.html")
    write_page(evil_entries(), again, title=f"Title {EVIL}", static=True)
    assert again.read_bytes() == evil_page.read_bytes()
    assert again.stat().st_size < 1_500_000
    assert sorted(evil_page.parent.iterdir()) == [again, evil_page]  # no temporary file is left


def test_a_report_without_pixels_has_a_page():
    empty = CalibrationMeter(3, per_image=True).compute()
    assert "Nothing was counted." in render_page([PageRow("empty", empty)])
    phrases = headline([PageRow("empty", empty), PageRow("full", synthetic_report(3))])
    assert phrases[0].text == "full"


def test_headline_says_what_was_found():
    sure = constant_report(0.9, 7, class_names=["cat", "dog"])
    text = "".join(phrase.text for phrase in headline([PageRow("a", sure)]))
    assert text.replace("\u00a0", " ").replace("\u2011", "-") == (
        "Over-confident by 20.0 points: mean confidence 90.0 %, accuracy 70.0 %. ECE is 20.00 %; "
        "the worst calibrated class is cat, with a class-j-ECE of 20.00 %."
    )
    assert verdict(sure) == ("over-confident by 20.0 points", "over")
    assert verdict(constant_report(0.6, 7)) == ("under-confident by 10.0 points", "under")
    assert verdict(constant_report(0.7, 7)).kind == "even"


def test_headline_of_several_names_the_best_and_warns_of_overlap():
    entries = [entry("sharp"), entry("calm", 1.0), entry("twin", 1.0)]
    text = "".join(phrase.text for phrase in headline(entries)).replace("\u00a0", " ")
    assert text.startswith("calm has the lowest ECE")
    assert "sharp has the highest" in text
    (accuracy,) = re.findall(r"Accuracy is (\S+) % for all\.", text)  # the same predictions
    assert float(accuracy) == pytest.approx(100 * entries[0].report.accuracy, abs=0.05)
    assert "Its 95 % interval overlaps that of twin." in text


def test_regions_have_a_table():
    report = synthetic_report(names=NAMES)
    whole = type(report)(**{**vars(report), "regions": {"boundary": report, "interior": report}})
    words = Elements(render_page([PageRow("a", whole)])).words
    assert "boundary" in words and "interior" in words


# In a browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    driver = start(tmp_path_factory.mktemp("browser"))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, evil_page):
    """The page in a browser 1280 wide, and the addresses fetched on the way."""
    browser.get_log("performance")
    resize(browser, 1280)
    browser.get(evil_page.as_uri())
    return browser


def test_browser_fetches_nothing(opened, evil_page):
    ours = fetched(opened, evil_page)
    assert len(ours) > 10  # the pictures are listed as well
    assert [url for url in ours if not url.startswith("data:")] == [evil_page.as_uri()]
    assert opened.title.startswith("Title ")  # no script but ours was run
    assert not complaints(opened)


def test_browser_shows_every_diagram(opened):
    sizes = opened.execute_script(
        "return [...document.images].map(i => [i.complete, i.naturalWidth, i.naturalHeight])"
    )
    assert len(sizes) >= 3 + 2 + 2 * 5 + 1
    assert all(complete and width > 100 and height > 50 for complete, width, height in sizes)


def column(browser, heading):
    """The cells under a heading of the first entry's table of classes, from the top."""
    return browser.execute_script(
        """
        const table = document.querySelector("table.classes");
        const headings = [...table.tHead.rows[0].cells].map(cell => cell.innerText);
        const at = headings.findIndex(text => text.startsWith(arguments[0]));
        return [...table.tBodies[0].rows].map(row => row.cells[at].innerText);
        """,
        heading,
    )


def test_browser_sorts_classes_by_click_and_by_key(opened):
    buttons = opened.find_elements(By.CSS_SELECTOR, "table.classes thead button")
    button = {each.text: each for each in buttons}
    assert column(opened, "class") == NAMES
    by_ece = [float(text) for text in column(opened, "class-j-ECE")]
    button["class-j-ECE (%)"].click()
    assert [float(t) for t in column(opened, "class-j-ECE")] == sorted(by_ece, reverse=True)
    button["class-j-ECE (%)"].send_keys(Keys.ENTER)
    assert [float(t) for t in column(opened, "class-j-ECE")] == sorted(by_ece)
    header = button["class-j-ECE (%)"].find_element(By.XPATH, "..")
    assert header.get_attribute("aria-sort") == "ascending"
    button["class"].click()
    assert column(opened, "class") == sorted(NAMES)
    assert header.get_attribute("aria-sort") is None
    button["no."].click()
    assert column(opened, "class") == NAMES


@pytest.mark.parametrize("width", [390, 1280])
def test_browser_never_scrolls_the_page_sideways(opened, width):
    resize(opened, width)
    opened.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert opened.execute_script("return innerWidth") == width
    assert opened.execute_script("return document.documentElement.scrollWidth") <= width


def test_browser_leaves_no_figure_alone_in_its_row(opened):
    rows = opened.execute_script(
        "document.querySelectorAll('details').forEach(d => d.open = true);"
        "return [...document.querySelectorAll('.figures')].filter(f => f.children.length > 1)"
        ".map(f => [...f.children].map(c => c.getBoundingClientRect().top))"
    )
    assert any(len(tops) == 4 for tops in rows)
    assert all(tops.count(tops[-1]) > 1 for tops in rows)


def test_browser_shades_wide_figures_until_their_end_is_seen(opened):
    shade = """
        document.querySelectorAll("details").forEach(d => d.open = true);
        const pans = [...document.querySelectorAll(".pan")];
        const wide = pans.filter(p => p.scrollWidth > p.clientWidth);
        wide.forEach(p => p.scrollLeft = arguments[0] * p.scrollWidth);
        await new Promise(requestAnimationFrame);
        await new Promise(requestAnimationFrame);
        const shades = some => some.map(p => Number(getComputedStyle(p, "::after").opacity));
        return [shades(wide), shades(pans.filter(p => !wide.includes(p)))];
    """
    resize(opened, 390)
    for at, opacity in ((0, 1), (1, 0)):
        wide, others = opened.execute_script(
            f"return (async () => {{{shade}}})()".replace("arguments[0]", str(at))
        )
        assert wide and set(wide) == {opacity} and not any(others)


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_browser_follows_light_and_dark(opened, scheme, dark):
    set_scheme(opened, scheme)
    color = opened.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", color)[:3])) < 3 * 128) == dark


def test_files_and_page_share_one_drawing_of_each_diagram(tmp_path):
    drawn = tmp_path / "drawn"  # a file, because other processes draw too
    entries = [PageRow("a", synthetic_report())]
    drawings = Drawings(entries)

    def counted(drawing):
        def draw():
            with drawn.open("a") as file:
                file.write(f"{drawing.stem}\n")
            return drawing.draw()

        return replace(drawing, draw=draw)

    drawings.together = {part: list(map(counted, some)) for part, some in drawings.together.items()}
    drawings.own = [list(map(counted, own)) for own in drawings.own]
    write_figures(entries, tmp_path / "figures", drawings=drawings)
    write_page(entries, tmp_path / "page.html", drawings=drawings)
    written = sorted(path.stem for path in (tmp_path / "figures").glob("*.svg"))
    assert sorted(drawn.read_text().split()) == written


def test_classes_of_sigmoid_outputs_are_rows_of_their_own_decisions():
    """Class a: 3 of 4 decisions right, present in 2; class b: 1 of 2 right, 2 ignored."""
    meter = CalibrationMeter(2, multilabel=True, class_names=("a", "b"))
    logits = torch.tensor([[2.0, 2.0], [1.0, 1.0], [-1.0, 0.0], [2.0, 0.0]])
    meter.update(logits, torch.tensor([[1, 1], [0, 0], [0, 255], [1, 255]]))
    report = meter.compute()
    columns = [heading.text for heading in class_columns(report)]
    a, b = (dict(zip(columns, row["cells"], strict=True)) for row in class_rows(report))
    assert (a["accuracy (%)"].text, b["accuracy (%)"].text) == ("75.00", "50.00")
    assert (a["present (%)"].text, b["IoU (%)"].text) == ("50.00", "50.00")
    assert dict(facts(report))["classes"].startswith("2, with a sigmoid each")
