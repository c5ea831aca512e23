"""The page in a browser shows the numbers of report.json to mouse and keyboard."""

import re
from dataclasses import replace
from math import nan

import numpy as np
import pytest
import torch
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from segcal.metrics import CalibrationMeter
from segcal.metrics.objects import ObjectCounter, ObjectRule
from segcal.metrics.report import ImageTable, OperatingPoint
from segcal.metrics.scores import SCORES
from segcal.metrics.sums import CLASS_STEP
from segcal.metrics.triage import Target, accepted, choose_threshold
from segcal.viz import PageRow, make_overlay, write_page
from segcal.viz.page.numbers import page_numbers
from segcal.viz.tables import threshold_text
from tests.support.browser import complaints, fetched, resize, set_scheme, start
from tests.support.synthetic_reports import synthetic_report

pytestmark = pytest.mark.slow
EVIL = '</script><script>document.title = "run"</script><img src="http://127.0.0.1:9/x.png">'
NAMES = ["road", "sky", "<i>tree</i>", EVIL]
IMAGES = [EVIL, *(f"img{i:03d}" for i in range(1, 120))]
LOG = [{"epoch": e, "holdout/ece": 0.1 / e, "holdout/sce": 0.01 / e} for e in (1, 2, 3)]


def report_of(sharpness):
    """Over-confident the more, the sharper; every image with its own difficulty."""
    generator = torch.Generator().manual_seed(0)
    meter = CalibrationMeter(len(NAMES), class_names=NAMES, per_image=True)
    objects = ObjectCounter(ObjectRule((1, 2)), len(NAMES))
    for i, name in enumerate(IMAGES):
        logits = (1 + i % 5) * torch.randn(1, len(NAMES), 12, 12, generator=generator)
        flat = logits.softmax(1).movedim(1, -1).reshape(-1, len(NAMES))
        labels = torch.multinomial(flat, 1, generator=generator).view(1, 12, 12)
        meter.update(sharpness * logits, labels, names=[name])
        objects.update((sharpness * logits).softmax(1), labels, [name])
    report = meter.compute(resamples=100)
    threshold = choose_threshold(report.fine, Target("accuracy", 0.9))
    found = accepted(report.fine, threshold)
    point = OperatingPoint("accuracy=0.9", threshold, 5, *found, *found, intervals={})
    return replace(
        report,
        regions={"boundary:3": synthetic_report(4, sharpness=sharpness, names=NAMES)},
        protocols={"image": {"accuracy": 0.1, "miou": 0.2, "ece": 0.3, "sce": 0.04}},
        operating_points=(point,),
        objects=(replace(objects.compute(resamples=0), points=(point,)),),
    )


def drawn(name, sharpness, shape=(30, 40)):
    """The same image and labels whatever the sharpness."""
    rng = np.random.default_rng(0)
    logits = 2 * rng.normal(size=(len(NAMES), *shape))
    labels = rng.integers(len(NAMES), size=shape)
    labels[:5, :7] = 255
    probs = np.exp(sharpness * logits).astype(np.float32)
    image = rng.integers(256, size=(*shape, 3)).astype(np.uint8)
    return make_overlay(image, probs / probs.sum(0), labels, name=name, class_names=NAMES, ece=0.07)


@pytest.fixture(scope="module")
def rows():
    shifts = {f"fog:{s}": synthetic_report(4, sharpness=s, names=NAMES) for s in (1, 3)}
    return [
        PageRow(EVIL, report_of(3.0), LOG, overlays=[drawn(EVIL, 3.0)], shifts=shifts),
        PageRow("calm", report_of(1.0), LOG, overlays=[drawn(EVIL, 1.0)], shifts=shifts),
    ]


@pytest.fixture(scope="module")
def page(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(rows, path, title=f"Title {EVIL}")
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    driver = start(tmp_path_factory.mktemp("browser"))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, page):
    """The page, freshly opened at 1280; complaints of the console fail the test."""
    resize(browser, 1280)
    set_scheme(browser, "light")
    browser.get_log("performance")
    browser.get(page.as_uri())
    yield browser
    assert not complaints(browser)
    assert [url for url in fetched(browser, page) if not url.startswith("data:")] == [page.as_uri()]
    assert browser.title.startswith("Title ")  # no script but ours was run


def element(browser, selector):
    return browser.find_element(By.CSS_SELECTOR, selector)


def press(browser, selector, *keys):
    element(browser, selector).send_keys(*keys)


