"""Compiling the native graph ahead of its first use: `python -m labkit.models.hybrid.native.ahead`."""

from __future__ import annotations

FORMS = ((4, 2), (8, 2), (32, 0))
"""Bits of a weight and bytes of a scale: in the matrices of a checkpoint quantised to 4 bits, as tiny-hybrid is, and in
those of a small random model in float32."""


def compile_ahead() -> None:
    """Compile every stage, and the products of `FORMS`, into labkit's cache folder; quick where they are there already.

    A process that needs one of these meanwhile waits for it, and takes it from the cache. Other forms are compiled at
    the first forward of a model that has them.
    """
    from labkit.kernels.quantized_matmul.loops import ready
    from labkit.kernels.quantized_matmul.panels import FORMS as ALL
    from labkit.kernels.quantized_matmul.panels import Form
    from labkit.models.hybrid.native import stages  # noqa: F401  (to import it is to compile it)

    for form in FORMS:
        ready(ALL.index(Form(*form)))


if __name__ == "__main__":
    compile_ahead()
