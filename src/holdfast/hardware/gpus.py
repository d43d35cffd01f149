"""Known GPUs, looked up by the names people and drivers give them. Owns `gpus.toml`; no torch, no NVML.

It says what a GPU of that name has. What this machine has, and how much of it is free, is measured elsewhere.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigurationError
from holdfast.units import GIB, MIB, shorten

UNKNOWN_GPU, WRONG_COUNT = "HF140", "HF141"
COUNT_LIMIT = 1024
_NAMES_SHOWN = 5
_NAME_LIMIT_CHARS = 200

# Words that a maker or a driver puts around the name that tells one GPU from another.
_NOISE = frozenset({"nvidia", "geforce", "tesla", "amd", "radeon", "instinct", "intel", "apple", "arc", "r", "tm"})
_NOISE |= {"graphics", "gpu", "generation", "gb", "gib"}
_WORD = re.compile(r"[a-z0-9]+")
_SIZE = re.compile(r"(\d+)gi?b")
_COUNT_LAST = re.compile(r"(.+?)[\s_-]*[x×*]\s*(\d{1,9})")
_SIZED = re.compile(r"(.+)-(\d+)")
_MIG = re.compile(r"\b\d+g\.(\d+)gb", re.IGNORECASE)
_MIG_SHARE = 0.95
"""Of what a slice's name says, so much is there at most."""
_BARE = re.compile(r"[rg]tx(\d{4}.*)")
_USUAL_SIZES = {"a100": "a100-80"}
"""What is meant by a name without a size, where it is not the smallest that is sold."""
_COUNT_FIRST = re.compile(r"(\d{1,9})\s*[x×*][\s_-]*(.+)")


@dataclass(frozen=True, slots=True)
class Link:
    name: str
    gb_s: float
    """Decimal GB/s in one direction, as stated by the maker; measured copies reach about 85% of it."""


_LANE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""Of one PCIe lane in one direction, by generation."""


def pcie_link(generation: int, lanes: int) -> Link | None:
    """None: no such link is known."""
    lane = _LANE_GB_S.get(generation)
    return None if lane is None or lanes < 1 else Link(f"PCIe {generation}.0 x{lanes}", round(lane * lanes, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    key: str
    """What `--gpu` takes, shortest form: rtx4090, h100-80."""
    name: str
    """As the driver prints it."""
    aliases: tuple[str, ...]
    vendor: str
    """nvidia, amd, intel or apple."""
    memory_bytes: int
    """What the maker sells."""
    usable_bytes: int
    """What the driver reports as total, or what the system lets a GPU take of a unified memory."""
    usable_estimated: bool
    """No report of the driver's figure is known: it was derived from cards like it."""
    bandwidth_gb_s: float
    half_tflops: float
    """Dense fp16/bf16 with fp32 accumulation."""
    fp8_tflops: float | None
    """None: no fp8 units."""
    compute_estimated: bool
    compute_capability: tuple[int, int] | None
    """NVIDIA's; None for others."""
    bf16: bool
    host_link: Link
    peer_link: Link | None
    """Between GPUs of one machine, where there is more than the host link."""
    unified: bool
    """Allocates from the machine's RAM: the budget is what the whole system has free."""
    source: str
    common: bool = False
    """Easily rented or bought, and so suggested first."""

    @property
    def fp8(self) -> bool:
        return self.fp8_tflops is not None

    @property
    def alone(self) -> bool:
        """The only one of its machine: it has the machine's RAM, and no link to others of its kind."""
        return self.unified and self.peer_link is None

    @property
    def of_laptop(self) -> bool:
        """There is no place for a second one."""
        return self.key.endswith("-laptop")


@dataclass(frozen=True, slots=True)
class Gpus:
    """Some equal GPUs in one machine: `h100-80x2`."""

    gpu: Gpu
    count: int


def entries() -> tuple[Gpu, ...]:
    return _catalogue()[0]


def find(name: str) -> Gpu:
    """The GPU of that name or alias, however spaced, cased or prefixed. Unknown: refused, with the nearest names."""
    found = lookup(name)
    if found is None:
        raise _unknown(name)
    return found


def find_group(text: str) -> Gpus:
    """A name with an optional number of GPUs: `rtx4090`, `h100-80x2`, `2x h100-80`."""
    whole = lookup(text)
    if whole is not None:
        return Gpus(whole, 1)
    stripped = text.strip()
    last, first = _COUNT_LAST.fullmatch(stripped), _COUNT_FIRST.fullmatch(stripped)
    for name, count in ((last[1], last[2]) if last else ("", ""), (first[2], first[1]) if first else ("", "")):
        found = lookup(name) if name else None
        if found is not None:
            return Gpus(found, _checked_count(int(count), text))
    # The x of rtx stands before a number too.
    raise _unknown(last[1] if last is not None and any(map(str.isdigit, last[1])) else text)


def _checked_count(count: int, text: str) -> int:
    if not 1 <= count <= COUNT_LIMIT:
        raise ConfigurationError(
            f"{shorten(text)}: {count} is not a number of GPUs",
            code=WRONG_COUNT,
            needed=f"1 to {COUNT_LIMIT:,}",
            found=str(count),
            fix="--gpu h100-80x2",
            field="gpu",
        )
    return count


def lookup(name: str) -> Gpu | None:
    """The same without the refusal: None when no GPU of that name is known."""
    return _catalogue()[1].get(_normal(name))


def _normal(name: str) -> str:
    """One spelling for all: `NVIDIA GeForce RTX 4090`, `RTX-4090` and `rtx4090` are the same card, 80GB is 80."""
    words = _WORD.findall(name.casefold()[:_NAME_LIMIT_CHARS])
    return _SIZE.sub(r"\1", "".join(word for word in words if word not in _NOISE))


