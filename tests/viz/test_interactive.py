"""The interactive page shows the numbers of report.json to mouse and keyboard."""

import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from segcal.metrics import CalibrationMeter
from segcal.metrics.operating import OperatingPoint, Target, accepted, choose_threshold
from segcal.metrics.scores import SCORES
from segcal.viz import Entry, Overlay, calibration_gap, overlay_panel, planes, write_page
from segcal.viz.html import render_page
from segcal.viz.interactive import page_numbers, to_json
from segcal.viz.planes import coding, confidence_levels, inspected
from tests.support.browser import complaints, fetched, resize, set_scheme, start
from tests.support.synthetic_reports import predictor, synthetic_report

EVIL = '</script><script>document.title = "run"</script><img src="http://127.0.0.1:9/x.png">'
NAMES = ["road", "sky", "<i>tree</i>", EVIL]
IMAGES = [EVIL, *(f"img{i:03d}" for i in range(1, 120))]


def report_of(sharpness, images=IMAGES):
    """Over-confident the more, the sharper; every image with its own difficulty."""
    generator = torch.Generator().manual_seed(0)
    meter = CalibrationMeter(len(NAMES), class_names=NAMES, per_image=True)
    for i, name in enumerate(images):
        logits = (1 + i % 5) * torch.randn(1, len(NAMES), 12, 12, generator=generator)
        flat = logits.softmax(1).movedim(1, -1).reshape(-1, len(NAMES))
        labels = torch.multinomial(flat, 1, generator=generator).view(1, 12, 12)
        meter.update(sharpness * logits, labels, names=[name])
    report = meter.compute(resamples=100)
    target = Target("accuracy", 0.9)
    threshold = choose_threshold(report.fine, target)
    coverage, accuracy = accepted(report.fine, threshold)
    point = OperatingPoint(
        str(target), threshold, 5, coverage, accuracy, coverage, accuracy, intervals={}
    )
    return replace(
        report,
        regions={"boundary:3": synthetic_report(4, sharpness=sharpness, names=NAMES)},
        protocols={"image": {"accuracy": 0.1, "miou": 0.2, "ece": 0.3, "sce": 0.04}},
        operating_points=(point,),
    )


def drawn(name, sharpness, shape=(30, 40)):
    """An overlay with arrays: the same image and labels whatever the sharpness."""
    rng = np.random.default_rng(0)
    logits = 2 * rng.normal(size=(len(NAMES), *shape))
    labels = rng.integers(len(NAMES), size=shape)
    labels[:5, :7] = 255
    probs = np.exp(sharpness * logits).astype(np.float32)
    probs /= probs.sum(0)
    order = np.argsort(-probs, 0)[:3]
    arrays = {
        "labels": labels,
        "prediction": probs.argmax(0),
        "confidence": probs.max(0),
        "gap": calibration_gap(probs, labels).astype(np.float32),
        "top_classes": order.astype(np.uint16),
        "top_probs": np.take_along_axis(probs, order, 0),
        "image": rng.integers(256, size=(*shape, 3)).astype(np.uint8),
    }
    png = io.BytesIO()
    Image.fromarray(arrays["image"]).save(png, "PNG")
    return Overlay(name, png.getvalue(), 0.07, arrays)


@pytest.fixture(scope="module")
def entries():
    panel = Overlay(IMAGES[7], overlay_panel(None, *predictor(0.7), name="x"), 0.07)
    return [
        Entry(EVIL, report_of(3.0), overlays=[panel, drawn(EVIL, 3.0)]),
        Entry("calm", report_of(1.0), overlays=[drawn(EVIL, 1.0)]),
    ]


@pytest.fixture(scope="module")
def page(tmp_path_factory, entries):
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(entries, path, title=f"Title {EVIL}")
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


def cells(browser, table):
    """The texts of a table's body, read at once."""
    return browser.execute_script(
        "return [...document.getElementById(arguments[0]).tBodies[0].rows]"
        ".map(row => [...row.cells].map(cell => cell.textContent))",
        table,
    )


