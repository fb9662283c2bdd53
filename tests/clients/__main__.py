"""``python -m tests.clients --count 10000``: generate models, take them to integers, and say what became of them."""

from __future__ import annotations

import argparse
import collections
import re
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from horizon_plugin_pytorch.march import March, set_march
from tests.clients.journey import outcome
from tests.clients.model import write

_FOLDER = Path(tempfile.gettempdir())


def _start() -> None:
    torch.set_num_threads(1)
    set_march(March.NASH_M)


def _outcome(seed: int) -> tuple[int, str, str, str]:
    return seed, *outcome(seed, _FOLDER)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--show", type=int, help="print the source and the traceback of this seed")
    options = parser.parse_args()
    if options.show is not None:
        _start()
        print(write(options.show).text, *outcome(options.show, _FOLDER), sep="\n")
        return 0
    counts: collections.Counter[str] = collections.Counter()
    classes: dict[tuple[str, str], list[int]] = {}
    seeds = range(options.first, options.first + options.count)
    with ProcessPoolExecutor(options.jobs, initializer=_start) as pool:
        for seed, kind, text, _ in pool.map(_outcome, seeds, chunksize=8):
            counts[kind] += 1
            if kind != "ok":
                alike = re.sub(r"[\d.]+(e-?\d+)?|`[^`]*`|'[^']*'", "_", text)[:110]
                seen = classes.setdefault((kind, alike), [])
                seen.append(seed)
                if len(seen) <= 2:
                    print(f"{kind} {seed}: {text[:300]}", flush=True)
    print(
        *(
            f"{len(v)} {k[0]}, such as seeds {v[:5]}: {k[1]}"
            for k, v in sorted(classes.items(), key=lambda i: -len(i[1]))
        ),
        sep="\n",
    )
    print(dict(counts))
    return counts["bad"] > 0


if __name__ == "__main__":
    raise SystemExit(main())
