"""The launcher library: compiling it, loading it, and telling it which kernels exist.

One small C++ library (`csrc/`), compiled by the host compiler against any torch with the stable
ABI, cached by the hash of its sources. It is loaded at the first CUDA call, never at import.

    python -m marlin_cutlass.library build
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from . import dispatch, ops, settings
from .errors import LibraryError, UnsupportedArchError
from .packed_weight import PackedWeight

PACKAGE = Path(__file__).resolve().parent
SOURCES = ("driver", "registry", "workspace", "launch", "c_api", "ops")
# The library needs only symbols that torch 2.10 has, whichever torch it is compiled against.
TORCH_TARGET = "0x020A000000000000"
FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    # A compiler that links libstdc++ statically would export its symbols: calls then go to torch's
    # libstdc++ with objects of the other one, and crash.
    "-Wl,--exclude-libs,ALL",
    f"-DTORCH_TARGET_VERSION={TORCH_TARGET}",
)
ERROR_LINES = 20  # of the compiler's output in an error
KEYS_DTYPE = {torch.float16: "f16", torch.bfloat16: "bf16"}
_lock = threading.RLock()
_loaded: Launcher | None = None
_on_demand: dict[tuple[int, int], dict[str, dispatch.Kernel]] = {}  # by capability and name


class Launcher:
    """The C interface of a loaded library (see csrc/c_api.cpp)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lib = ctypes.CDLL(str(path))
        self._lib.mc_error.restype = ctypes.c_char_p

    def _check(self, status: int) -> int:
        if status < 0:
            raise RuntimeError(self._lib.mc_error().decode(errors="replace"))
        return status

    def load_driver(self) -> None:
        """Finds the NVIDIA driver now, not at the first launch; RuntimeError if there is none."""
        self._check(self._lib.mc_load_driver())

    def set_option(self, name: str, value: bool) -> None:
        """`pdl` or `debug`."""
        self._lib.mc_set_option(name.encode(), int(value))

    def set_built_archs(self, names: Sequence[str]) -> None:
        """Names for the message that a device without a table gets."""
        self._lib.mc_set_built_archs(", ".join(names).encode())

    def clear_tables(self) -> None:
        """Forgets every table; kernels that are loaded stay loaded."""
        self._lib.mc_clear_tables()

    def set_loading(self, value: bool) -> None:
        """While True, calls of other threads that find no table wait. True to begin with."""
        self._lib.mc_set_loading(int(value))

    def add_table(self, table: dispatch.Table, major: int, minor: int) -> None:
        """Registers a table for devices of exactly this compute capability, replacing an older
        one."""
        with _lock:
            self._lib.mc_table_begin(table.arch.encode(), major, minor)
            for kernel in table.kernels:
                file = str((table.folder / kernel.file).resolve())
                texts = (text.encode() for text in (kernel.name, file, kernel.sha256))
                self._check(self._lib.mc_table_variant(*texts, _int32(kernel.fields())))
            for row in table.rows:
                ranges = [*row.m, *row.n, *row.k, row.sms or 0]
                self._check(self._lib.mc_table_row(_int32(ranges), _int32(row.kernels)))
            self._check(self._lib.mc_table_batch_invariant(_int32(table.batch_invariant())))
            self._check(self._lib.mc_table_commit())

    def select(
        self,
        capability: tuple[int, int],
        shape: Sequence[int],
        dtype: str,
        zeros: bool,
        sms: int,
        variant: int = ops.AUTO,
        sparse: bool = False,
    ) -> int:
        """Index of the kernel for shape (m, n, k, stored group size); RuntimeError if none."""
        values = [*shape, dispatch.DTYPES.index(dtype), int(zeros), int(sparse)]
        numbers = (ctypes.c_int64 * len(values))(*values)
        return self._check(self._lib.mc_select(*capability, numbers, sms, ctypes.c_int64(variant)))

    def schedule(
        self, kernel: dispatch.Kernel, m: int, n: int, k: int, sms: int
    ) -> dispatch.Schedule:
        """Launch-time numbers as the launcher computes them."""
        out = (ctypes.c_int64 * len(dispatch.Schedule.__dataclass_fields__))()
        sizes = (ctypes.c_int64(value) for value in (m, n, k, sms))
        self._check(self._lib.mc_schedule(_int32(kernel.fields()), *sizes, out))
        return dispatch.Schedule(*out)

    def launch(self, pointers: Sequence[int], numbers: Sequence[int]) -> None:
        """One launch from addresses, without checks: see mc_launch in csrc/c_api.cpp."""
        addresses = (ctypes.c_void_p * len(pointers))(*(pointer or None for pointer in pointers))
        values = (ctypes.c_int64 * len(numbers))(*numbers)
        self._check(self._lib.mc_launch(addresses, values))

    def sha256(self, data: bytes) -> str:
        """Digest as the launcher computes it."""
        out = ctypes.create_string_buffer(65)
        self._lib.mc_sha256(data, ctypes.c_size_t(len(data)), out)
        return out.value.decode()


