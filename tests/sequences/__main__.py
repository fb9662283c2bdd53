"""``python -m tests.sequences``: pairs of operators and the usual triples, at every optimisation level.

One pair for each way in which an operator ends in a file and each way in which another begins; with ``--all`` every
ordered pair of rows of the operator table.
"""

from __future__ import annotations

import argparse
import collections
import re
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from tqdm import tqdm

from horizon_plugin_pytorch.march import March, set_march
from tests.sequences.comparison import Outcome, outcome
from tests.sequences.forms import covering
from tests.sequences.parts import Key, Pair, pair_at, pair_of, row_pairs
from tests.sequences.usual import USUAL

_AT_ONCE = 12  # ONNX Runtime takes longer than twice as long for twice as many
Job = tuple[str, Sequence[tuple[str, str]] | Sequence[str] | Sequence[Key]]


def _start() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    set_march(March.BAYES)


def _outcome(job: Job) -> Outcome:
    dtype, rows = job
    if isinstance(rows[0], str):
        return outcome([USUAL[name] for name in rows], dtype)
    tried = (pair_at(item) if len(item) == 3 else pair_of(item, dtype) for item in rows)
    pairs = [pair for pair in tried if pair is not None]
    return _all_of([pair for pair in pairs if pair.gives_numbers], [p for p in pairs if not p.gives_numbers], dtype)


def _all_of(numbers: list[Pair], others: list[Pair], dtype: str) -> Outcome:
    """Positions and booleans have few operators that take them: alone, so that the others need no second try."""
    groups = [numbers] if numbers else []
    found = [outcome(group, dtype) for group in [*groups, *([pair] for pair in others)]]
    return sum(found, Outcome.empty())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", default=["qint8", "qint16"])
    parser.add_argument("--first", type=int, default=0, help="leave out this many pairs")
    parser.add_argument("--count", type=int, help="stop after this many pairs")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--all", action="store_true", help="every ordered pair of rows of the operator table")
    parser.add_argument("--only", default="", help="only pairs with this in the name of an operator")
    options = parser.parse_args()
    _start()
    begin = time.time()
    jobs: list[Job] = []
    for dtype in options.formats:
        pairs: list[Any] = (
            [rows for rows in row_pairs() if options.only in " > ".join(rows)]
            if options.all
            else [pair.key for pair in covering(dtype) if options.only in pair.name]
        )
        chosen = pairs[options.first :][: options.count]
        print(f"{dtype}: {len(chosen)} pairs of operators and {len(USUAL)} usual sequences", flush=True)
        for items in (list(USUAL), chosen):
            jobs += [(dtype, items[i : i + _AT_ONCE]) for i in range(0, len(items), _AT_ONCE)]
    total = Outcome.empty()
    with ProcessPoolExecutor(options.jobs, initializer=_start) as pool:
        for found in tqdm(pool.map(_outcome, jobs), total=len(jobs), disable=None):
            total += found
            for text in [*map(str, found.differences), *(f"{name}: {text}" for name, text in found.broken)]:
                print(text, flush=True)
    reasons = collections.Counter(re.sub(r"`[^`]*`|\([^)]*\)|[\d.]+", "_", text)[:90] for _, text in total.refused)
    print(*(f"{count} refused: {reason}" for reason, count in reasons.most_common()), sep="\n")
    wrong = len({d.name for d in total.differences})
    print(
        f"{total.compared} sequences compared at every level, {wrong} differ, {len(total.broken)} broken, "
        f"{len(total.refused)} refused, {time.time() - begin:.0f} s"
    )
    return bool(wrong or total.broken)


if __name__ == "__main__":
    raise SystemExit(main())
