"""`vocabshard doctor`: what is built, which backend serves which input and why not the others, and whether this machine
gives the contract's bytes."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator
from functools import partial

import torch

import vocabshard
from vocabshard import kernels, strict
from vocabshard.command.errors import first_line
from vocabshard.contract import CONTRACT_ID, ContractError
from vocabshard.kernels.backends import LINEAR, LOGITS

EXIT_BROKEN = 1
LIBRARIES = ("torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "tqdm", "matplotlib")


def doctor(every: bool = False) -> int:
    """Prints the report, a part at a time; 0 when the contract holds on this machine, 1 when it does not.

    `every` golden is checked, or some of those that "auto" would be held to, and the report says how many were not.
    """
    broken: list[str] = []
    for part in (built, choices, partial(goldens, every=every)):
        for line in part(broken):
            print(line, flush=True)
        print()
    if broken:
        print(f"The contract {CONTRACT_ID} does NOT hold here:")
        print("\n".join(f"  {reason}" for reason in broken))
        return EXIT_BROKEN
    print(f"The contract {CONTRACT_ID} holds here.")
    return 0


def built(broken: list[str]) -> Iterator[str]:
    """The package, its extension, what it runs with; an extension that is missing or of other constants is broken."""
    yield f"vocabshard {vocabshard.__version__}, contract {CONTRACT_ID}"
    try:
        from vocabshard import _C
    except ImportError as error:
        broken.append(f"vocabshard._C cannot be imported ({first_line(error)}): build it, pip install .")
        yield "  extension    none"
    else:
        info = _C.build_info()
        cuda = "with CUDA (sm90)" if info["cuda"] else "without CUDA"
        yield f"  extension    {info['build']}, {info['compiler']}, {cuda}"
        yield (
            f"  processor    {platform.machine()}: {info['cpu_chosen']} of {', '.join(info['cpu_usable'])} "
            f"(built: {', '.join(info['cpu_compiled'])})"
        )
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        major, minor = torch.cuda.get_device_capability(index)
        yield f"  cuda:{index}       {torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
    yield f"  python       {platform.python_version()}, {platform.system()}"
    versions = {name: _version(name) for name in LIBRARIES}
    yield f"  with         {', '.join(f'{name} {found}' for name, found in versions.items() if found)}"
    if missing := [name for name, found in versions.items() if not found]:
        yield f"  without      {', '.join(missing)}"


def choices(broken: list[str]) -> Iterator[str]:
    """What backend="auto" takes for each kind of input here, and why each other backend does not serve it."""
    yield 'Which backend serves what (backend="auto"), and why not the others'
    for device in _devices():
        for given_logits in (False, True):
            found: dict[kernels.Choice, list[str]] = {}
            for dtype, name in strict.DTYPE_NAMES.items():
                found.setdefault(kernels.select_backend("auto", device, dtype, given_logits), []).append(name)
            for choice, names in found.items():
                yield from _row(
                    broken, f"{device.type}, {LOGITS if given_logits else LINEAR}, {', '.join(names)}", choice
                )


def goldens(broken: list[str], every: bool = False) -> Iterator[str]:
    """Recorded digests against what the kernels of this machine give."""
    from vocabshard.testing.goldens import verdicts

    yield "Goldens"
    try:
        found = verdicts(every)
        for verdict in found:
            yield f"  {verdict.line}"
            if verdict.wrong:
                broken.append(f"goldens: {verdict.line}")
        if any(verdict.left for verdict in found):
            yield "  vocabshard doctor --all checks those too"
    except (ImportError, RuntimeError) as error:  # no extension, or kernels that do not run
        broken.append(f"goldens: {type(error).__name__}: {first_line(error)}")
        yield f"  none: {first_line(error)}"


def _row(broken: list[str], site: str, choice: kernels.Choice) -> Iterator[str]:
    try:
        strict.check_machine(choice)
        verdict = "bears the contract"
    except ImportError as error:
        verdict = f"does not run: {first_line(error)}"
    except ContractError as error:
        verdict = f"does not bear the contract: {choice.reason or first_line(error)}"
        if choice.contract_bearing:  # it would, were it not for this machine's constants or environment
            broken.append(f"{site}: {first_line(error)}")
    yield f"  {site}: {choice.backend}, projection {choice.projection}, {verdict}"
    for backend, reason in choice.rejected:
        yield f"    {backend:<8} {reason}"


def _devices() -> list[torch.device]:
    return [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]


def _version(name: str) -> str:
    if name == "torch":
        return torch.__version__  # with what it was built for
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
