"""Small GGUF files, and blocks read by hand, from the format's description alone: independent of labkit and MLX."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

KINDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12}


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """A metadata value with its type number."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + string(item)
    inner = {str: 8, float: 6, int: 5}[type(item[0])]
    body = b"".join(string(x) if inner == 8 else struct.pack("<f" if inner == 6 else "<i", x) for x in item)
    return struct.pack("<IIQ", 9, inner, len(item)) + body


def quantised(kind: str, weights: np.ndarray) -> bytes:
    """Blocks of 32 in ggml's layout: a scale (and a minimum), then the codes."""
    blocks = weights.astype(np.float32).reshape(-1, 32)
    out = []
    for block in blocks:
        if kind == "Q8_0":
            d = np.float16(np.abs(block).max() / 127)
            codes = np.round(block / np.float32(d or 1)).clip(-127, 127).astype(np.int8)
            out.append(d.tobytes() + codes.tobytes())
            continue
        if kind == "Q4_1":
            low = np.float16(block.min())
            d = np.float16((block.max() - block.min()) / 15)
            codes = np.round((block - np.float32(low)) / np.float32(d or 1)).clip(0, 15).astype(np.uint8)
            head = d.tobytes() + low.tobytes()
        else:
            d = np.float16(np.abs(block).max() / 8)
            codes = (np.round(block / np.float32(d or 1)) + 8).clip(0, 15).astype(np.uint8)
            head = d.tobytes()
        out.append(head + (codes[:16] | (codes[16:] << 4)).tobytes())
    return b"".join(out)


def write(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[str, np.ndarray]]) -> Path:
    """A GGUF version 3 file; a tensor is (kind, values)."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    header += b"".join(string(key) + value(item) for key, item in metadata.items())
    bodies, offset = [], 0
    for name, (kind, array) in tensors.items():
        if kind in ("F32", "F16"):
            body = array.astype(np.float32 if kind == "F32" else np.float16).tobytes()
        elif kind == "Q4_K":
            body = bytes(array.size // 256 * 144)
        else:
            body = quantised(kind, array)
        header += string(name) + struct.pack("<I", array.ndim)
        header += b"".join(struct.pack("<Q", n) for n in reversed(array.shape))
        header += struct.pack("<IQ", KINDS[kind], offset)
        body += bytes(-len(body) % 32)
        bodies.append(body)
        offset += len(body)
    path.write_bytes(header + bytes(-len(header) % 32) + b"".join(bodies))
    return path


def codes_and_scales(kind: str, raw: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Raw bytes of a tensor -> codes [rows, columns], scales and biases (fp16) [rows, columns / 32], as x = d q + m."""
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    blocks = raw.reshape(-1, size)
    d = blocks[:, :2].copy().view(np.float16)[:, 0]
    if kind == "Q8_0":
        q = (blocks[:, 2:].view(np.int8).astype(np.int16) + 128).astype(np.uint8)
        m = (np.float16(-128) * d).astype(np.float16)
    else:
        start = 4 if kind == "Q4_1" else 2
        nibbles = blocks[:, start:]
        q = np.concatenate([nibbles & 15, nibbles >> 4], axis=1)
        m = blocks[:, 2:4].copy().view(np.float16)[:, 0] if kind == "Q4_1" else (np.float16(-8) * d).astype(np.float16)
    groups = columns // 32
    return q.reshape(-1, columns), d.reshape(-1, groups), m.reshape(-1, groups)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes -> MLX's uint32 words, lowest bits first."""
    per_word = 32 // bits
    parts = codes.reshape(codes.shape[0], -1, per_word).astype(np.uint32)
    return (parts << (np.arange(per_word, dtype=np.uint32) * bits)).sum(axis=-1, dtype=np.uint32)
