"""The build hook of hatchling: a wheel carries the units of `csrc/cpu` compiled.

Each `csrc/cpu/NAME.cpp` is compiled once for every instruction set, into NAME.SET.so; which of them
is loaded depends on the CPU at run time (`plantune/kernels/cpu/cxx.py`). They leave OpenMP's
functions undefined: torch has them in the process already, and a second OpenMP would add threads of
its own.
An editable install carries nothing: it compiles on its machine.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WITHOUT = "PLANTUNE_WITHOUT_KERNELS"
COMPILE = (
    *("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-fno-exceptions"),
    *("-Wall", "-Werror", "-Wno-psabi", "-c"),
)
# Nothing of C++'s own library is used, and its version would bind the wheel to newer systems.
LINK = ("-shared", "-nodefaultlibs", "-lc", "-Wl,--as-needed", "-s")
# Named as torch calls them; each asks for what torch looks for. `any` runs on every CPU.
AVX2 = ("-mavx2", "-mfma")
AVX512 = (*AVX2, *(f"-mavx512{part}" for part in ("f", "vl", "bw", "dq")))
INSTRUCTION_SETS = {
    "x86_64": {"any": (), "avx2": AVX2, "avx512": AVX512},
    "aarch64": {"any": ()},
}
# The oldest glibc for which a tag is known.
OLDEST_GLIBC = (2, 17)


class CarriedKernels(BuildHookInterface[Any]):
    """Compiles before the wheel is packed, and gives the wheel its platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling; `version` is "standard" or "editable"."""
        if version == "editable" or os.environ.get(WITHOUT):
            return
        root, machine = Path(self.root), platform.machine()
        compiler = shutil.which(os.environ.get("CXX", "g++"))
        if compiler is None or sys.platform != "linux" or machine not in INSTRUCTION_SETS:
            what = "there is no g++ (apt install g++, or set CXX)"
            if compiler is not None:
                what = f"they are not made for {sys.platform} on {machine}"
            self._go_without(what, is_sdist=(root / "PKG-INFO").is_file())
            return
        self._folder = Path(tempfile.mkdtemp(prefix="plantune-kernels-"))
        built = compiled_units(root / "csrc", compiler, machine, self._folder)
        for library in built:
            build_data["force_include"][str(library)] = f"plantune/_data/compiled/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(built, machine)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called by hatchling when the wheel is packed."""
        if hasattr(self, "_folder"):
            shutil.rmtree(self._folder)

    def _go_without(self, reason: str, *, is_sdist: bool) -> None:
        """From an sdist a wheel is for the machine that makes it; any other may be a release."""
        told = f"the wheel would carry no compiled kernels: {reason}"
        if not is_sdist:
            sys.exit(f"plantune: {told}; {WITHOUT}=1 builds it without them")
        self.app.display_warning(f"plantune: {told}; they are compiled where a compiler is found")


def compiled_units(csrc: Path, compiler: str, machine: str, folder: Path) -> list[Path]:
    """Every unit for every instruction set of a machine, in `folder`."""
    built = []
    for unit in sorted((csrc / "cpu").glob("*.cpp")):
        for name, options in INSTRUCTION_SETS[machine].items():
            middle, library = folder / "unit.o", folder / f"{unit.stem}.{name}.so"
            compile_it = [compiler, *COMPILE, *options, f"-I{csrc}", unit, "-o", middle]
            subprocess.run(compile_it, check=True)
            subprocess.run([compiler, middle, *LINK, "-o", library], check=True)
            middle.unlink()
            built.append(library)
    return built


def platform_tag(libraries: list[Path], machine: str) -> str:
    """The manylinux tag of the newest glibc that the libraries ask for."""
    named = (re.findall(rb"\bGLIBC_(\d+)\.(\d+)", path.read_bytes()) for path in libraries)
    found = [tuple(map(int, version)) for versions in named for version in versions]
    return "manylinux_{}_{}_{}".format(*max([OLDEST_GLIBC, *found]), machine)
