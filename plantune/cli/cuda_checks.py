"""What `plantune doctor` looks at for GPUs, each check with what is missing; the CPU needs none."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from plantune.cli.checks import LIMITED, OK, TORCH_HOW, Check, package_check
from plantune.devices.cuda.nvml import driver_release
from plantune.report.tables import bytes_text
from plantune.space.arch import ARCH_NAMES, Version

# The arch to compile for without a GPU and without --arch: it has the most families.
OTHERWISE = "sm90"
SAMPLES_AT_ONCE = 4
# Said once, in its own line, with how to install it.
NVRTC_HOW = "NVRTC, see above"


def cuda_checks(asked: str) -> Iterator[Check]:
    """Every check; kernels are compiled for the GPUs here, or for the arch that is asked for."""
    yield _driver()
    yield _gpus()
    yield _nvrtc()
    yield _cutlass()
    yield _kernels()
    for arch in _archs(asked):
        yield families_check(arch)
    yield package_check("nvidia-cudnn-frontend", "pip install 'plantune[cudnn]'")


def _driver() -> Check:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        how = "install NVIDIA's driver, if this machine has such a GPU"
        return Check("CUDA driver", LIMITED, "absent: libcuda.so.1 does not load", how)
    number = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(number))
    known = number.value // 1000, number.value % 1000 // 10
    return judged_driver(known, _cuda_of_torch(), driver_release())


def judged_driver(known: Version, wanted: Version | None, release: str | None = None) -> Check:
    """Whether a driver that knows one CUDA release runs a torch that was built for another."""
    text = " ".join(filter(None, (release, "for CUDA {}.{}".format(*known))))
    if wanted is not None and known[0] < wanted[0]:
        needs = "{}.{}".format(*wanted)
        how = f"install a newer driver, or a torch for CUDA {known[0]}"
        return Check("CUDA driver", LIMITED, f"{text}, too old: this torch needs {needs}", how)
    return Check("CUDA driver", OK, text)


def _cuda_of_torch() -> Version | None:
    """The CUDA release of torch, None of one for CPUs only."""
    try:
        import torch
    except (ImportError, OSError):
        return None
    major, _, minor = (torch.version.cuda or "").partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _gpus() -> Check:
    try:
        from plantune.devices.gpus import gpus_here

        found = gpus_here()
    except (ImportError, OSError, RuntimeError) as error:
        return Check("CUDA GPU", LIMITED, f"cannot be asked: {error}", TORCH_HOW)
    if not found:
        how = "a GPU, its driver and a CUDA wheel of torch; the CPU needs none of them"
        return Check("CUDA GPU", LIMITED, "absent: torch sees none", how)
    text = ", ".join(f"{gpu}, {bytes_text(gpu.memory_bytes)}" for gpu in found)
    unknown = [str(gpu) for gpu in found if gpu.arch not in ARCH_NAMES]
    if unknown:
        how = f"plantune knows {', '.join(ARCH_NAMES)}; the others run through the framework"
        return Check("CUDA GPU", LIMITED, text, how)
    return Check("CUDA GPU", OK, text)


def _nvrtc() -> Check:
    from plantune.devices.cuda.toolchain import all_nvrtc, how_to_install

    found = list(dict.fromkeys(nvrtc.version for nvrtc in all_nvrtc()))
    if not found:
        detail = "absent: no libnvrtc with CUDA's headers was found"
        return Check("NVRTC", LIMITED, detail, how_to_install())
    text, wanted = ", ".join(map("{0[0]}.{0[1]}".format, found)), _cuda_of_torch()
    if wanted is not None and wanted[0] not in (version[0] for version in found):
        needs = f"this torch is for CUDA {wanted[0]}.{wanted[1]}"
        detail = f"{text}, which does not match: {needs}"
        return Check("NVRTC", LIMITED, detail, how_to_install())
    return Check("NVRTC", OK, text)


def _cutlass() -> Check:
    from plantune.devices.cuda.toolchain import cutlass_include, cutlass_version

    place = cutlass_include()
    if place is None:
        how = "pip install nvidia-cutlass; the families that are made of it are left out"
        return Check("CUTLASS", LIMITED, "absent: its headers were not found", how)
    return Check("CUTLASS", OK, f"{cutlass_version()} in {place}")


def _kernels() -> Check:
    """For which GPUs a probe compiles here, and why not for the others."""
    from plantune.devices.cuda.choice import nvrtc_for
    from plantune.devices.cuda.toolchain import all_nvrtc
    from plantune.errors import BuildError
    from plantune.space.arch import load_arch

    built, reasons = [], {}
    for name in ARCH_NAMES[1:]:
        try:
            nvrtc_for(load_arch(name))
            built.append(name)
        except BuildError as error:
            reasons[name] = error.what
    how = "; ".join(dict.fromkeys(reasons.values())) if all_nvrtc() else NVRTC_HOW
    if not built:
        return Check("CUDA kernels", LIMITED, "can be compiled for no GPU", how)
    text = f"can be compiled for {', '.join(built)}"
    return Check("CUDA kernels", LIMITED if reasons else OK, text, how)


def _archs(asked: str) -> tuple[str, ...]:
    """For which kernels are compiled: the one that is asked for, else those of the GPUs here."""
    if asked != "cpu":
        return (asked,)
    try:
        from plantune.devices.gpus import gpus_here

        here = dict.fromkeys(gpu.arch for gpu in gpus_here() if gpu.arch in ARCH_NAMES)
    except (ImportError, OSError, RuntimeError):
        return ()
    return tuple(here) or (OTHERWISE,)


def families_check(arch_name: str) -> Check:
    """Compiles a kernel of each family of an arch; from the cache the next time."""
    from plantune.devices.cuda.choice import nvrtc_for
    from plantune.devices.cuda.toolchain import all_nvrtc
    from plantune.errors import BuildError
    from plantune.kernels.build import build
    from plantune.kernels.registry import resolve
    from plantune.measure.kernel_samples import samples
    from plantune.space.search_space import load_search_space

    name, space = f"kernels for {arch_name}", load_search_space(arch_name)
    try:
        nvrtc_for(space.arch)
    except BuildError as error:
        return Check(name, LIMITED, "none compiles", error.what if all_nvrtc() else NVRTC_HOW)
    tried, failed = list(samples(space)), {}
    with ThreadPoolExecutor(SAMPLES_AT_ONCE) as threads:
        jobs = {c.family: threads.submit(build, resolve(step, c), space.arch) for step, c in tried}
    for family, job in jobs.items():
        try:
            job.result()
        except BuildError as error:
            failed[family] = str(error)
    if not failed:
        return Check(name, OK, f"one of each of {len(tried)} families compiles")
    detail = f"{', '.join(failed)} of {len(tried)} families do not compile; they are left out"
    return Check(name, LIMITED, detail, "; ".join(failed.values()))
