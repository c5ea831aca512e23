"""The pictures of the page's inspector are those of the panel, for every model and browser."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from segcal.viz import Overlay, PageRow, class_palette, overlay_panel, write_page
from segcal.viz.html import render_page
from segcal.viz.panel import _RIGHT, _WRONG, draw_gap, hatching
from tests.support.browser import complaints, resize, start
from tests.support.synthetic_reports import predictor, synthetic_report

NAMES = ["road", "sky", "tree", "car", "bus"]
REPORT = synthetic_report(len(NAMES), names=NAMES, images=1)
SHAPE = (20, 24)
LABELS = np.repeat([[0] * 12 + [1] * 12], SHAPE[0], axis=0)
LABELS[:4] = 255
GREY = np.full((*SHAPE, 3), 90, np.uint8)
PREDICTIONS = {  # every model predicts other classes
    "first": LABELS % 255,
    "second": np.where(LABELS == 1, 3, 0),
    "third": np.full(SHAPE, 4),
}


def arrays(predicted, labels=LABELS, image=GREY):
    ramp = np.linspace(-0.8, 0.8, labels.size).reshape(labels.shape)
    return {
        "labels": labels,
        "prediction": predicted,
        "confidence": np.full(labels.shape, 0.9, np.float32),
        "gap": np.where(labels == 255, np.nan, ramp),
        "image": image,
    }


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    driver = start(tmp_path_factory.mktemp("browser"))
    yield driver
    driver.quit()


def open_page(browser, path, entries):
    """Open the page of `entries`, and wait until the planes of all its images are read."""
    write_page(entries, path)
    resize(browser, 1280)
    browser.get(path.as_uri())
    WebDriverWait(browser, 5).until(
        lambda b: b.execute_script(
            "return inspectors.every(each => each.planes.length === each.item.models.length)"
        )
    )


@pytest.fixture
def opened(browser, tmp_path):
    """A page of one image under three models."""
    entries = [
        PageRow(name, REPORT, overlays=[Overlay("street", b"", 0.1, arrays(predicted))])
        for name, predicted in PREDICTIONS.items()
    ]
    open_page(browser, tmp_path / "page.html", entries)
    yield browser
    assert not complaints(browser)


def picture(browser, name):
    """(H, W, 3) of a picture of the first model, before it is scaled to the screen."""
    values = browser.execute_script(
        "const canvas = inspectors[0].planes[0].drawn[arguments[0]];"
        "const { width, height } = canvas;"
        "return [...canvas.getContext('2d').getImageData(0, 0, width, height).data]",
        name,
    )
    return np.array(values, np.uint8).reshape(*SHAPE, 4)[..., :3]


def test_pictures_have_the_colours_of_the_panel(opened):
    found = arrays(PREDICTIONS["first"])
    stripes, valid = hatching(SHAPE), (LABELS != 255)[..., None]
    colors = class_palette(len(NAMES))[LABELS % 255]
    np.testing.assert_array_equal(picture(opened, "labels"), np.where(valid, colors, stripes))
    wrong = (found["prediction"] != LABELS)[..., None]
    errors = np.where(wrong, *(np.round(255 * np.array(to_rgb(c))) for c in (_WRONG, _RIGHT)))
    np.testing.assert_array_equal(picture(opened, "errors"), np.where(valid, errors, stripes))
    gap = picture(opened, "confidence − accuracy").astype(int)
    # Gaps are kept in steps of 1/127, and the image is compressed.
    assert np.abs(gap - draw_gap(GREY, found["gap"]).astype(int)).max() <= 4


def test_key_has_the_classes_of_every_model_in_their_colours(opened):
    found = opened.execute_script(
        "return [...inspectors[0].key.children].map(each => [each.textContent,"
        "each.firstChild.style.getPropertyValue('--color')])"
    )
    palette = class_palette(len(NAMES))
    assert dict(found) == {
        NAMES[c]: "rgb({},{},{})".format(*palette[c].tolist()) for c in (0, 1, 3, 4)
    }
    assert len(found) == 4


def test_note_on_a_bin_names_the_models_that_are_shown(opened):
    opened.find_element(By.ID, "reliability-plot").send_keys(Keys.END, Keys.ARROW_LEFT, Keys.ENTER)

    def named():
        note = opened.find_element(By.CSS_SELECTOR, ".inspector .lead").text
        return [part.split(":")[0] for part in note.split("; ")]

    assert named() == ["first", "second"]
    Select(opened.find_element(By.CSS_SELECTOR, ".inspector select")).select_by_index(2)
    assert named() == ["third", "second"]


def test_panels_without_arrays_stay_on_the_page():
    """Such as those of an earlier version, beside a model whose pixels can be read."""
    first = Overlay("street", b"", 0.1, arrays(PREDICTIONS["first"]))
    panel = Overlay("street", overlay_panel(None, *predictor(0.7)), 0.1)
    page = render_page(
        [PageRow("new", REPORT, overlays=[first]), PageRow("early", REPORT, overlays=[panel])]
    )
    assert page.count('<figure class="wide photo"') == 1


def test_large_images_say_which_pixels_are_kept(browser, tmp_path):
    labels = np.zeros((10, 1100), int)
    image = np.full((*labels.shape, 3), 90, np.uint8)
    overlay = Overlay("large", b"", 0.1, arrays(labels, labels, image))
    open_page(browser, tmp_path / "page.html", [PageRow("a", REPORT, overlays=[overlay])])
    caption = browser.find_element(By.CSS_SELECTOR, ".inspector figcaption").text
    assert caption.endswith("One of every 3 rows and columns of 1100 × 10 pixels is shown.")


def test_images_are_read_in_browsers_without_idle_callbacks(browser, tmp_path):
    """Safari has none."""
    script = {"source": "delete window.requestIdleCallback"}
    added = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", script)
    overlay = Overlay("street", b"", 0.1, arrays(PREDICTIONS["first"]))
    open_page(browser, tmp_path / "page.html", [PageRow("a", REPORT, overlays=[overlay])])
    assert browser.execute_script("return typeof requestIdleCallback") == "undefined"
    browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
