#!/usr/bin/env python3
"""Cuts the bundled set out of the full Fashion-MNIST: of each class, the first images in file order.

usage: make.py FULL_DIR OUT_DIR

FULL_DIR holds the four published files, gzipped. They are checked by the checksums of their contents,
so it does not matter who compressed them. Needs nothing beyond Python's standard library.
"""
import gzip
import hashlib
import pathlib
import struct
import sys

CLASSES = 10
HEIGHT = WIDTH = 28
# Split, images kept of each class, and the MD5 of the unpacked images and labels.
SPLITS = [
    ("train", 460, "f4a8712d7a061bf5bd6d2ca38dc4d50a", "9018921c3c673c538a1fc5bad174d6f9"),
    ("t10k", 100, "8181f5470baa50b63fa0f6fddb340f0a", "15d484375f8d13e6eb1aabb0c3f46965"),
]


def unpack(path: pathlib.Path, md5: str) -> bytes:
    contents = gzip.decompress(path.read_bytes())
    got = hashlib.md5(contents).hexdigest()
    if got != md5:
        sys.exit(f"{path}: expected contents with MD5 {md5}, got {got}")
    return contents


def pack(path: pathlib.Path, contents: bytes) -> None:
    # No name and no time, so that the same Python writes the same file every time.
    path.write_bytes(gzip.compress(contents, compresslevel=9, mtime=0))
    print(f"{path.name}: {path.stat().st_size} bytes")


def main(full: pathlib.Path, out: pathlib.Path) -> None:
    size = HEIGHT * WIDTH
    for split, per_class, images_md5, labels_md5 in SPLITS:
        images_file = f"{split}-images-idx3-ubyte.gz"
        labels_file = f"{split}-labels-idx1-ubyte.gz"
        images = unpack(full / images_file, images_md5)[16:]
        labels = unpack(full / labels_file, labels_md5)[8:]
        left = [per_class] * CLASSES
        kept = []
        for index, label in enumerate(labels):
            if left[label] > 0:
                left[label] -= 1
                kept.append(index)
        assert not any(left), left
        header = struct.pack(">IIII", 0x0803, len(kept), HEIGHT, WIDTH)
        pack(out / images_file, header + b"".join(images[i * size : (i + 1) * size] for i in kept))
        header = struct.pack(">II", 0x0801, len(kept))
        pack(out / labels_file, header + bytes(labels[i] for i in kept))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