def cells(browser, table):
    """The texts of a table's body, read at once."""
    return browser.execute_script(
        "return [...document.getElementById(arguments[0]).tBodies[0].rows]"
        ".map(row => [...row.cells].map(cell => cell.textContent))",
        table,
    )


def bin_row(row, b, part=None):
    """What the readout should say of bin b."""
    top = (part or row.report).top
    confidence, accuracy = top.confidence[b], top.accuracy[b]
    return [
        row.name,
        SCORES["mean_confidence"].number(confidence),
        SCORES["accuracy"].number(accuracy),
        SCORES["bias"].number(confidence - accuracy).replace("-", "−"),
        f"{top.count[b]:,}",
    ]


def without_interval(row):
    return [*row[:2], row[2].split(" [")[0], *row[3:]]


def wait(browser, script, *arguments):
    WebDriverWait(browser, 10, 0.02).until(lambda b: b.execute_script(script, *arguments))


def test_numbers_are_printed_as_in_python(opened):
    values = [0.65625, 0.65635, 0.00125, 0.5, 1 / 3, 0.99995, 0.000049, 0.0, -0.00125, -1e-9]
    script = "return arguments[1].map(value => show(arguments[0], value).replace('−', '-'))"
    for name in ("accuracy", "nll", "sce", "bias"):
        score = SCORES[name]
        known = values if score.signed else values[:-2]
        expected = [score.number(value) for value in known]
        assert opened.execute_script(script, name, known) == expected
    thresholds = [0.5, 0.93, 0.99957275, 1 - 2e-7]
    script = "return arguments[0].map(showThreshold)"
    assert opened.execute_script(script, thresholds) == list(map(threshold_text, thresholds))


def test_pointing_at_a_bin_shows_its_numbers(opened, rows):
    plot = element(opened, "#reliability-plot")
    seen = set()
    for share in (-0.2, 0.1, 0.4):
        offset = int(share * plot.size["width"])
        ActionChains(opened, 0).move_to_element_with_offset(plot, offset, 0).perform()
        low = float(re.match(r"Bin ([\d.]+) to", element(opened, "#bin-title").text)[1])
        b = round(15 * low)
        seen.add(b)
        found = [without_interval(row) for row in cells(opened, "bin-table")]
        assert found == [bin_row(row, b) for row in rows]
    assert len(seen) == 3
    images = [row[1:] for row in cells(opened, "bin-images")]
    expected = [found for row in rows for found in row.report.images.bins[b].images]
    assert [name for name, _ in images] == [name for name, _ in expected]
    points = [float(text.replace("−", "-")) for _, text in images]
    assert points == pytest.approx([100 * gap for _, gap in expected], abs=0.00501)


def test_keys_reach_bins_and_intervals_are_those_of_the_report(opened, rows):
    plot = "#reliability-plot"
    press(opened, plot, Keys.END)
    assert element(opened, plot).get_attribute("aria-valuetext") == "0.9333 to 1"
    report = rows[0].report
    count, gap = report.top.count[-1], report.images.bins[-1]
    ends = [
        report.top.confidence[-1] - end * report.protocol.pixels / count
        for end in (gap.high, gap.low)
    ]
    text = cells(opened, "bin-table")[0][2]
    assert text.endswith("[{}, {}]".format(*map(SCORES["accuracy"].number, np.clip(ends, 0, 1))))
    press(opened, plot, Keys.ARROW_LEFT, Keys.ENTER)
    assert element(opened, plot).get_attribute("aria-valuenow") == "14"
    assert element(opened, "#unchoose").is_displayed()
    press(opened, plot, Keys.ESCAPE)
    assert not element(opened, "#unchoose").is_displayed()
    assert element(opened, "#bin-title").text == "No bin is chosen"


def test_models_regions_classes_and_protocols_can_be_chosen(opened, rows):
    root = "#reliability "
    element(opened, f'{root}[name="model"][value="0"]').send_keys(Keys.SPACE)
    Select(element(opened, f'{root}[name="region"]')).select_by_value("boundary:3")
    press(opened, "#reliability-plot", Keys.END)
    part = rows[1].report.regions["boundary:3"]
    assert [without_interval(row) for row in cells(opened, "bin-table")] == [
        bin_row(rows[1], -1, part)
    ]
    scores = [SCORES[name] for name in ("accuracy", "miou", "ece", "sce")]
    assert cells(opened, "part-scores") == [
        ["calm", *(score.number(getattr(part, score.name)) for score in scores)]
    ]
    Select(element(opened, f'{root}[name="protocol"]')).select_by_value("image")
    assert cells(opened, "part-scores") == [["calm", "10.00", "20.00", "30.00", "40.00"]]
    chosen = Select(element(opened, f'{root}[name="class"]'))
    assert [option.text for option in chosen.options][1:] == NAMES
    chosen.select_by_index(3)
    press(opened, "#reliability-plot", Keys.HOME)
    table = part.classes[2]
    assert cells(opened, "bin-table")[0][1:3] == [
        SCORES["mean_confidence"].number(table.confidence[0]),
        SCORES["accuracy"].number(table.accuracy[0]),
    ]


