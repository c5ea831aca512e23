"""Images and masks are read with the values that were stored, or refused in one line."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from segcal import files
from segcal.files import BadFile, image_size, read_mask, read_rgb


def grey_png(path, values, depth):
    """A grey PNG of 1, 2, 4, 8 or 16 bits a pixel, written by hand: Pillow writes only some."""
    height, width = values.shape

    def chunk(kind, content):
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    rows = b""
    for row in values:
        bits = "".join(f"{value:0{depth}b}" for value in row)
        bits += "0" * (-len(bits) % 8)
        rows += b"\0" + int(bits, 2).to_bytes(len(bits) // 8, "big")
    header = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def grey_tiff(path, values, depth):
    """An uncompressed grey TIFF of one row, of any number of bits a pixel."""
    bits = "".join(f"{value:0{depth}b}" for value in values)
    bits += "0" * (-len(bits) % 8)
    pixels = int(bits, 2).to_bytes(len(bits) // 8, "big")
    # Tag and value: width, height, bits, compression, black is zero, offset, rows, bytes.
    entries = [(256, len(values)), (257, 1), (258, depth), (259, 1), (262, 1)]
    entries += [(273, 8), (278, 1), (279, len(pixels))]
    content = b"II*\0" + struct.pack("<I", 8 + len(pixels)) + pixels
    content += struct.pack("<H", len(entries))
    content += b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    path.write_bytes(content + bytes(4))


def test_masks_of_every_depth_give_the_stored_numbers(tmp_path):
    for depth in [1, 2, 4, 8, 16]:
        top = min(2**depth, 2**10)
        values = np.arange(2 * top).reshape(2, top) % top
        grey_png(tmp_path / "m.png", values, depth)
        mask = read_mask(tmp_path / "m.png")
        assert mask.dtype.kind == "u" and np.array_equal(mask, values)


def test_palette_masks_give_indices(tmp_path):
    for bits in [1, 2, 4, 8]:
        values = np.arange(2**bits, dtype=np.uint8).reshape(2, -1)
        image = Image.fromarray(values)
        image.putpalette(np.random.default_rng(0).bytes(768))
        image.save(tmp_path / "m.png", bits=bits)
        assert np.array_equal(read_mask(tmp_path / "m.png"), values)


def test_masks_of_32_bits(tmp_path):
    values = np.array([[0, 70_000], [3, 255]], np.int32)
    Image.fromarray(values).save(tmp_path / "m.tif")
    assert np.array_equal(read_mask(tmp_path / "m.tif"), values)


def test_masks_of_colours_or_fractions_are_refused(tmp_path):
    for mode in ["RGB", "RGBA", "LA", "F", "CMYK"]:
        Image.new(mode, (3, 2)).save(tmp_path / "m.tif")
        with pytest.raises(BadFile, match=rf"m\.tif: .*one channel.* mode {mode}$"):
            read_mask(tmp_path / "m.tif")


def test_grey_of_every_depth_spans_black_to_white(tmp_path):
    for depth in [1, 2, 4, 8, 16]:
        top = 2**depth - 1
        values = np.linspace(0, top, min(top + 1, 999)).round().astype(int)[None]
        grey_png(tmp_path / "a.png", values, depth)
        image = read_rgb(tmp_path / "a.png")
        assert image.dtype == np.uint8 and image.shape == (1, values.size, 3)
        assert (image == image[..., :1]).all()
        assert np.abs(image[0, :, 0] - 255 * values[0] / top).max() < 1
        assert image.min() == 0 and image.max() == 255


def test_grey_tiff_is_scaled_by_its_depth(tmp_path):
    for depth in [12, 16]:
        values = [0, 1 << (depth - 2), 1 << (depth - 1), 2**depth - 1]
        stored = values
        if depth == 16:  # of two bytes, the lower first
            stored = [value >> 8 | (value & 255) << 8 for value in values]
        grey_tiff(tmp_path / "a.tif", stored, depth)
        assert read_rgb(tmp_path / "a.tif")[0, :, 0].tolist() == [0, 64, 128, 255]


def test_sixteen_bits_in_either_byte_order(tmp_path):
    values = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    for name, dtype in (("a.tif", "<u2"), ("b.tif", ">u2")):
        Image.fromarray(values.astype(dtype)).save(tmp_path / name)
        grey = read_rgb(tmp_path / name)[..., 0]
        assert np.array_equal(grey, np.arange(256).reshape(16, 16))


def test_images_of_no_stated_range_are_refused(tmp_path):
    for dtype in [np.int32, np.float32]:
        Image.fromarray(np.array([[0, 1000], [300, 7]], dtype)).save(tmp_path / "a.tif")
        with pytest.raises(BadFile, match=r"a\.tif: .* 32"):
            read_rgb(tmp_path / "a.tif")


def test_colours(tmp_path):
    for mode in ["RGB", "RGBA", "CMYK", "LA", "P"]:
        colours = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
        image = Image.fromarray(colours).convert(mode)
        image.save(tmp_path / "a.tif")
        assert np.array_equal(read_rgb(tmp_path / "a.tif"), np.asarray(image.convert("RGB")))
        assert image_size(tmp_path / "a.tif") == (5, 4)


@pytest.mark.parametrize("read", [read_rgb, read_mask])
def test_what_is_no_image(tmp_path, monkeypatch, read):
    path = tmp_path / "a.png"
    with pytest.raises(BadFile, match=r"a\.png: there is no such file"):
        read(path)
    path.write_bytes(b"hello")
    with pytest.raises(BadFile, match=r"a\.png: .*as an image"):
        read(path)
    Image.new("L", (60, 60)).save(path)
    monkeypatch.setattr(files, "MAX_BYTES", 10_000)
    with pytest.raises(BadFile, match=r"a\.png: .* 60 x 60 pixels"):
        read(path)
