"""Vectors of eight floats for numba: what its scalar language cannot say, written as LLVM's own instructions.

LLVM turns them into whatever the processor has (AVX, NEON, ...). Addresses are plain integers, as `array.ctypes.data`
gives them inside a compiled function; loads and stores need no alignment beyond the element's.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 8
FLOAT, BYTE, HALF, WORD, LONG = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS, WORDS = ir.VectorType(FLOAT, LANES), ir.VectorType(WORD, LANES)


class Emitter:
    """Writes instructions at the builder's place."""

    def __init__(self, builder: ir.IRBuilder):
        self.builder = builder

    def long(self, number: int) -> ir.Constant:
        """A 64-bit integer."""
        return ir.Constant(LONG, number)

    def words(self, number: int) -> ir.Constant:
        """The same 32-bit integer in every lane."""
        return ir.Constant(WORDS, [number] * LANES)

    def zero(self) -> ir.Constant:
        """Eight zeros."""
        return ir.Constant(FLOATS, [0.0] * LANES)

    def at(self, address: ir.Value, *steps: tuple[ir.Value | int, ir.Value | int]) -> ir.Value:
        """address + the sum of index * bytes."""
        for index, size in steps:
            if isinstance(index, int) and isinstance(size, int):
                step = self.long(index * size)
            else:
                index, size = (self.long(x) if isinstance(x, int) else x for x in (index, size))
                step = self.builder.mul(index, size)
            address = self.builder.add(address, step)
        return address

    def load(self, address: ir.Value, kind: ir.Type) -> ir.Value:
        """What lies at an address."""
        value = self.builder.load(self.builder.inttoptr(address, kind.as_pointer()))
        value.align = _alignment(kind)
        return value

    def store(self, value: ir.Value, address: ir.Value) -> None:
        """Write to an address."""
        place = self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()))
        place.align = _alignment(value.type)

    def prefetch(self, address: ir.Value) -> None:
        """Ask for the cache line of an address that will be read soon; any address will do."""
        place, word = BYTE.as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place, word, word, word])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0i8")
        read, keep, data = 0, 3, 1
        hints = [ir.Constant(word, hint) for hint in (read, keep, data)]
        self.builder.call(function, [self.builder.inttoptr(address, place), *hints])

    def first_lanes(self, count: ir.Value) -> ir.Value:
        """A mask of the first so many lanes."""
        lanes = ir.Constant(WORDS, list(range(LANES)))
        undefined = ir.Constant(WORDS, ir.Undefined)
        first = self.builder.insert_element(undefined, self.builder.trunc(count, WORD), ir.Constant(WORD, 0))
        return self.builder.icmp_unsigned("<", lanes, self.builder.shuffle_vector(first, undefined, self.words(0)))

    def load_lanes(self, address: ir.Value, mask: ir.Value) -> ir.Value:
        """Eight integers, of which only the lanes of a mask are read; the others are 0."""
        place = WORDS.as_pointer()
        kind = ir.FunctionType(WORDS, [place, WORD, ir.VectorType(ir.IntType(1), LANES), WORDS])
        function = cgutils.get_or_insert_function(
            self.builder.module, kind, f"llvm.masked.load.v{LANES}i32.p0v{LANES}i32"
        )
        return self.builder.call(
            function, [self.builder.inttoptr(address, place), ir.Constant(WORD, 4), mask, self.words(0)]
        )

    def spread(self, number: ir.Value) -> ir.Value:
        """One float in all lanes."""
        undefined = ir.Constant(FLOATS, ir.Undefined)
        first = self.builder.insert_element(undefined, number, ir.Constant(WORD, 0))
        return self.builder.shuffle_vector(first, undefined, self.words(0))

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """x y + z, rounded once."""
        kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
        function = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.fma.v{LANES}f32")
        return self.builder.call(function, [x, y, z])

    def bfloats(self, address: ir.Value) -> ir.Value:
        """Eight bfloat16 as floats."""
        raw = self.builder.zext(self.load(address, ir.VectorType(HALF, LANES)), WORDS)
        return self.builder.bitcast(self.builder.shl(raw, self.words(16)), FLOATS)

    def bytes_as_words(self, address: ir.Value) -> ir.Value:
        """Eight unsigned bytes as integers."""
        return self.builder.zext(self.load(address, ir.VectorType(BYTE, LANES)), WORDS)

    def floats_of(self, words: ir.Value) -> ir.Value:
        """Small integers as floats."""
        return self.builder.sitofp(words, FLOATS)

    def total(self, x: ir.Value) -> ir.Value:
        """The sum of all lanes: neighbours four apart, two apart, one apart."""
        for apart in (4, 2, 1):
            mask = ir.Constant(WORDS, [lane ^ apart for lane in range(LANES)])
            x = self.builder.fadd(x, self.builder.shuffle_vector(x, x, mask))
        return self.builder.extract_element(x, ir.Constant(WORD, 0))

    def totals(self, vectors: list[ir.Value]) -> ir.Value:
        """The sums of eight vectors, each added up as by `total`, but in a third of its instructions."""
        pairs, lanes = zip(vectors[:4], vectors[4:], strict=True), [0, 1, 2, 3, 8, 9, 10, 11]
        for apart, following in ((4, [0, 1, 8, 9, 4, 5, 12, 13]), (2, [0, 2, 8, 10, 4, 6, 12, 14]), (1, [])):
            masks = [ir.Constant(WORDS, [lane + more for lane in lanes]) for more in (0, apart)]
            vectors = [
                self.builder.fadd(*(self.builder.shuffle_vector(x, y, mask) for mask in masks)) for x, y in pairs
            ]
            pairs, lanes = zip(vectors[0::2], vectors[1::2], strict=False), following
        return vectors[0]

    def register(self, value: ir.Value) -> Register:
        """A variable; LLVM keeps it in a register."""
        return Register(self, value)

    def loop(self, count: ir.Value):
        """`with emitter.loop(count) as index:` repeats what is written inside."""
        return _Loop(self.builder, count)


class Register:
    """A variable of a vector type."""

    def __init__(self, emitter: Emitter, value: ir.Value):
        self._builder = emitter.builder
        self._place = cgutils.alloca_once(self._builder, value.type)
        self.set(value)

    def get(self) -> ir.Value:
        """Its value here."""
        return self._builder.load(self._place)

    def set(self, value: ir.Value) -> None:
        """Assign."""
        self._builder.store(value, self._place)


class _Loop:
    def __init__(self, builder: ir.IRBuilder, count: ir.Value):
        self._range = cgutils.for_range(builder, count)

    def __enter__(self) -> ir.Value:
        return self._range.__enter__().index

    def __exit__(self, *error: object) -> None:
        self._range.__exit__(*error)


def _alignment(kind: ir.Type) -> int:
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    return 4 if isinstance(element, ir.FloatType) else element.width // 8


CACHE_LINE = 64
"""Bytes, or a part of them."""


@intrinsic
def ask_for(context, address, size):
    """Let memory that will be read soon come nearer; it is any address, and so many bytes."""

    def generate(context, builder, signature, args):
        e = Emitter(builder)
        with e.loop(builder.udiv(builder.add(args[1], e.long(CACHE_LINE - 1)), e.long(CACHE_LINE))) as line:
            e.prefetch(e.at(args[0], (line, CACHE_LINE)))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def pointer(context, address):
    """An address as a pointer, for `numba.carray`."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], BYTE.as_pointer())

    return types.voidptr(types.intp), generate


@intrinsic
def float_of_bits(context, bits):
    """The float32 that these 32 bits are."""

    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], FLOAT)

    return types.float32(types.int32), generate