def _int32(values: Sequence[int]) -> ctypes.Array:
    return (ctypes.c_int32 * len(values))(*values)


# ---- compiling -----------------------------------------------------------------------------------


def source_folder() -> Path:
    """The C++ sources."""
    return PACKAGE / "csrc"


def include_folders() -> list[Path]:
    """Folders with headers; params.h and sparse_layout.h are shared with the kernels, or copies of
    them are in the package."""
    shared = PACKAGE.parent / "templates" / "include"
    return [source_folder(), *([shared] if shared.is_dir() else [])]


def source_hash(defines: Sequence[str] = ()) -> str:
    """Identifies everything that decides what the library does."""
    digest = hashlib.sha256("\0".join((*FLAGS, *defines, platform.machine())).encode())
    files = [*source_folder().glob("*.cpp"), *source_folder().glob("*.h")]
    shared = ("params.h", "sparse_layout.h")
    files += [folder / "marlin_cutlass" / name for folder in include_folders() for name in shared]
    for path in sorted(files, key=lambda file: file.name):  # the same in an installed package
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def compiler() -> list[str]:
    """The C++ compiler: $CXX, else g++, else c++ or clang++. Raises LibraryError if there is
    none."""
    given = os.environ.get("CXX")
    if given:
        return shlex.split(given)
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise LibraryError("no C++ compiler: install g++ or set CXX, then run the call again")


def library_folders() -> list[Path]:
    """Where a compiled library may lie: beside the kernels, or in the user's cache."""
    roots = dict.fromkeys([*dispatch.build_roots(), *dispatch.default_roots()])
    return [*(root / "runtime" for root in roots), *settings.cache_folders()]


def find_library() -> Path | None:
    """A compiled library of these sources, if there is one."""
    name = f"libmarlin_cutlass_{source_hash()}.so"
    return next((path / name for path in library_folders() if (path / name).is_file()), None)


def build(defines: Sequence[str] = (), folder: Path | None = None) -> Path:
    """Compiles the library unless it exists; returns its path.

    Raises LibraryError with the last lines of the compiler, or with the folders that cannot be
    written.
    """
    name = f"libmarlin_cutlass_{source_hash(defines)}.so"
    known = None if folder else find_library() if not defines else None
    if known is not None:
        return known
    target = (folder or _writable_folder()) / name
    if not target.is_file():
        _compile(target, defines)
    return target


def _writable_folder() -> Path:
    tried = []
    for folder in library_folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            tried.append(f"{folder} ({error.strerror or error})")
    raise LibraryError(
        "no folder for the launcher library can be written: "
        + ", ".join(tried)
        + "; set MARLIN_CUTLASS_BUILD to a folder that can"
    )


def compile_command(target: Path, defines: Sequence[str] = ()) -> list[str]:
    """The compiler's command line."""
    torch_folder = Path(torch.__file__).parent
    return [
        *compiler(),
        *FLAGS,
        *(f"-D{define}" for define in defines),
        *(f"-I{folder}" for folder in include_folders()),
        "-isystem",
        str(torch_folder / "include"),
        *(str(source_folder() / f"{name}.cpp") for name in SOURCES),
        f"-L{torch_folder / 'lib'}",
        "-ltorch_cpu",
        "-ldl",
        "-o",
        str(target),
    ]


def _compile(target: Path, defines: Sequence[str]) -> None:
    """Builds aside and renames, so that several processes may do it at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
    command = compile_command(aside, defines)
    try:
        run = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise LibraryError(f"cannot run the C++ compiler {command[0]}: {error}") from error
    if run.returncode:
        aside.unlink(missing_ok=True)
        output = "\n".join((run.stdout + run.stderr).splitlines()[-ERROR_LINES:])
        raise LibraryError(
            f"compiling the launcher library failed ({run.returncode}); last lines:\n{output}\n"
            f"command: {shlex.join(command)}"
        )
    aside.replace(target)


# ---- loading -------------------------------------------------------------------------------------


def load() -> Launcher:
    """The launcher, compiled if needed, its operators registered and the tables of all visible
    devices known.

    Raises LibraryError with the original error if it cannot be compiled or loaded; a later call
    tries again.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            _check_torch()
            launcher = _open(build())
            try:
                configure(launcher)
            finally:
                launcher.set_loading(False)
            _loaded = launcher
        return _loaded