def test_reports_with_other_bins_are_not_read_as_if_they_had_the_same(browser, rows, tmp_path):
    meter = CalibrationMeter(len(NAMES), 10, class_names=NAMES)
    meter.update(torch.randn(1, len(NAMES), 9, 9), torch.zeros(1, 9, 9, dtype=torch.long))
    write_page([rows[1], PageRow("ten bins", meter.compute())], tmp_path / "page.html")
    browser.get((tmp_path / "page.html").as_uri())
    press(browser, "#reliability-plot", Keys.HOME, *[Keys.ARROW_RIGHT] * 7)
    first, second = cells(browser, "bin-table")
    assert without_interval(first) == bin_row(rows[1], 7)
    assert second == ["ten bins", *["–"] * 4]


def test_logit_scale_shows_the_fine_histogram(opened, rows):
    element(opened, '#reliability [value="logit"]').click()
    press(opened, "#reliability-plot", Keys.END, *[Keys.ARROW_LEFT] * 6)
    fine = rows[0].report.fine
    index = int(element(opened, "#reliability-plot").get_attribute("aria-valuenow")) - 1
    group = slice(CLASS_STEP * index, CLASS_STEP * (index + 1))
    count = int((fine.correct + fine.wrong)[group].sum())
    assert cells(opened, "bin-table")[0][4] == f"{count:,}"


@pytest.mark.parametrize("scale", ["linear", "logit"])
def test_bands_and_shares_are_those_of_the_report(opened, rows, scale):
    element(opened, f'#reliability [value="{scale}"]').click()
    bands = opened.execute_script(
        "return plots[0].renderers.filter(each => each.glyph.type === 'VArea')"
        ".map(each => ['x', 'low', 'high'].map(key => [...each.data_source.data[key]]))"
    )
    for row, band in zip(rows, bands, strict=True):
        report = row.report
        b = np.flatnonzero(report.top.count)
        share = report.protocol.pixels / report.top.count[b]
        low, high = np.array([(gap.high, gap.low) for gap in report.images.bins])[b].T * share
        middle = report.top.confidence[b]
        expected = np.stack([middle, *np.clip([middle - low, middle - high], 0, 1)])
        if scale == "logit":
            with np.errstate(divide="ignore"):
                expected = np.log(expected / (1 - expected)).clip(-9.5, 9.5)
        np.testing.assert_allclose(band, expected, rtol=1e-6, atol=1e-8)
    shares = opened.execute_script("return [...plots[1].renderers[0].data_source.data.y]")
    if scale == "linear":
        top = rows[0].report.top
        expected = np.maximum(100 * top.count / top.count.sum(), 0.001)
        np.testing.assert_allclose(shares[:-1], expected)


def stop_at(browser, index):
    """Move the slider of thresholds to its stop of this number."""
    browser.execute_script(
        "const s = document.getElementById('threshold'); s.value = arguments[0];"
        "s.dispatchEvent(new Event('input'))",
        index,
    )


def test_threshold_slider_reads_the_fine_histogram(opened, rows):
    slider = element(opened, "#threshold")
    for key in (Keys.HOME, Keys.PAGE_UP, Keys.ARROW_RIGHT):
        slider.send_keys(key)
        threshold = page_numbers(rows)["thresholds"][int(slider.get_attribute("value"))]
        for row, texts in zip(rows, cells(opened, "threshold-table"), strict=True):
            fine, score = row.report.fine, SCORES["accuracy"]
            coverage, accuracy = accepted(fine, threshold)
            expected = map(score.number, (coverage, accuracy, 1 - accuracy))
            assert texts[:4] == [row.name, *expected]
            above = fine.edges[:-1] >= threshold
            assert texts[4] == f"{int((fine.correct + fine.wrong)[above].sum()):,}"
    assert threshold > 0