def bin_row(entry, b, part=None):
    """What the readout should say of bin b."""
    top = (part or entry.report).top
    confidence, accuracy = top.confidence[b], top.accuracy[b]
    points = 100 * (confidence - accuracy)
    gap = f"{points:+.2f}".replace("-", "−")
    return [
        entry.name,
        SCORES["mean_confidence"].number(confidence),
        SCORES["accuracy"].number(accuracy),
        "–" if np.isnan(points) else gap if float(f"{points:.2f}") else "0.00",
        f"{top.count[b]:,}",
    ]


def without_interval(row):
    return [*row[:2], row[2].split(" [")[0], *row[3:]]


def press(browser, selector, *keys):
    element(browser, selector).send_keys(*keys)


def test_json_is_safe_inside_a_script(entries):
    text = to_json({"name": f"{EVIL}&\u2028\u2029", "none": float("nan")})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"name": f"{EVIL}&\u2028\u2029", "none": None}
    assert json.loads(to_json(page_numbers(entries)))["entries"][0]["name"] == EVIL


def test_page_of_an_early_report_lists_its_worst_images():
    report = report_of(1.0, IMAGES[:30])
    early = report.to_dict()
    del early["images"]["table"], early["images"]["bins"]
    old = Entry("old", type(report).from_dict(early))
    found = page_numbers([old])["entries"][0]
    assert found["images"]["names"] == [image.name for image in report.worst_images]
    assert found["parts"]["all"]["bins"] == []
    assert "Find images" in render_page([old])


def test_static_page_has_no_library(entries):
    static = render_page(entries[1:], static=True)
    assert "Bokeh" not in static and 'id="numbers"' not in static
    assert len(render_page(entries[1:])) > len(static) + 1_000_000


def test_pointing_at_a_bin_shows_its_numbers(opened, entries):
    plot = element(opened, "#reliability-plot")
    seen = set()
    for share in (-0.2, 0.1, 0.4):
        offset = int(share * plot.size["width"])
        ActionChains(opened, 0).move_to_element_with_offset(plot, offset, 0).perform()
        low = float(re.match(r"Bin ([\d.]+) to", element(opened, "#bin-title").text)[1])
        b = round(15 * low)
        seen.add(b)
        rows = [without_interval(row) for row in cells(opened, "bin-table")]
        assert rows == [bin_row(entry, b) for entry in entries]
    assert len(seen) == 3
    images = [row[1:] for row in cells(opened, "bin-images")]
    expected = [found for e in entries for found in e.report.images.bins[b].images]
    assert [name for name, _ in images] == [name for name, _ in expected]
    points = [float(text.replace("−", "-")) for _, text in images]
    assert points == pytest.approx([100 * gap for _, gap in expected], abs=0.00501)


def test_keys_reach_bins_and_intervals_are_those_of_the_report(opened, entries):
    plot = "#reliability-plot"
    press(opened, plot, Keys.END)
    assert element(opened, plot).get_attribute("aria-valuetext") == "0.9333 to 1"
    report = entries[0].report
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
    assert element(opened, "#bin-title").text == "No bin"
    assert not element(opened, "#bin-table").is_displayed()
    assert not element(opened, "#bin-images").is_displayed()


