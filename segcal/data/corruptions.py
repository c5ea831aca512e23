"""Common corruptions of images (noise, blur, weather, digital) by name and severity 1 to 5.

The kinds and the numbers are those of Hendrycks & Dietterich 2019, Benchmarking Neural Network
Robustness to Common Corruptions and Perturbations: ImageNet-C, made for images of 224 pixels, and
CIFAR-10-C, made for 32. `corrupt` chooses between the two by the size of the image and scales
lengths; docs/conventions.md has the rule.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image
from scipy import fft

SEVERITIES = (1, 2, 3, 4, 5)
SMALL, LARGE = 32, 224  # short side, in pixels, that the two tables were made for
Rng = np.random.Generator
_LIMIT = math.sqrt(SMALL * LARGE)  # as far from one as from the other, as a ratio: 84.7


@dataclass(frozen=True)
class Corruption:
    """A kind of corruption and its strength at each severity.

    `apply` takes an (H, W, 3) float32 image in 0..1, a random generator, a factor for lengths in
    pixels and the numbers of one severity to an image of the same shape, which may leave 0..1.
    """

    apply: Callable[..., np.ndarray]
    large: tuple[tuple[float, ...], ...]  # numbers of each severity, for images of `LARGE` pixels
    small: tuple[tuple[float, ...], ...]  # the same for images of `SMALL` pixels
    family: str  # noise, blur, weather or digital: corruptions of one family are alike


def corrupt(image: np.ndarray, name: str, severity: int, *, key: str) -> np.ndarray:
    """Corrupt one (H, W, 3) uint8 image by an entry of `CORRUPTIONS`; severity 0 changes nothing.

    What is random depends on key (the name of the image), name and severity alone.
    """
    if severity == 0:
        return image
    corruption = CORRUPTIONS[name]
    side = min(image.shape[:2])
    if side < _LIMIT:
        table, scale = corruption.small, max(side / SMALL, 1.0)
    else:
        table, scale = corruption.large, side / LARGE
    # A digest, because hash() of a string differs from process to process. The 0 was a seed once.
    stated = f"0\0{key}\0{name}\0{severity}".encode("utf-8", "surrogatepass")
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(stated).digest(), "little"))
    changed = corruption.apply(image.astype(np.float32) / 255, rng, scale, *table[severity - 1])
    return np.clip(changed * 255, 0, 255).round().astype(np.uint8)


def gaussian_noise(image: np.ndarray, rng: Rng, scale: float, std: float) -> np.ndarray:
    """Normal noise of standard deviation `std` is added."""
    return image + std * rng.standard_normal(image.shape, np.float32)


def shot_noise(image: np.ndarray, rng: Rng, scale: float, photons: float) -> np.ndarray:
    """Poisson n / photons, n of mean photons x: few photons make much noise."""
    return rng.poisson(image * photons) / photons


def impulse_noise(image: np.ndarray, rng: Rng, scale: float, share: float) -> np.ndarray:
    """A share of all values becomes 0 or 1, either as often."""
    hit = rng.random(image.shape) < share
    return np.where(hit, rng.integers(0, 2, image.shape), image)


def defocus_blur(
    image: np.ndarray, rng: Rng, scale: float, radius: float, smooth: float
) -> np.ndarray:
    """The mean over a disk, whose rim is smoothed by a Gaussian of `smooth` pixels."""
    return _filter(image, _disk(radius * scale, smooth))


def motion_blur(
    image: np.ndarray, rng: Rng, scale: float, radius: float, sigma: float
) -> np.ndarray:
    """A trail at an angle of up to 45 degrees to the horizontal."""
    angle = rng.uniform(-45, 45)
    return _filter(image, _trail(radius * scale, sigma * scale, angle))


def fog(image: np.ndarray, rng: Rng, scale: float, amount: float, decay: float) -> np.ndarray:
    """Fractal fog: (x + amount f) m / (m + amount), f in 0..1, m the maximum of the image."""
    height, width = image.shape[:2]
    density = _plasma(max(height, width), decay, rng)[:height, :width, None]
    brightest = image.max()
    return (image + amount * density) * brightest / (brightest + amount)


def snow(
    image: np.ndarray,
    rng: Rng,
    scale: float,
    mean: float,
    std: float,
    flake: float,
    threshold: float,
    radius: float,
    sigma: float,
    keep: float,
) -> np.ndarray:
    """Flakes: normal noise, upsampled, cut off below a threshold and blurred as they fall.

    The scene itself is whitened: keep x + (1 - keep) max(x, 1.5 grey + 0.5).
    """
    # Made at the size that the numbers are for: how much passes the threshold depends on the grid.
    height, width = (max(round(side / scale), 1) for side in image.shape[:2])
    coarse = rng.normal(mean, std, (math.ceil(height / flake), math.ceil(width / flake)))
    layer = _resize(coarse, (height, width))
    layer = np.clip(np.where(layer < threshold, 0, layer), 0, 1).astype(np.float32)
    layer = _filter(layer, _trail(radius, sigma, rng.uniform(-135, -45)))
    layer = _resize(layer, image.shape[:2])
    grey = (image @ np.array([0.299, 0.587, 0.114], np.float32))[..., None]
    white = keep * image + (1 - keep) * np.maximum(image, 1.5 * grey + 0.5)
    return white + (layer + np.rot90(layer, 2))[..., None]


def frost(image: np.ndarray, rng: Rng, scale: float, keep: float, amount: float) -> np.ndarray:
    """Bluish needles of ice, thick in places: keep x + amount f, of a drawn texture f in 0..1.

    The literature pastes photographs of frost in place of the texture.
    """
    texture = _needles(image.shape[0], image.shape[1], rng)[..., None]
    return keep * image + amount * texture * np.array([0.85, 0.94, 1.0], np.float32)


def brightness(image: np.ndarray, rng: Rng, scale: float, amount: float) -> np.ndarray:
    """The value of HSV plus `amount`, at most 1; hue and saturation stay."""
    value = image.max(axis=2, keepdims=True)
    brighter = np.minimum(value + amount, 1)
    # Black has no hue: it becomes grey.
    return np.where(value > 0, image * (brighter / np.maximum(value, 1e-9)), brighter)


def contrast(image: np.ndarray, rng: Rng, scale: float, factor: float) -> np.ndarray:
    """Distance to the mean colour of the image times `factor`."""
    mean = image.mean(axis=(0, 1), keepdims=True, dtype=np.float64)
    return mean + factor * (image - mean)


def jpeg(image: np.ndarray, rng: Rng, scale: float, quality: float) -> np.ndarray:
    """Saved as a JPEG file of this quality, and read again."""
    file = io.BytesIO()
    picture = Image.fromarray((image * 255).round().astype(np.uint8))
    picture.save(file, "JPEG", quality=int(quality))
    with Image.open(file) as saved:
        return np.asarray(saved, np.float32) / 255


def pixelate(image: np.ndarray, rng: Rng, scale: float, share: float) -> np.ndarray:
    """Downsampled to a share of its sides, and upsampled to blocks."""
    height, width = image.shape[:2]
    small = (max(int(width * share), 1), max(int(height * share), 1))
    box = Image.Resampling.BOX
    picture = Image.fromarray((image * 255).round().astype(np.uint8))
    return np.asarray(picture.resize(small, box).resize((width, height), box)) / 255


# A new corruption is one function and one entry here.
CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": Corruption(
        gaussian_noise,
        large=((0.08,), (0.12,), (0.18,), (0.26,), (0.38,)),
        small=((0.04,), (0.06,), (0.08,), (0.09,), (0.10,)),
        family="noise",
    ),
    "shot_noise": Corruption(
        shot_noise,
        large=((60,), (25,), (12,), (5,), (3,)),
        small=((500,), (250,), (100,), (75,), (50,)),
        family="noise",
    ),
    "impulse_noise": Corruption(
        impulse_noise,
        large=((0.03,), (0.06,), (0.09,), (0.17,), (0.27,)),
        small=((0.01,), (0.02,), (0.03,), (0.05,), (0.07,)),
        family="noise",
    ),
    "defocus_blur": Corruption(
        defocus_blur,
        large=((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        small=((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        family="blur",
    ),
    "motion_blur": Corruption(
        motion_blur,
        large=((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
        small=((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        family="blur",
    ),
    "fog": Corruption(
        fog,
        large=((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
        small=((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        family="weather",
    ),
    "snow": Corruption(
        snow,
        large=(
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
        small=(
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        family="weather",
    ),
    "frost": Corruption(
        frost,
        large=((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
        small=((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
        family="weather",
    ),
    "brightness": Corruption(
        brightness,
        large=((0.1,), (0.2,), (0.3,), (0.4,), (0.5,)),
        small=((0.05,), (0.1,), (0.15,), (0.2,), (0.3,)),
        family="weather",
    ),
    "contrast": Corruption(
        contrast,
        large=((0.4,), (0.3,), (0.2,), (0.1,), (0.05,)),
        small=((0.75,), (0.5,), (0.4,), (0.3,), (0.15,)),
        family="digital",
    ),
    "jpeg": Corruption(
        jpeg,
        large=((25,), (18,), (15,), (10,), (7,)),
        small=((80,), (65,), (58,), (50,), (40,)),
        family="digital",
    ),
    "pixelate": Corruption(
        pixelate,
        large=((0.6,), (0.5,), (0.4,), (0.3,), (0.25,)),
        small=((0.95,), (0.9,), (0.85,), (0.75,), (0.65,)),
        family="digital",
    ),
}


def _filter(image: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Correlate every channel with a kernel of odd sides; the border is mirrored.

    By Fourier transform, whose time does not grow with the kernel.
    """
    planes = image[None] if image.ndim == 2 else np.moveaxis(image, 2, 0)  # (C, H, W)
    rows, columns = (side // 2 for side in kernel.shape)
    padded = np.pad(planes, ((0, 0), (rows, rows), (columns, columns)), "reflect")
    shape = [fft.next_fast_len(side, real=True) for side in padded.shape[1:]]
    changed = fft.rfft2(padded, shape) * fft.rfft2(kernel, shape).conj()
    filtered = fft.irfft2(changed, shape)[:, : planes.shape[1], : planes.shape[2]]
    return filtered[0] if image.ndim == 2 else np.moveaxis(filtered, 0, 2)


def _resize(layer: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """(H, W) resized, linear where it grows, averaging over areas where it shrinks."""
    rows, columns = (_weights(old, new) for old, new in zip(layer.shape, size, strict=True))
    return rows @ layer.astype(np.float32) @ columns.T


def _weights(old: int, new: int) -> np.ndarray:
    """(new, old) what each old pixel counts in each new one, along one side."""
    step = old / new
    at = np.arange(new)[:, None]
    if new < old:  # how much of the old pixel lies in the new one
        last = np.minimum((at + 1) * step, np.arange(1, old + 1))
        return ((last - np.maximum(at * step, np.arange(old))).clip(0) / step).astype(np.float32)
    centre = ((at + 0.5) * step - 0.5).clip(0, old - 1)
    return (1 - np.abs(centre - np.arange(old))).clip(0).astype(np.float32)


def _blur(layer: np.ndarray, sigma: float) -> np.ndarray:
    """(H, W) blurred by a Gaussian, by cosine transform: the border is mirrored."""
    rows, columns = (np.exp(-0.5 * (np.pi * np.arange(n) * sigma / n) ** 2) for n in layer.shape)
    return fft.idctn(fft.dctn(layer) * (rows[:, None] * columns).astype(np.float32))


@lru_cache(maxsize=64)
def _disk(radius: float, smooth: float) -> np.ndarray:
    """A disk of weight 1, its rim shared out by the part of each pixel that it covers."""
    reach = math.ceil(radius) + 2
    along = np.arange(-reach, reach + 1)
    disk = np.clip(radius + 0.5 - np.hypot(along, along[:, None]), 0, 1)
    weights = np.exp(-0.5 * (np.arange(-2, 3) / smooth) ** 2)
    kernel = np.outer(weights, weights / weights.sum() ** 2)  # (5, 5)
    padded = np.pad(disk, 2)
    smoothed = sum(
        kernel[i, j] * padded[i : i + len(disk), j : j + len(disk)]
        for i in range(5)
        for j in range(5)
    )
    return (smoothed / np.sum(smoothed)).astype(np.float32)


def _trail(radius: float, sigma: float, degrees: float) -> np.ndarray:
    """A line of weight 1 from the centre, 2 radius long, that fades as half a Gaussian."""
    steps = np.arange(max(round(2 * radius), 0) + 1)
    weights = np.exp(-0.5 * (steps / sigma) ** 2)
    x, y = (steps * f(math.radians(degrees)) for f in (math.cos, math.sin))
    reach = len(steps)
    kernel = np.zeros((2 * reach + 1, 2 * reach + 1), np.float32)
    left, top = np.floor(x), np.floor(y)
    for i in (0, 1):  # each point is shared among its four pixels
        for j in (0, 1):
            share = weights * (1 - np.abs(y - top - i)) * (1 - np.abs(x - left - j))
            np.add.at(
                kernel, (reach + (top + i).astype(int), reach + (left + j).astype(int)), share
            )
    # Without the empty margins the kernel is faster, but its centre must stay in the middle.
    rows, columns = (np.flatnonzero(kernel.any(axis)) for axis in (1, 0))
    high, wide = (int(np.abs(at - reach).max()) for at in (rows, columns))
    kernel = kernel[reach - high : reach + high + 1, reach - wide : reach + wide + 1]
    return kernel / kernel.sum()


def _needles(height: int, width: int, rng: Rng) -> np.ndarray:
    """(height, width) in 0..1: thin bright strokes on black, in thickets with a milky film.

    Thickets lie where a fractal is high; all is as long and wide as the image is large.
    """
    side = max(height, width)
    density, course = (_plasma(side, decay, rng)[:height, :width] for decay in (1.6, 1.3))
    length, thickness = 0.05 * side, max(round(side / 300), 1)
    count = max(round(2 * height * width / (length * thickness)), 2)
    rows, columns = (rng.integers(0, n, count) for n in (height, width))
    # By rank, so that every image has as much frost.
    densest = density[rows, columns].argsort(kind="stable")[::-1]
    grown = densest[rng.random(count) > np.linspace(0, 1, count) ** 0.15]
    rows, columns = rows[grown], columns[grown]
    # Crystals grow at 60 degrees to each other.
    angle = 3 * np.pi * course[rows, columns] + rng.integers(0, 3, len(rows)) * np.pi / 3
    reach = length * rng.exponential(0.5, len(rows))
    tips = np.stack([reach * np.cos(angle), reach * np.sin(angle)], -1)  # (n, 2)
    middles = np.stack([columns, rows], -1)
    strokes = np.stack([middles - tips, middles + tips], 1).round()  # (n, 2, 2)
    drawn = np.zeros((height, width), np.float32)
    for number, colour in enumerate((80, 110, 150, 200, 255)):  # the brightest last, on top
        _pencil()(drawn, strokes[number::5], colour, thickness)
    return np.maximum(drawn, 0.7 * _blur(drawn, side / 25)) / 255


@lru_cache(maxsize=1)
def _pencil() -> Callable[..., None]:
    """`_draw`, compiled when it is first needed."""
    from numba import njit

    return njit(_draw)


def _draw(drawn: np.ndarray, strokes: np.ndarray, colour: float, thickness: int) -> None:
    """Draw soft lines (n, 2, 2) from (x, y) to (x, y) into the image `drawn`, in place."""
    height, width = drawn.shape
    thin = thickness == 1
    edge = 1.15 if thin else (thickness + 1) // 2 + 1.15  # half of the line and its soft rim
    for k in range(len(strokes)):
        x0, y0, x1, y1 = strokes[k, 0, 0], strokes[k, 0, 1], strokes[k, 1, 0], strokes[k, 1, 1]
        length = math.hypot(x1 - x0, y1 - y0)
        dx, dy = ((x1 - x0) / length, (y1 - y0) / length) if length > 0 else (1.0, 0.0)
        for y in range(max(int(min(y0, y1) - edge), 0), min(int(max(y0, y1) + edge) + 2, height)):
            for x in range(
                max(int(min(x0, x1) - edge), 0), min(int(max(x0, x1) + edge) + 2, width)
            ):
                along = (x - x0) * dx + (y - y0) * dy
                across = abs((y - y0) * dx - (x - x0) * dy)
                beyond = max(-along, along - length, 0.0)
                if thin:  # the ends are cut off, where thicker lines have round ones
                    end = min(max(0.5 + min(along, length - along), 0.0), 1.0)
                    opacity = min(max(edge - across, 0.0), 0.92) * end
                else:
                    opacity = min(max(edge - math.hypot(across, beyond), 0.0), 1.0)
                drawn[y, x] += opacity * (colour - drawn[y, x])


def _plasma(side: int, decay: float, rng: Rng) -> np.ndarray:
    """A fractal in 0..1 by the diamond-square algorithm; its side is a power of 2 from `side` on.

    At each halving of the grid new points are the mean of their four neighbours plus uniform
    noise, whose range shrinks by decay squared.
    """
    size = 2 ** max(math.ceil(math.log2(side)), 1)
    field = np.zeros((size, size))
    step, noise = size, 1.0

    def new(total: np.ndarray) -> np.ndarray:
        return total / 4 + rng.uniform(-noise, noise, total.shape)

    while step > 1:
        half = step // 2
        corners = field[::step, ::step]
        columns = corners + np.roll(corners, -1, 1)
        centres = new(columns + np.roll(columns, -1, 0))
        field[half::step, half::step] = centres
        rows = corners + np.roll(corners, -1, 0)
        field[::step, half::step] = new(columns + centres + np.roll(centres, 1, 0))
        field[half::step, ::step] = new(rows + centres + np.roll(centres, 1, 1))
        step, noise = half, noise / decay**2
    field -= field.min()
    return (field / field.max()).astype(np.float32)