def test_operating_points_set_the_slider(opened, rows):
    buttons = opened.find_elements(By.CSS_SELECTOR, "#operating-points button")
    assert len(buttons) == 2
    buttons[1].send_keys(Keys.ENTER)
    point = rows[1].report.operating_points[0]
    expected = [SCORES["accuracy"].number(x) for x in (point.coverage, point.accuracy)]
    assert cells(opened, "threshold-table")[1][1:3] == expected
    text = threshold_text(point.threshold)  # as in the table of operating points
    assert buttons[1].text == f"{point.target}: {text}"
    assert element(opened, "#threshold-value").text == text


def test_thresholds_by_predicted_class(opened, rows):
    element(opened, "#thresholds summary").click()
    table, number = rows[0].report.class_fine, SCORES["accuracy"].number
    stops = page_numbers(rows)["thresholds"]
    for index in (0, 20, 60, stops.index(rows[0].report.operating_points[0].threshold)):
        stop_at(opened, index)
        first = int(np.searchsorted(table.edges, stops[index]))  # the next edge, if it is none
        assert threshold_text(table.edges[first]) in element(opened, "#threshold-classes-note").text
        for c, row in enumerate(cells(opened, "threshold-classes")):
            count, right = table.accepted[c, first], table.right[c, first]
            share = count / table.accepted[c, 0]
            scores = (share, right / count, 1 - right / count) if count else (0, nan, nan)
            assert row == [NAMES[c], *map(number, scores), f"{count:,}"]


def test_heat_map_shift_and_training_show_the_reports(opened, rows):
    source = (
        "const { data } = plots[arguments[0]].renderers[0].data_source;"
        "return Object.fromEntries(Object.entries(data).map(([key, found]) => [key, [...found]]))"
    )
    order = opened.execute_script("return plots.map(each => each.left[0].axis_label)")
    heat = opened.execute_script(source, order.index(""))
    bins = rows[0].report.classes
    gap = (bins.confidence - bins.accuracy)[bins.count > 0]
    np.testing.assert_allclose(heat["alpha"], np.minimum(np.abs(gap) / 0.3, 1), atol=1e-9)
    eces = [i for i, label in enumerate(order) if label == SCORES["ece"].heading]
    shift = opened.execute_script(source, eces[0])
    expected = [100 * r.ece for r in (rows[0].report, *rows[0].shifts.values())]
    assert shift["x"] == [0, 1, 3]
    np.testing.assert_allclose(shift["y"], expected)
    training = opened.execute_script(source, eces[1])
    np.testing.assert_allclose(training["y"], [10, 5, 10 / 3])


def test_images_are_listed_sorted_and_filtered(opened, rows):
    table = rows[0].report.images.table
    order = sorted(range(len(IMAGES)), key=lambda i: -table.ece[i])
    found = cells(opened, "image-table")
    assert len(found) == 50
    assert [row[0].removesuffix("drawn") for row in found] == [table.names[i] for i in order[:50]]
    worst = order[0]
    accuracy = table.correct[worst] / table.pixels[worst]
    assert found[0][1:4] == [
        SCORES["ece"].number(table.ece[worst]),
        SCORES["accuracy"].number(accuracy),
        SCORES["mean_confidence"].number(accuracy + table.bias[worst]),
    ]
    element(opened, "#next").send_keys(Keys.ENTER)
    assert cells(opened, "image-table")[0][0] == table.names[order[50]]
    heading = "#image-table thead th:nth-child(3) button"
    element(opened, heading).send_keys(Keys.ENTER)
    element(opened, heading).send_keys(Keys.ENTER)
    accuracies = [float(row[2]) for row in cells(opened, "image-table")]
    assert accuracies == sorted(accuracies)
    element(opened, '#find [name="word"]').send_keys("IMG01")
    assert element(opened, "#image-count").text.startswith("10 of 120 images")
    element(opened, '#find [name="word"]').send_keys(Keys.BACKSPACE)
    Select(element(opened, '#find [name="sign"]')).select_by_value("under")
    under = [n for n, b in zip(table.names, table.bias, strict=True) if b < 0 and "img0" in n]
    assert {row[0] for row in cells(opened, "image-table")} == set(under)


def test_an_image_opens_its_overlay_and_a_point_marks_its_image(opened):
    element(opened, '#find [name="word"]').send_keys("127.0.0.1")
    button = element(opened, "#image-table tbody button")
    assert button.text == f"{EVIL}drawn"
    button.send_keys(Keys.ENTER)
    assert opened.execute_script("return document.activeElement.dataset.overlay") == EVIL
    element(opened, '#find [name="word"]').clear()
    plot = element(opened, "#image-plot")
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    ActionChains(opened, 0).move_to_element(plot).click().perform()
    (marked,) = opened.find_elements(By.CSS_SELECTOR, "#image-table tr.marked th")
    name = marked.text.removesuffix("drawn")
    assert element(opened, "#image-at").text.startswith(f"{name}: ECE ")


