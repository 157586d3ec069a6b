"""Reading Metal text: comments, storage declarations, words, attributes; and headers in sections."""

from __future__ import annotations

import mlx.core as mx
import pytest

from labkit.kernels import Header, Kernel
from labkit.kernels.headers import SHARED
from labkit.kernels.metal_text import (
    attributes_in,
    blank,
    compact,
    identifiers,
    keep_branches,
    remove_words,
    replace_storage,
    storage_declarations,
    strip_comments,
)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("threadgroup float x[4];", [("x",)]),
        ("threadgroup float a[2], b[3];", [("a", "b")]),
        ("threadgroup vec<float, 4> v[8];", [("v",)]),
        ("threadgroup metal::vec<metal::vec<float, 2>, 2> v[8];", [("v",)]),
        ("threadgroup atomic_uint count;", [("count",)]),
        ("alignas(16) threadgroup half tile[8][8];", [("tile",)]),
        ("threadgroup alignas(16) half tile[8 * (2 + 1)];", [("tile",)]),
        ("#define N 4\nthreadgroup float x[N];", [("x",)]),
        ("#define LONG 1 + \\\n  2\nthreadgroup float x[LONG];", [("x",)]),
        ("// a comment\nthreadgroup float x[4]; // threadgroup float y[4];", [("x",)]),
        ("if (true) { threadgroup float x[4]; }", [("x",)]),
        ("/* threadgroup float y[4]; */ threadgroup float x[4];", [("x",)]),
        ("threadgroup float* p = x;", []),
        ("threadgroup float& r = x[0];", []),
        ("float f(threadgroup float* p) { return p[0]; }", []),
        ("auto q = (threadgroup float*)p;", []),
        ("threadgroup_barrier(mem_flags::mem_threadgroup);", []),
        ("const threadgroup float* p = x;", []),
    ],
)
def test_storage_declarations(text, names):
    assert [declaration.names for declaration in storage_declarations(text)] == names


def test_replaced_storage_keeps_lines_and_the_rest():
    text = (
        "// threadgroup float no[1];\nthreadgroup float x[4];\n"
        "threadgroup alignas(16) half y[2];\nthreadgroup float* p = x;"
    )
    replaced = replace_storage(text, lambda k: f"STATIC{k}")
    assert replaced.splitlines() == [
        "// threadgroup float no[1];",
        "STATIC0 float x[4];",
        "alignas(16) STATIC1 half y[2];",
        "threadgroup float* p = x;",
    ]
    assert [declaration.line for declaration in storage_declarations(text)] == [2, 3]


def test_words_are_removed_in_code_only():
    text = 'device float* a; // device b\nconst char* s = "device"; int device_count; #if 1\nconstant int k;'
    removed = remove_words(text)
    assert removed.startswith(" float* a; // device b")
    assert '"device"' in removed
    assert "device_count" in removed
    assert "constant" not in removed
    assert removed.count("\n") == text.count("\n")


def test_blank_keeps_positions():
    text = "a /* x\n y */ b // c\n#define d \\\n e\nz \"g\" 'h'"
    assert len(blank(text)) == len(text)
    assert [text.index(word) for word in "abz"] == [blank(text).index(word) for word in "abz"]
    assert not set("xycdegh") & set(blank(text))


def test_identifiers_skip_comments_and_strings():
    assert identifiers('foo(bar); // baz\n#define qux 1\n"quux" /* corge */') == {"foo", "bar", "define", "qux"}


def test_attributes_are_found_as_mlx_finds_them():
    names = dict(
        attributes_in("// thread_position_in_grid counts even in a comment\nuint t = thread_index_in_simdgroup;")
    )
    assert names == {"thread_index_in_simdgroup": "uint", "thread_position_in_grid": "uint3"}


def test_strip_comments_keeps_the_code():
    assert strip_comments("int a; // x\n\n/* y\n z */ int b;\n#define c 1 // d\n") == "int a;\n  int b;\n#define c 1"


HEADER = """int always;
//@provides one
int one(); // uses two
int x = two();
//@provides two deux
int two();
//@provides three
int three();
"""


def test_header_gives_what_is_used_and_what_that_uses():
    header = Header.parse(HEADER)
    assert header.used_by("nothing") == "int always;"
    assert header.used_by("deux") == "int always;\nint two();"
    assert header.used_by("one") == "int always;\nint one();\nint x = two();\nint two();"
    assert header.used_by("// one") == "int always;"


def test_header_refuses_doubles_and_empty_sections():
    with pytest.raises(ValueError, match="twice"):
        Header.parse("//@provides a\n//@provides a b\n")
    with pytest.raises(ValueError, match="provides nothing"):
        Header.parse("//@provides\nint x;")


def test_a_small_kernel_has_a_small_text():
    """MLX hashes the text at each launch."""
    small = Kernel("small", ["x"], ["y"], "uint i = thread_position_in_grid.x; y[i] = x[i];", header=SHARED)
    assert small.text.header == ""
    summing = Kernel("summing", ["x"], ["y"], "y[0] = threadgroup_sum<64>(x[0], nullptr, 0, 0);", header=SHARED)
    assert "threadgroup_sum" in summing.text.header
    assert "threadgroup_max" not in summing.text.header
    assert len(summing.text.header) < 600


def test_the_cuda_text_of_a_small_kernel_is_small():
    from labkit.kernels.targets.cuda_text import translate, vocabulary

    small = Kernel("small", ["x"], ["y"], "uint i = thread_position_in_threadgroup.x; y[i] = x[i] + 1;")
    shape = {"output_shapes": [(32,)], "output_dtypes": [mx.float32], "grid": (32, 1, 1), "threadgroup": (32, 1, 1)}
    launch = small.launch(inputs=[mx.zeros((32,))], **shape)
    whole = sum(len(section.text) for section in vocabulary().sections)
    assert len(translate(small.text, launch).header) < whole / 3


def test_compact_keeps_tokens_apart_that_would_join():
    text = """
      // a comment
      #define LONG(a)      \\
        f(a)               \\
        + 1
      int  a = b - -c ,  d = 0xE + 1;   /* gone */
      x = a > > b ? ::y : r ->q;
      s = "two  spaces" "  kept";
      template <class T> struct v { T x [ 4 ] ; } ;
    """
    assert compact(text).splitlines() == [
        "#define LONG(a) f(a) + 1",
        "int a=b- -c,d=0xE +1;",
        "x=a> >b? ::y:r->q;",
        's= "two  spaces" "  kept";',
        "template<class T>struct v{T x[4];};",
    ]


def test_branches_are_decided_for_known_names_alone():
    text = (
        "#ifdef CUDA\na\n#ifdef OTHER\nb\n#else\nc\n#endif\n#else\nd\n#endif\n#if !defined(CUDA)\ne\n#else\nf\n#endif"
    )
    assert keep_branches(text, {"CUDA": True}).splitlines() == ["a", "#ifdef OTHER", "b", "#else", "c", "#endif", "f"]
    assert keep_branches(text, {"CUDA": False}).splitlines() == ["d", "e"]
    assert keep_branches(text, {}) == text
