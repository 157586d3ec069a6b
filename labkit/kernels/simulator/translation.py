"""Metal text to a C++ translation unit: the same lines, threadgroup arrays marked, MLX's signature around them."""

from __future__ import annotations

from labkit.kernels.metal_text import replace_storage, storage_declarations
from labkit.kernels.signature import Launch, MetalText, parameters, template_lines

HEADER_LINES_FROM = 1_000_000
"""Lines of the header are numbered from here, so that one number names a line of header or source."""


def translate(text: MetalText, launch: Launch) -> str:
    """The C++ that runs one thread of the kernel.

    Raises:
        ValueError: the header declares a threadgroup array; Metal allows them in the kernel function only.
    """
    if declared := storage_declarations(text.header):
        raise ValueError(
            f"kernel {text.name}: the header's line {declared[0].line} declares threadgroup storage "
            f"({', '.join(declared[0].names)}); Metal allows that only in the kernel's own body"
        )
    declarations = storage_declarations(text.source)
    signature, arguments = _signature(text, launch)
    storage = [f'  LK_STORAGE_ENTRY("{", ".join(d.names)}", {k}, {d.line}),' for k, d in enumerate(declarations)]
    return "\n".join(
        [
            '#include "metal/metal.h"',
            '#include "runtime/storage.h"',
            *(f"LK_DECLARE_STORAGE({k})" for k in range(len(declarations))),
            f'#line {HEADER_LINES_FROM + 1} "{text.name}.header.metal"',
            text.header,
            f"static void lk_body({', '.join(signature)}) {{",
            template_lines(launch),
            f'#line 1 "{text.name}.metal"',
            replace_storage(text.source, lambda k: f"LK_STORAGE({k})"),
            "}",
            '#line 1 "generated"',
            'extern "C" LK_UNCHECKED void lk_thread_main(void** a, const lk::Attributes* t) {',
            f"  lk_body({', '.join(arguments)});",
            "}",
            'extern "C" {',
            "const lk::Storage lk_storage[] = {",
            *storage,
            "  {}};  // an array needs an element",
            f"const int lk_storage_count = {len(declarations)};",
            "}",
            "",
        ]
    )


def _signature(text: MetalText, launch: Launch) -> tuple[list[str], list[str]]:
    """Parameters of the body, and the expressions that the thread's entry passes for them."""
    signature, arguments = [], []
    for k, parameter in enumerate(parameters(text, launch)):
        const = "" if parameter.kind == "output" else "const "
        if parameter.kind in ("scalar", "ndim"):
            signature.append(f"{const}{parameter.metal_type}& {parameter.name}")
            arguments.append(f"*({const}{parameter.metal_type}*)a[{k}]")
        else:
            signature.append(f"{const}{parameter.metal_type}* {parameter.name}")
            arguments.append(f"({const}{parameter.metal_type}*)a[{k}]")
    for name, metal_type in text.attributes:
        signature.append(f"{metal_type} {name}")
        arguments.append(f"uint3(t->{name}.x, t->{name}.y, t->{name}.z)" if metal_type == "uint3" else f"t->{name}")
    return signature, arguments