@pytest.fixture
def looked_into(opened):
    """The page when the planes of its images are read."""
    wait(opened, "return inspectors.every(each => each.planes.length === 2)")
    return opened


def pixel_rows(browser):
    return browser.execute_script(
        "return [...inspectors[0].table.tBodies[0].rows]"
        ".map(row => [...row.cells].map(cell => cell.textContent))"
    )


def pictures(browser):
    return browser.execute_script("return inspectors[0].canvases.map(([, c]) => c.toDataURL())")


def test_keys_read_every_value_of_a_pixel(looked_into, rows):
    panels = element(looked_into, ".panels")
    panels.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    at = 16, 22  # from the middle
    for row, texts in zip(rows, pixel_rows(looked_into), strict=True):
        overlay = row.overlays[-1]
        names = [NAMES[each[at]] for each in (overlay.labels, overlay.prediction)]
        assert texts[:3] == [row.name, *names]
        assert float(texts[3]) == pytest.approx(100 * overlay.confidence[at], abs=0.5)
        gap = float(texts[4].replace("−", "-"))
        assert gap == pytest.approx(100 * overlay.gap[at], abs=0.5)
    for _ in range(3):
        panels.send_keys(Keys.SHIFT, Keys.ARROW_UP, Keys.ARROW_LEFT)
    assert pixel_rows(looked_into)[0][1] == "not counted"


def test_pointing_reads_a_pixel_and_pictures_zoom_and_change_together(looked_into):
    canvas = looked_into.find_elements(By.CSS_SELECTOR, ".panels canvas")[1]
    looked_into.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    ActionChains(looked_into, 0).move_to_element_with_offset(canvas, 30, 20).perform()
    at = looked_into.execute_script("return inspectors[0].at")
    width, height = canvas.size["width"], canvas.size["height"]
    assert at[0] == pytest.approx(40 * (0.5 + 30 / width), abs=1)
    assert at[1] == pytest.approx(30 * (0.5 + 20 / height), abs=1)
    first = pictures(looked_into)
    assert len(first) == len(set(first)) == 6
    element(looked_into, ".panels").send_keys("+")
    shown = looked_into.execute_script("return arguments[0].getBoundingClientRect().width", canvas)
    assert shown == pytest.approx(2 * width, abs=1)
    ActionChains(looked_into, 0).move_to_element(canvas).click().perform()
    assert looked_into.execute_script("return inspectors[0].at") != at
    element(looked_into, ".panels").send_keys("-")
    Select(element(looked_into, ".inspector select")).select_by_index(1)
    second = pictures(looked_into)
    assert first[:2] == second[:2] and first[3] != second[3]  # image and labels are the same


def test_a_chosen_bin_lights_up_its_pixels(looked_into):
    before = pictures(looked_into)
    press(looked_into, "#reliability-plot", Keys.END, Keys.ARROW_LEFT, Keys.ENTER)
    assert not set(before) & set(pictures(looked_into))
    press(looked_into, "#reliability-plot", Keys.ESCAPE)
    assert pictures(looked_into) == before


def column(browser, heading):
    """The cells under a heading of the table of classes, from the top."""
    return browser.execute_script(
        """
        const table = document.querySelector("#classes table");
        const at = [...table.tHead.rows[0].cells].findIndex(c => c.innerText === arguments[0]);
        return [...table.tBodies[0].rows].map(row => row.cells[at].innerText);
        """,
        heading,
    )


def test_classes_are_sorted_by_click_and_by_key(opened):
    buttons = opened.find_elements(By.CSS_SELECTOR, "#classes thead button")
    button = {each.text: each for each in buttons}
    by_ece = [float(text.split()[0]) for text in column(opened, "calm")]
    assert column(opened, "class") == NAMES
    for press_it, reverse in ((button["calm"].click, True), (button["calm"].click, False)):
        press_it()
        found = [float(text.split()[0]) for text in column(opened, "calm")]
        assert found == sorted(by_ece, reverse=reverse)
    header = button["calm"].find_element(By.XPATH, "..")
    assert header.get_attribute("aria-sort") == "ascending"
    button["class"].send_keys(Keys.ENTER)
    assert column(opened, "class") == sorted(NAMES)
    assert header.get_attribute("aria-sort") is None