def _check_torch() -> None:
    if torch.version.hip is not None:
        raise LibraryError("this torch is built for ROCm: the kernels need an NVIDIA GPU")
    if not torch.cuda.is_available():
        raise LibraryError(f"no CUDA device is available to torch {torch.__version__}")


def _open(path: Path) -> Launcher:
    try:
        launcher = Launcher(path)
    except OSError as error:
        raise LibraryError(f"the launcher library {path} does not load: {error}") from error
    if not torch._C._dispatch_has_kernel_for_dispatch_key("marlin_cutlass::gemm", "CUDA"):
        raise LibraryError(f"the launcher library {path} did not register its operators")
    return launcher


def configure(launcher: Launcher) -> None:
    """Passes the settings and the tables of all visible devices to the launcher."""
    launcher.set_option("pdl", settings.switch("MARLIN_CUTLASS_PDL", True))
    launcher.set_option("debug", settings.switch("MARLIN_CUTLASS_DEBUG", False))
    reload_tables(launcher)


def reload_tables(launcher: Launcher | None = None) -> None:
    """Reads the tables again, for kernels that were built after the first call."""
    launcher = launcher or load()
    table_for_capability.cache_clear()
    forced_index.cache_clear()
    launcher.set_loading(True)
    try:
        launcher.clear_tables()
        launcher.set_built_archs(list(dispatch.built_archs()))
        devices = range(torch.cuda.device_count())
        for capability in sorted({torch.cuda.get_device_capability(i) for i in devices}):
            try:
                table = table_for_capability(*capability)
            except UnsupportedArchError:
                continue  # said at the call, if that device is used
            launcher.add_table(table, *capability)
    finally:
        launcher.set_loading(False)


@functools.cache
def table_for_capability(major: int, minor: int) -> dispatch.Table:
    """The table of a device, with what was compiled on demand; UnsupportedArchError if none is
    built, TableError if it is damaged."""
    table = dispatch.current_table(dispatch.built_archs()[dispatch.arch_for(major, minor)])
    return table.with_kernels(_on_demand.get((major, minor), {}).values())


def add_kernels(kernels: Iterable[dispatch.Kernel], capability: tuple[int, int]) -> None:
    """Makes kernels outside the build folder known to this process, behind those of the table.

    Indices given out before stay valid. Only calls that name such a kernel use it.
    """
    with _lock:
        _on_demand.setdefault(capability, {}).update({k.name: k for k in kernels})
        table_for_capability.cache_clear()
        forced_index.cache_clear()
        if _loaded is not None:
            _loaded.add_table(table_for_capability(*capability), *capability)


def require_device(device: torch.device | str | int) -> str:
    """Name of the table that serves a CUDA device.

    Raises UnsupportedArchError saying which architectures are built and how to build the device's.
    """
    return dispatch.arch_for(*torch.cuda.get_device_capability(device))


def forced_kernel(name: str, batch_invariant: bool, a: Tensor, w: PackedWeight) -> int:
    """Index of the kernel `name` for the operators; raises ValueError where it cannot serve the
    call."""
    if a.device.type != "cuda":
        raise ValueError(f"kernel={name!r} is a CUDA kernel and a is on {a.device}")
    if a.dtype not in KEYS_DTYPE:
        return ops.AUTO  # the operator refuses the dtype with its own message
    capability = torch.cuda.get_device_capability(a.device)
    form = (KEYS_DTYPE[a.dtype], w.has_zeros, w.group_size)
    index = forced_index(name, capability, *form, w.sparse)
    if batch_invariant and not dispatch.is_invariant(
        table_for_capability(*capability).kernels[index]
    ):
        raise ValueError(f"kernel={name!r} is not batch-invariant: its sums depend on M")
    return index


@functools.lru_cache(maxsize=4096)
def forced_index(
    name: str,
    capability: tuple[int, int],
    dtype: str,
    zeros: bool,
    group_size: int,
    sparse: bool = False,
) -> int:
    """Index of a kernel by name or geometry in the table of a capability.

    One that is not built is compiled on demand (see jit). Raises ValueError where there can be
    none.
    """
    from . import jit

    form = (dtype, zeros, group_size)
    with _lock:
        kernel = jit.complete(name, table_for_capability(*capability), form)
        if kernel is not None:
            add_kernels([kernel], capability)
        return table_for_capability(*capability).find(name, *form, sparse)


def main(arguments: Sequence[str]) -> int:
    """`build` compiles the launcher library and prints its path."""
    if list(arguments) != ["build"]:
        print("usage: python -m marlin_cutlass.library build", file=sys.stderr)
        return 2
    try:
        print(build())
    except LibraryError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