@cache
def _known_families() -> dict[str, tuple[Gpu, ...]]:
    return _families(entries())


def other_sizes(text: str) -> tuple[str, ...]:
    """Keys that a name without a size could have meant too: none where it names one product."""
    stripped = text.strip()
    last, first = _COUNT_LAST.fullmatch(stripped), _COUNT_FIRST.fullmatch(stripped)
    names = (stripped, last[1] if last else "", first[2] if first else "")
    families = _known_families()
    family = next((families[_normal(name)] for name in names if _normal(name) in families), ())
    return tuple(gpu.key for gpu in family[1:])


def _unknown(name: str) -> ConfigurationError:
    gpus, by_name = _catalogue()
    nearest, shown = _nearest(_normal(name), by_name), shorten(name)
    slice_ = _MIG.search(name)
    fix = f"--gpu {nearest[0]}, or its memory: --vram 24GiB" if nearest else "give its memory instead: --vram 24GiB"
    if slice_ is not None:
        fix = f"a MIG slice is planned by its memory: --vram {_MIG_SHARE * int(slice_[1]):g}GiB"
    return ConfigurationError(
        f"no GPU named {shown} is known",
        code=UNKNOWN_GPU,
        needed=("a known GPU, the nearest: " + ", ".join(nearest)) if nearest else f"one of {len(gpus)} known GPUs",
        found=shown,
        fix=f"{fix}; holdfast plan --list-gpus lists them",
        field="gpu",
    )


def _nearest(wanted: str, by_name: Mapping[str, Gpu]) -> list[str]:
    """Keys: of names that end or begin with what was written first, then of those that look alike."""
    close = difflib.get_close_matches(wanted, by_name, n=3 * _NAMES_SHOWN, cutoff=0.5)
    if len(wanted) > 2:
        close = [
            *sorted((name for name in by_name if name.endswith(wanted)), key=len),
            *sorted((name for name in by_name if name.startswith(wanted)), key=len),
            *close,
        ]
    return list(dict.fromkeys(by_name[match].key for match in close))[:_NAMES_SHOWN]


@cache
def _catalogue() -> tuple[tuple[Gpu, ...], dict[str, Gpu]]:
    data = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
    links = {key: Link(*row) for key, row in data["links"].items()}
    gpus = tuple(
        gpu
        for family in data["families"].values()
        for key, row in family["gpus"].items()
        for gpu in _entries_of(key, {**family, **row}, links)
    )
    common = {key for keys in data["common"].values() for key in keys}
    unknown = common - {gpu.key for gpu in gpus}
    if unknown:
        raise ValueError(f"gpus.toml: common, and not known: {', '.join(sorted(unknown))}")
    gpus = tuple(replace(gpu, common=gpu.key in common) for gpu in gpus)
    return gpus, _names(gpus)


def _names(gpus: tuple[Gpu, ...]) -> dict[str, Gpu]:
    names: dict[str, Gpu] = {}
    for gpu in gpus:
        for name in (gpu.key, gpu.name, *gpu.aliases):
            other = names.setdefault(_normal(name), gpu)
            if other is not gpu:
                raise ValueError(f"gpus.toml: {name!r} names both {other.key} and {gpu.key}")
    known = {**{name: family[0] for name, family in _families(gpus).items()}, **names}
    # People say 4090 and 3060 Ti; where two cards share a number, it names none.
    short: dict[str, list[Gpu]] = {}
    for name, gpu in known.items():
        if (bare := _BARE.fullmatch(name)) is not None:
            short.setdefault(bare[1], []).append(gpu)
    return {**{name: found[0] for name, found in short.items() if len(set(found)) == 1}, **known}


@cache
def _families(gpus: tuple[Gpu, ...]) -> dict[str, tuple[Gpu, ...]]:
    """Products that are sold with several sizes, by their name without one: the usual size first, then the others."""
    found: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        sized = _SIZED.fullmatch(gpu.key)
        if sized is not None and int(sized[2]) * GIB == gpu.memory_bytes:
            found.setdefault(sized[1], []).append(gpu)
    return {
        _normal(stem): tuple(sorted(sizes, key=lambda gpu: (gpu.key != _USUAL_SIZES.get(stem), gpu.memory_bytes)))
        for stem, sizes in found.items()
    }


def _entries_of(key: str, row: Mapping[str, Any], links: Mapping[str, Link]) -> Iterator[Gpu]:
    if "sizes" not in row:
        yield _entry(key, row["name"], row["memory_gib"], row["usable_mib"], row, links)
        return
    for size, usable_mib in row["sizes"].items():
        yield _entry(f"{key}-{size}", f"{row['name']} {size}GB", int(size), usable_mib, row, links)


def _entry(
    key: str, name: str, memory_gib: int, usable_mib: int, row: Mapping[str, Any], links: Mapping[str, Link]
) -> Gpu:
    capability = row.get("compute_capability")
    major, _, minor = capability.partition(".") if capability is not None else ("", "", "")
    return Gpu(
        key=key,
        name=name,
        aliases=tuple(row.get("aliases", ())),
        vendor=row["vendor"],
        memory_bytes=memory_gib * GIB,
        usable_bytes=usable_mib * MIB,
        usable_estimated=row.get("usable_estimated", False),
        bandwidth_gb_s=row["bandwidth_gb_s"],
        half_tflops=row["half_tflops"],
        fp8_tflops=row.get("fp8_tflops"),
        compute_estimated=row.get("compute_estimated", False),
        compute_capability=(int(major), int(minor)) if capability is not None else None,
        bf16=row.get("bf16", False),
        host_link=links[row["host_link"]],
        peer_link=links[row["peer_link"]] if "peer_link" in row else None,
        unified=row.get("unified", False),
        source=row["source"],
    )