def test_models_regions_classes_and_protocols_can_be_chosen(opened, entries):
    root = "#reliability "
    element(opened, f'{root}[name="model"][value="0"]').send_keys(Keys.SPACE)
    Select(element(opened, f'{root}[name="region"]')).select_by_value("boundary:3")
    press(opened, "#reliability-plot", Keys.END)
    part = entries[1].report.regions["boundary:3"]
    assert [without_interval(row) for row in cells(opened, "bin-table")] == [
        bin_row(entries[1], -1, part)
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


def test_logit_scale_shows_the_fine_histogram(opened, entries):
    element(opened, '#reliability [value="logit"]').click()
    press(opened, "#reliability-plot", Keys.END)
    low, high = element(opened, "#reliability-plot").get_attribute("aria-valuetext").split(" to ")
    assert float(low) > 0.999999 and high == "1"
    for _ in range(6):
        press(opened, "#reliability-plot", Keys.ARROW_LEFT)
    rows = cells(opened, "bin-table")
    fine = entries[0].report.fine
    index = int(element(opened, "#reliability-plot").get_attribute("aria-valuenow")) - 1
    group = slice(16 * index, 16 * index + 16)
    count = int((fine.correct + fine.wrong)[group].sum())
    assert rows[0][4] == f"{count:,}"
    total = opened.execute_script(
        "const part = numbers.entries[0].parts.all;"
        "return sum(part.fine.correct) + sum(part.fine.wrong)"
    )
    assert total == entries[0].report.protocol.pixels


def test_threshold_slider_reads_the_fine_histogram(opened, entries):
    slider = element(opened, "#threshold")
    for key in (Keys.HOME, Keys.PAGE_UP, Keys.ARROW_RIGHT):
        slider.send_keys(key)
        at = int(slider.get_attribute("value"))
        rows = cells(opened, "threshold-table")
        for entry, row in zip(entries, rows, strict=True):
            fine = entry.report.fine
            coverage, accuracy = accepted(fine, fine.edges[at])
            score = SCORES["accuracy"]
            assert row[:4] == [
                entry.name,
                *map(score.number, (coverage, accuracy, 1 - accuracy)),
            ]
            assert row[4] == f"{int((fine.correct + fine.wrong)[at:].sum()):,}"
    assert at > 0


def test_operating_points_set_the_slider(opened, entries):
    buttons = opened.find_elements(By.CSS_SELECTOR, "#operating-points button")
    assert len(buttons) == 2
    buttons[1].send_keys(Keys.ENTER)
    point = entries[1].report.operating_points[0]
    expected = [SCORES["accuracy"].number(x) for x in (point.coverage, point.accuracy)]
    assert cells(opened, "threshold-table")[1][1:3] == expected


def test_classes_above_a_threshold_are_counted_by_the_class_table(opened, entries):
    opened.execute_script("document.querySelector('#thresholds details').open = true")
    index = int(np.searchsorted(entries[0].report.fine.edges, 0.75))
    opened.execute_script(
        "const s = document.getElementById('threshold'); s.value = arguments[0];"
        "s.dispatchEvent(new Event('input'))",
        index,
    )
    table, predicted = entries[0].report.classes, entries[0].report.confusion.sum(0)
    first = 12  # of 15 bins: the first that lies above 0.75
    assert "0.800" in element(opened, "#threshold-classes-note").text
    for c, row in enumerate(cells(opened, "threshold-classes")):
        count, hits = int(table.count[c, first:].sum()), int(table.hits[c, first:].sum())
        number = SCORES["accuracy"].number
        assert row == [
            NAMES[c],
            *map(number, (count / predicted[c], hits / count, 1 - hits / count)),
            f"{count:,}",
        ]


def test_images_are_listed_sorted_and_filtered(opened, entries):
    report = entries[0].report
    table = report.images.table
    order = sorted(range(len(IMAGES)), key=lambda i: -table.ece[i])
    rows = cells(opened, "image-table")
    assert len(rows) == 50
    assert [row[0].removesuffix("drawn") for row in rows] == [table.names[i] for i in order[:50]]
    worst = order[0]
    accuracy = table.correct[worst] / table.pixels[worst]
    assert rows[0][1:4] == [
        SCORES["ece"].number(table.ece[worst]),
        SCORES["accuracy"].number(accuracy),
        SCORES["mean_confidence"].number(accuracy + table.bias[worst]),
    ]
    element(opened, "#next").send_keys(Keys.ENTER)
    assert cells(opened, "image-table")[0][0] == table.names[order[50]]
    heading = "#image-table thead th:nth-child(3) button"
    element(opened, heading).send_keys(Keys.ENTER)
    element(opened, heading).send_keys(Keys.ENTER)
    found = [float(row[2]) for row in cells(opened, "image-table")]
    assert found == sorted(found)
    element(opened, '#find [name="word"]').send_keys("IMG01")
    assert element(opened, "#image-count").text.startswith("10 of 120 images")
    element(opened, '#find [name="word"]').send_keys(Keys.BACKSPACE)
    Select(element(opened, '#find [name="sign"]')).select_by_value("under")
    under = [n for n, b in zip(table.names, table.bias, strict=True) if b < 0 and "img0" in n]
    assert {row[0] for row in cells(opened, "image-table")} == set(under)


def test_an_image_opens_its_overlay(opened):
    element(opened, '#find [name="word"]').send_keys(IMAGES[7])
    button = element(opened, "#image-table tbody button")
    assert button.text == f"{IMAGES[7]}drawn"
    button.send_keys(Keys.ENTER)
    assert opened.execute_script("return document.activeElement.dataset.overlay") == IMAGES[7]
    assert IMAGES[7] in element(opened, "#image-at").text


def test_a_point_of_the_scatter_marks_its_image(opened):
    plot = element(opened, "#image-plot")
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    ActionChains(opened, 0).move_to_element(plot).click().perform()
    marked = opened.execute_script("return images.state.at.name")
    assert marked in element(opened, "#image-at").text
    assert len(opened.find_elements(By.CSS_SELECTOR, "#image-table tr.marked")) == 1


@pytest.fixture
def looked_into(opened):
    """The page when the planes of its images are read."""
    WebDriverWait(opened, 5).until(
        lambda b: b.execute_script("return inspectors.every(each => each.planes.length === 2)")
    )
    return opened


def pixel_rows(browser):
    return browser.execute_script(
        "return [...inspectors[0].table.tBodies[0].rows]"
        ".map(row => [...row.cells].map(cell => cell.textContent))"
    )


def test_keys_read_every_value_of_a_pixel(looked_into, entries):
    panels = element(looked_into, ".panels")
    panels.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    row, column = 16, 22  # from the middle
    for entry, texts in zip(entries, pixel_rows(looked_into), strict=True):
        arrays = entry.overlays[-1].arrays
        label, predicted = arrays["labels"][row, column], arrays["prediction"][row, column]
        assert texts[:3] == [entry.name, NAMES[label], NAMES[predicted]]
        assert float(texts[3]) == pytest.approx(arrays["confidence"][row, column], abs=0.006)
        for text, rank in ((texts[4], 1), (texts[5], 2)):
            assert text.startswith(NAMES[arrays["top_classes"][rank, row, column]])
            share = 100 * arrays["top_probs"][rank, row, column]
            shown = re.search(r"(\d+) %$", text)[1]
            assert float(shown) == pytest.approx(share, abs=1.0)
        gap = float(texts[6].replace("−", "-"))
        assert gap == pytest.approx(100 * arrays["gap"][row, column], abs=0.41)
    for _ in range(3):
        panels.send_keys(Keys.SHIFT, Keys.ARROW_UP, Keys.ARROW_LEFT)
    assert pixel_rows(looked_into)[0][1] == "ignored"


def test_pointing_reads_a_pixel_and_all_pictures_zoom_together(looked_into):
    canvas = looked_into.find_elements(By.CSS_SELECTOR, ".panels canvas")[1]
    looked_into.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    ActionChains(looked_into, 0).move_to_element_with_offset(canvas, 30, 20).perform()
    at = looked_into.execute_script("return inspectors[0].at")
    width, height = canvas.size["width"], canvas.size["height"]
    assert at[0] == pytest.approx(40 * (0.5 + 30 / width), abs=1)
    assert at[1] == pytest.approx(30 * (0.5 + 20 / height), abs=1)
    before = pictures(looked_into)
    assert len(before) == len(set(before)) == 6
    element(looked_into, ".panels").send_keys("+")
    zoomed = pictures(looked_into)
    assert not set(before) & set(zoomed)
    assert looked_into.execute_script("return inspectors[0].at") == at
    x, y = looked_into.execute_script("const v = inspectors[0].view; return [v.x, v.y]")
    ActionChains(looked_into, 0).click_and_hold(canvas).move_by_offset(15, 0).release().perform()
    assert looked_into.execute_script("return inspectors[0].view.x") < x
    element(looked_into, ".panels").send_keys("0")
    assert looked_into.execute_script("return inspectors[0].view") == {"zoom": 1, "x": 0, "y": 0}


def pictures(browser):
    return browser.execute_script("return inspectors[0].canvases.map(([, c]) => c.toDataURL())")


def test_a_chosen_bin_lights_up_its_pixels(looked_into, entries):
    before = pictures(looked_into)
    press(looked_into, "#reliability-plot", Keys.END, Keys.ARROW_LEFT, Keys.ENTER)
    note = element(looked_into, ".inspector .lead").text
    for entry in entries:
        arrays = entry.overlays[-1].arrays
        confidence = arrays["confidence"][arrays["labels"] != 255]
        inside = int(((confidence > 13 / 15) & (confidence <= 14 / 15)).sum())
        assert inside and f"{entry.name}: {inside} pixels" in note
    assert not set(before) & set(pictures(looked_into))
    press(looked_into, "#reliability-plot", Keys.ESCAPE)
    assert pictures(looked_into) == before


def test_slider_moves_from_one_model_to_the_other(looked_into):
    slider = element(looked_into, ".split input")
    names = looked_into.execute_script("return inspectors[0].canvases.map(([name]) => name)")
    slider.send_keys(Keys.HOME)
    second = dict(zip(names, pictures(looked_into), strict=True))
    slider.send_keys(Keys.END)
    first = dict(zip(names, pictures(looked_into), strict=True))
    assert first["labels"] == second["labels"] and first["image"] == second["image"]
    assert first["confidence"] != second["confidence"]
    slider.send_keys(Keys.PAGE_DOWN)
    assert pictures(looked_into)[3] not in (first["confidence"], second["confidence"])


def test_confidence_levels_stay_in_their_bins():
    confidence = np.random.default_rng(0).random(20000).astype(np.float32)
    confidence[:3] = 0.2, 1.0, 0.99999
    edges = np.arange(16) / 15
    low, high, levels = coding()["logit"]
    value = 1 / (1 + np.exp(-(low + (high - low) * confidence_levels(confidence, edges) / levels)))
    assert (np.searchsorted(edges, value) == np.searchsorted(edges, confidence))[3:].all()
    known = confidence > 0.01
    assert np.abs(value - confidence)[known].max() < 0.006


def test_planes_keep_to_their_budget(monkeypatch):
    report = synthetic_report(len(NAMES), names=NAMES)

    def size(found):
        return sum(len(i["image"]) + sum(len(m["planes"]) for m in i["models"]) for i in found)

    some = [Entry("a", report, overlays=[drawn(f"{i}", 1.0, (60, 80)) for i in range(4)])]
    whole = inspected(some)
    assert [each["step"] for each in whole] == [1] * 4
    monkeypatch.setattr(planes, "BUDGET", size(whole) // 2)
    reduced = inspected(some)
    assert size(reduced) <= size(whole) // 2 and reduced[0]["step"] > 1
    large = drawn("large", 1.0, (10, 1100))
    assert inspected([Entry("b", report, overlays=[large])])[0]["step"] == 3


def test_every_control_is_reached_by_tab(opened):
    wanted = opened.execute_script(
        "return [...document.querySelectorAll('#reliability, #thresholds, #find, #pixels')]"
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
def test_page_fits_and_plots_follow_the_scheme(opened, width, scheme):
    resize(opened, width)
    set_scheme(opened, scheme)
    assert opened.execute_script("return document.documentElement.scrollWidth") <= width
    ink = opened.execute_script("return plots[0].below[0].axis_label_text_color")
    assert ink == {"light": "#1d2430", "dark": "#e8eaee"}[scheme]


def test_print_has_light_plots_and_no_controls(opened):
    set_scheme(opened, "dark")
    opened.execute_script(
        "addEventListener('beforeprint', () => {"
        "window.inked = plots.map(p => p.below[0].axis_label_text_color)})"
    )
    opened.execute_cdp_cmd("Page.printToPDF", {})
    assert set(opened.execute_script("return window.inked")) == {"#1d2430"}
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert not element(opened, "#reliability .controls").is_displayed()
    assert element(opened, "#reliability-plot").is_displayed()
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "screen"})