def test_every_control_is_reached_by_tab(opened):
    wanted = opened.execute_script(
        "return [...document.querySelectorAll('section')]"
        ".flatMap(s => [...s.querySelectorAll('input, select, button, [tabindex=\"0\"]')])"
        ".filter(e => e.offsetParent && !e.disabled && e.tabIndex < 0).length"
    )
    assert wanted == 0
    element(opened, 'a[href="#reliability"]').send_keys(Keys.ENTER)
    reached = set()
    for _ in range(16):
        ActionChains(opened, 0).send_keys(Keys.TAB).perform()
        reached.add(opened.execute_script("return document.activeElement.id"))
    assert {"reliability-plot", "threshold"} <= reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_page_fits_and_follows_the_scheme(opened, width, scheme):
    resize(opened, width)
    set_scheme(opened, scheme)
    opened.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert opened.execute_script("return document.documentElement.scrollWidth") <= width
    ink = opened.execute_script("return plots[0].below[0].axis_label_text_color")
    assert ink == {"light": "#1d2430", "dark": "#e8eaee"}[scheme]
    color = opened.execute_script("return getComputedStyle(document.body).backgroundColor")
    dark = sum(map(int, re.findall(r"\d+", color)[:3])) < 3 * 128
    assert dark == (scheme == "dark")


DRAWN = "return document.readyState === 'complete' && Bokeh.documents.every(each => each.is_idle)"


def test_print_has_light_plots_and_no_controls(opened):
    """What is painted for paper in the dark scheme is what the light scheme paints."""
    paintings = (
        "const seen = [...document.querySelectorAll('.plot > .bk-Figure')]"
        ".map(each => each.shadowRoot.querySelector('.bk-Canvas').shadowRoot"
        ".querySelector('canvas').toDataURL());"
    )
    wait(opened, DRAWN)
    light = opened.execute_script(f"{paintings} return seen")
    set_scheme(opened, "dark")
    wait(opened, f"{paintings} return seen[0] !== arguments[0]", light[0])
    opened.execute_script(
        f"addEventListener('beforeprint', () => {{ {paintings} window.seen = seen }})"
    )
    opened.execute_cdp_cmd("Page.printToPDF", {})
    assert opened.execute_script("return window.seen") == light
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert not element(opened, "#reliability .controls").is_displayed()
    assert element(opened, "#reliability-plot").is_displayed()
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "screen"})


def test_page_of_ten_thousand_images_is_small_and_usable(browser, rows, tmp_path):
    report, n = rows[1].report, 10_000
    table = ImageTable(
        names=tuple(f"a_folder_of_images/image_{i:05d}" for i in range(n)),
        pixels=(500_000,) * n,
        correct=tuple(500_000 - 37 * i for i in range(n)),
        ece=tuple((i * 7919 % n) / n for i in range(n)),
        bias=tuple(round((i * 104_729 % n) / n - 0.3, 6) for i in range(n)),
    )
    many = replace(report, images=replace(report.images, table=table))
    path = tmp_path / "many.html"
    write_page([PageRow("many", many)], path)
    assert path.stat().st_size < 4e6
    browser.get(path.as_uri())
    wait(browser, DRAWN)
    assert len(cells(browser, "image-table")) == 50
    element(browser, '#find [name="word"]').send_keys("_012")
    assert element(browser, "#image-count").text.startswith("100 of 10,000 images")


def test_the_objects_above_a_threshold_are_counted(opened, rows):
    slider, percent = "#object-threshold", SCORES["accuracy"].number
    for keys, pressed in ((Keys.HOME, 0), (Keys.ARROW_RIGHT, 40)):
        press(opened, slider, *[keys] * max(pressed, 1))
        threshold = float(element(opened, "#object-value").text)
        for row, found in zip(rows, cells(opened, "object-table"), strict=True):
            of = row.report.objects[0]
            at = of.fine.edges[np.abs(of.fine.edges - threshold).argmin()]
            kept = of.fine.edges[:-1] >= at
            real, false = of.fine.correct[kept].sum(), of.fine.wrong[kept].sum()
            assert found[1:4] == [f"{real + false:,}", *map(percent, of.above(at))]
            assert float(found[4]) == pytest.approx(false / of.images, abs=0.006)
    element(opened, "#object-points button").click()
    chosen = rows[0].report.objects[0].points[0].threshold
    assert element(opened, "#object-value").text == threshold_text(chosen)
