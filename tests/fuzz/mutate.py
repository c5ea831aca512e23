"""Valid examples made slightly wrong: bytes, archives, pictures and trees of values."""

from __future__ import annotations

import io
import json
import struct
import warnings
import zipfile
import zlib

import yaml

NUMBERS = (0, 1, -1, 2, 3, 255, 256, 65536, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**30)
VALUES = (
    *NUMBERS, 0.5, -0.5, 1e-300, 1e308, float("nan"), float("inf"), -float("inf"),
    None, True, False, "", "0", "nan", "none", "../../up", "/etc/passwd", "a/b", "\0", "\ud800",
    "<script>alert(1)</script>", "'\"><img src=x onerror=alert(1)>", "{{7*7}}", "ä" * 50,
    "x" * 5000, "1e3", "2020-01-01", [], {}, [[]], [None], [1, [2]], {"": 0}, {"a": {"a": {}}},
    [0] * 50,
)  # fmt: skip
TOKENS = (
    b"!!python/object/apply:os.system ['touch pwned']", b"!!python/name:os.system ", b"&a [*a]",
    b"*a", b"<<: ", b"---\n", b"...", b"%YAML", b"{", b"}", b"[", b"]", b": ", b"- ", b"\n", b"#",
    b"\xff\xfe", b"\x00", b"\xed\xa0\x80", b"|O", b"<f8", b"<i8", b"|V9", b"cos\nsystem\n", b"NaN",
    b"-1", b"99999999999999999999", b"1e999", b"PK\x03\x04", b"IDAT", b"IHDR", b"PLTE", b"\\", b"'",
    b"(99999999, 99999999)", b"(0,)", b"(-1, 3)", b"True", b"null", b"../../../tmp/up", b"+", b"++",
)  # fmt: skip


def mutated(rng, data, kind):
    """A variation of `data`, an example of one `kind`: bytes, zip, png, json or yaml."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        inside = rng.random() < 0.75
        try:
            data = _INSIDE[kind](rng, data) if inside and kind in _INSIDE else raw(rng, data)
        except Exception:
            data = raw(rng, data)  # mutations before have broken the container
    return data


def raw(rng, data):
    """Bytes changed, without a look at what they mean."""
    data = bytearray(data)
    at = rng.randrange(len(data) + 1)
    length = min(rng.choice((1, 2, 4, 8, 64, 1000)), len(data) - at)
    how = rng.randrange(8)
    if how == 0 and at < len(data):
        data[at] ^= 1 << rng.randrange(8)
    elif how == 1:
        data[at : at + length] = rng.randbytes(length)
    elif how == 2:
        del data[at : at + length]
    elif how == 3:
        data[at:at] = data[at : at + length]
    elif how == 4:
        del data[at:]
    elif how == 5:
        data[at:at] = rng.choice(TOKENS)
    elif how == 6:
        token = rng.choice(TOKENS)
        data[at : at + len(token)] = token
    else:
        number = rng.choice(NUMBERS) % 2**64
        size = rng.choice((1, 2, 4, 8))
        order = rng.choice(("little", "big"))
        data[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, order)
    return bytes(data)


def _zip(rng, data):
    """One member of an archive changed, dropped, doubled or renamed; checksums fit again."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at = rng.randrange(len(members))
    name, content = members[at]
    how = rng.randrange(10)
    if how == 0:
        del members[at]
    elif how == 1:
        members.append((rng.choice(members)[0], content))
    elif how == 2:
        members[at] = (rng.choice(("../up.npy", "/up", "logits.npy", "x" * 300, "")), content)
    else:
        # Most of a file is numbers, and most surprises are in the header.
        cut = min(len(content), 128) if rng.random() < 0.5 else len(content)
        members[at] = (name, raw(rng, content[:cut]) + content[cut:])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", rng.choice((0, 0, 8))) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names may be doubled on purpose
        for name, content in members:
            # An entry made by hand has a fixed date; otherwise it would be the time of day.
            archive.writestr(zipfile.ZipInfo(name), content, archive.compression)
    return buffer.getvalue()


def _png(rng, data):
    """One chunk of a PNG changed, its checksum fitting again."""
    chunks, at = [], 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    at = rng.randrange(len(chunks))
    kind, content = chunks[at]
    if kind == b"IDAT" and rng.random() < 0.5:
        content = zlib.compress(raw(rng, zlib.decompress(content)))
    else:
        content = raw(rng, content)
    chunks[at] = (kind, content)
    return data[:8] + b"".join(
        struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in chunks
    )


def _tree(rng, tree):
    """One node of nested dicts and lists replaced, dropped, doubled or put elsewhere."""
    places = []

    def walk(node):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in list(items):
            places.append((node, key))
            if isinstance(value, (dict, list)) and len(places) < 3000:
                walk(value)

    walk(tree)
    node, key = rng.choice(places)
    how = rng.randrange(10)
    if how == 0:
        del node[key]
    elif how == 1 and isinstance(node, dict):
        node[str(rng.choice(VALUES))] = node[key]
    elif how == 1:
        node.append(node[key])
    elif how == 2:
        other, name = rng.choice(places)
        node[key] = json.loads(json.dumps(other[name])) if name in _keys(other) else None
    elif how == 3 and isinstance(node[key], (int, float)) and node[key]:
        node[key] = rng.choice((-node[key], node[key] * 1000, node[key] + 0.5, str(node[key])))
    else:
        node[key] = rng.choice(VALUES)
    return tree


def _keys(node):
    return node if isinstance(node, dict) else range(len(node))


def _json(rng, data):
    return json.dumps(_tree(rng, json.loads(data))).encode()


def _yaml(rng, data):
    return yaml.safe_dump(_tree(rng, yaml.safe_load(data))).encode("utf-8", "surrogatepass")


_INSIDE = {"zip": _zip, "png": _png, "json": _json, "yaml": _yaml}
