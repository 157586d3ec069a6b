"""Which C++ compiler builds kernels for the simulator, and how."""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from labkit.kernels.artefacts import ArtefactCache, content_key

CPP = Path(__file__).parent / "cpp"

COMPILER_VARIABLE = "LABKIT_CXX"


class CompilerMissing(RuntimeError):
    """No C++ compiler was found."""


class CompileError(RuntimeError):
    """The compiler refused a kernel's text; the message holds its errors, with lines of the Metal text."""


@dataclass(frozen=True)
class Build:
    """How to build: with checks or plain, by which compiler, with which context switch.

    Attributes:
        check: build with instrumented loads and stores.
        compiler: the command, as words; empty for the first found (see `find_compiler`).
        portable_switch: use ucontext instead of the hand-written context switch.
    """

    check: bool = False
    compiler: tuple[str, ...] = ()
    portable_switch: bool = False

    def command(self) -> list[str]:
        """The compiler with the flags common to runtime and kernels."""
        compiler = list(self.compiler or find_compiler())
        # No contraction to FMA: the same bits from every compiler and on every machine.
        flags = ["-std=c++20", "-O2", "-fPIC", "-w", "-ffp-contract=off", "-fno-threadsafe-statics", "-fno-exceptions"]
        # Hidden: libraries of several builds live in one process, and must not share their inline functions' variables.
        flags += ["-fno-math-errno", "-ffunction-sections", "-fvisibility=hidden", f"-I{CPP}", f"-I{CPP / 'include'}"]
        if platform.machine() in ("x86_64", "AMD64"):
            flags.append("-march=native")
        if sys.platform != "darwin":
            flags.append("-fstack-clash-protection")  # a large array meets the trap page below its stack
        if "ziglang" in compiler:
            # zig checks undefined behaviour by default; and nothing of its C++ library is linked (see build_kernel).
            flags += ["-fno-sanitize=undefined", "-D_LIBCPP_VERBOSE_ABORT(...)=__builtin_abort()"]
        return compiler + flags


def find_compiler() -> tuple[str, ...]:
    """The compiler's command: $LABKIT_CXX, else g++ or clang++ on the path, else the clang inside PyPI's `ziglang`.

    Raises:
        CompilerMissing: there is none; the message says how to get one.
    """
    if named := os.environ.get(COMPILER_VARIABLE):
        try:
            return tuple(shlex.split(named))
        except ValueError as error:
            raise CompilerMissing(f"{COMPILER_VARIABLE} is {named!r}, which is no command: {error}") from error
    for name in ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            return (path,)
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "c++")
    raise CompilerMissing(
        "the kernel simulator needs a C++20 compiler and found none. Any of these gives one: "
        "`pip install ziglang` (no root needed), `apt install g++`, or Xcode's command line tools "
        f"(`xcode-select --install`); or set {COMPILER_VARIABLE} to a compiler's command"
    )


def run_compiler(command: list[str]) -> str:
    """Run a compiler; its messages. Raises CompileError or CompilerMissing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise CompilerMissing(f"the C++ compiler {command[0]!r} does not exist: check {COMPILER_VARIABLE}") from error
    if done.returncode:
        said_nothing = f"{command[0]} ended with {done.returncode} and said nothing: is it a C++20 compiler?"
        raise CompileError(done.stderr[:8000].strip() or said_nothing)
    return done.stderr


@cache
def compiler_identity(compiler: tuple[str, ...]) -> str:
    """What the compiler says it is, and the processor it builds for: part of every artefact's key."""
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    except FileNotFoundError as error:
        raise CompilerMissing(f"the C++ compiler {compiler[0]!r} does not exist: check {COMPILER_VARIABLE}") from error
    processor = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        processor += next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "")
    return version + processor


@cache
def sources_identity() -> str:
    """A key of all C++ sources of the simulator."""
    files = sorted(path for path in CPP.rglob("*") if path.is_file())
    return content_key(*(path.read_bytes() for path in files))


def build_library(translation_unit: str, build: Build, cache: ArtefactCache) -> Path:
    """The shared library of a translation unit, built unless the cache has it.

    Returns:
        The path of `kernel.so`; `kernel.cpp` lies beside it.

    Raises:
        CompileError: the text is refused. CompilerMissing: no compiler.
    """
    command = build.command()
    compiler = tuple(build.compiler or find_compiler())
    identity = compiler_identity(compiler)
    gnu = "Free Software Foundation" in identity
    common = (identity, sources_identity(), " ".join(command), str(build.portable_switch))
    # Lines and inlined calls alone: types and variables would be most of what is compiled and read, and nobody asks.
    instrument = ["-g1", *(["-fsanitize=thread"] if build.check else [])]

    def build_runtime(folder: Path) -> None:
        # A Mac's headers hide ucontext from whoever does not ask for it, and then all but POSIX.
        asked = ["-D_XOPEN_SOURCE=700", "-D_DARWIN_C_SOURCE"] if sys.platform == "darwin" else []
        switch = ["-DLK_UCONTEXT", *asked] if build.portable_switch else []
        # It needs nothing of C++20, whose headers take longer to read than its own text.
        source, made = str(CPP / "runtime" / "runtime.cpp"), str(folder / "runtime.o")
        run_compiler([*command, "-std=c++17", *switch, "-c", source, "-o", made])

    def build_vocabulary(folder: Path) -> None:
        (folder / "metal").mkdir()
        header, precompiled = CPP / "metal" / "metal.h", folder / "metal" / "metal.h.gch"
        run_compiler([*command, *instrument, "-x", "c++-header", str(header), "-o", str(precompiled)])

    def build_kernel(folder: Path) -> None:
        source = folder / "kernel.cpp"
        source.write_text(translation_unit)
        run_compiler([*compile_command, *instrument, "-c", str(source), "-o", str(folder / "kernel.o")])
        libraries = [] if sys.platform == "darwin" else ["-lm", "-lpthread"]
        if gnu:  # to read its C++ library takes three quarters of a link, and the runtime brings what it would take
            libraries = ["-nodefaultlibs", *libraries, "-lc", "-lgcc", "-Wl,--no-undefined"]
        linker = [*compiler[:-1], "cc"] if "ziglang" in compiler else compiler
        link = [*linker, "-shared", "-fPIC", str(folder / "kernel.o"), str(runtime), "-o", str(folder / "kernel.so")]
        run_compiler(link + libraries)
        if sys.platform != "darwin":  # there the debug information stays in the object file
            (folder / "kernel.o").unlink()

    # Before build_kernel, not inside of it: a build that waits for another build's lock could wait for its own.
    runtime = cache.get(content_key("runtime", *common), build_runtime) / "runtime.o"
    compile_command = command
    if gnu:  # GCC finds a precompiled vocabulary by itself: three times faster
        vocabulary = cache.get(content_key("vocabulary", *common, *instrument), build_vocabulary)
        compile_command = [*compiler, f"-I{vocabulary}", *command[len(compiler) :]]
    return cache.get(content_key("kernel", *common, *instrument, translation_unit), build_kernel) / "kernel.so"
